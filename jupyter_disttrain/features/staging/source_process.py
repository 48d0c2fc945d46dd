"""Send a data set from the notebook's machine when no node can read it.

Covers: the process that reads it; its route to the first node, directly or else through ssh; its end.
Does not cover: the transfer (``features.staging.source_main``), when it is needed (``client``).
"""

from __future__ import annotations

import json
import os
import select
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...client.transport.ssh_tunnel import OPTIONS, tunnel_of
from ...errors import StageError
from ...launchers.ssh import SSH_OPTIONS
from ...protocol.time_limits import (
    FORWARD_SECONDS,
    KEY_SECONDS,
    STAGE_SENDER_CONNECT_SECONDS,
    STAGE_SENDER_END_SECONDS,
    STAGE_SENDER_POLL_SECONDS,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

    from ...client.startup.launch import Launch


class Sender:
    """The first member of the transfer chain, on this machine, and its route to the next.

    Parameters
    ----------
    source
        A path on this machine.
    launch
        The cluster's launch.
    first
        The first node's place in the chain: see ``features.staging.peers.Place``.

    Raises
    ------
    StageError
        If it can't be started, or that node can't be reached.
    """

    def __init__(self, source: str, launch: Launch, first: Mapping[str, Any]) -> None:
        self.host = socket.gethostname()
        self.via = ""  # the host of the ssh connection; empty if none
        self._source = source
        self._forward: subprocess.Popen[bytes] | None = None
        self._socket = launch.folders.local / f"stage-{uuid.uuid4().hex[:8]}"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jupyter_disttrain.features.staging.source_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # an interrupt of the notebook reaches it through the nodes
            env=os.environ | {"PYTHONSAFEPATH": "1"},
        )
        try:
            self._url = self._way(launch, first)
            key = self._read_key()
        except BaseException:  # also after an interrupt, no process stays
            self.close()
            raise
        mark = f"mark-{uuid.uuid4().hex[:8]}"
        self.place = {"rank": None, "host": self.host, "url": "", "key": key, "mark": mark}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # Route to the first node

    def _way(self, launch: Launch, first: Mapping[str, Any]) -> str:
        """Return the ZeroMQ address at which the first node is reached from here."""
        url = str(first["url"])
        target = self._target = url.partition("://")[2]
        tunnel = tunnel_of(launch.folders.profile)
        if tunnel is not None:
            return self._through_ssh(tunnel.command, tunnel.host, target)
        address, _, port = target.rpartition(":")
        try:
            socket.create_connection((address.strip("[]"), int(port)), timeout=STAGE_SENDER_CONNECT_SECONDS).close()
        except OSError as error:
            if launch.config.hosts:
                host = launch.table[first["rank"]].launch_host
                return self._through_ssh([*shlex.split(launch.config.ssh), *SSH_OPTIONS], host, target)
            raise StageError(
                f"{self._source} is only on {self.host}, and {first['host']} can't be reached from here at {url}: "
                f"{error.strerror or error}; open the ports of the nodes for {self.host}, or put it on a file system "
                "that a node can read"
            ) from error
        return url

    def _through_ssh(self, command: Sequence[str], host: str, target: str) -> str:
        """Forward an address that a host reaches to a Unix socket here, in a folder of the user."""
        self.via = host
        self._forward = subprocess.Popen(  # noqa: S603
            # ssh ends when its standard input closes, and so with this process, however that ends.
            [*command, *OPTIONS, "-L", f"{self._socket}:{target}", host, "exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
        )
        deadline = time.monotonic() + FORWARD_SECONDS
        while not self._socket.exists():
            if self._forward.poll() is not None or time.monotonic() > deadline:
                reason = self._error_output() or f"the forwarding did not start within {FORWARD_SECONDS:g} s"
                raise StageError(
                    f"{self._source} is only on {self.host}, and can't be sent through ssh to {host}: {reason}; try: "
                    f"{shlex.join([*command, host, 'true'])}"
                )
            time.sleep(STAGE_SENDER_POLL_SECONDS)
        return f"ipc://{self._socket}"

    # The process

    def _read_key(self) -> str:
        message = self._read(KEY_SECONDS)
        if message is None:
            raise StageError(
                f"{self._source} can't be sent from {self.host}: {self._error_output() or 'its process ended'}"
            )
        return str(message["key"])

    def start(self, chain: Sequence[dict[str, Any]], *, verify: bool) -> None:
        """Start the transfer along a chain of nodes; ``verify``: see ``staging.client.Staging.stage``."""
        first, *others = chain
        asked = {"source": self._source, "verify": verify}
        asked["chain"] = [self.place, first | {"url": self._url}, *others]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()

    def finish(self) -> dict[str, Any]:
        """Return the sender's report, once the nodes have ended successfully.

        Raises
        ------
        StageError
            If the process ended without a report.
        """
        message = self._read(STAGE_SENDER_END_SECONDS)
        if message is None:
            raise StageError(f"the process that sent {self._source} from {self.host} was ended: {self._error_output()}")
        return message

    @property
    def fault(self) -> str:
        """The error that stopped the sender, if it failed first; empty if it did not, or if it does not report."""
        fault = str((self._read(STAGE_SENDER_END_SECONDS) or {}).get("fault", ""))
        return fault.replace(self._url, f"{self._target} through ssh to {self.via}") if self.via else fault

    def _read(self, patience_s: float) -> dict[str, Any] | None:
        """Return the next line that the process prints; None if there is none within the time limit."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], patience_s)
        line = self._process.stdout.readline() if readable else b""
        message: dict[str, Any] | None = json.loads(line) if line else None
        return message

    def _error_output(self) -> str:
        self._errors.seek(0)
        return " ".join(self._errors.read().decode(errors="replace").split())[-300:]

    def close(self) -> None:
        """End the process and the ssh forwarding."""
        for process in (self._process, self._forward):
            if process is None:
                continue
            assert process.stdin is not None
            try:
                process.communicate(timeout=STAGE_SENDER_END_SECONDS)  # the process ends when its standard input closes
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        self._errors.close()
        Path(self._socket).unlink(missing_ok=True)
