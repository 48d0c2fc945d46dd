"""Send a data set from the notebook's machine when no node can read it.

Covers: the node that reads it as the first of the chain; its route to the next, directly or else through ssh.
Does not cover: the transfer (``pipeline``), when it is needed (``client``).
"""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import uuid
from typing import TYPE_CHECKING

from ...client.transport.ssh_tunnel import OPTIONS, tunnel_of
from ...errors import StageError
from ...launchers.ssh import SSH_OPTIONS
from ...protocol.time_limits import FORWARD_SECONDS, STAGE_SENDER_CONNECT_SECONDS, STAGE_SENDER_END_SECONDS
from .links import Links, Place
from .pipeline import PipelineNode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from ...client.startup.launch import Launch


class NotebookSource:
    """The first member of the chain, on this machine, and its route to the next; for use in a ``with`` statement.

    ``source`` is a path on this machine, and ``chain`` the places of the nodes. Raises a StageError if the first node
    can't be reached.
    """

    def __init__(
        self, source: str, launch: Launch, keys: Sequence[str], chain: Sequence[Place], *, verify: bool
    ) -> None:
        self._source, self._launch, self._first = source, launch, chain[0]
        self.place = Place(None, socket.gethostname(), "", "")
        self._via = ""  # the host of the ssh connection; empty if none
        self._forward: subprocess.Popen[bytes] | None = None
        self._socket = launch.folders.local / f"stage-{uuid.uuid4().hex[:8]}"
        try:
            first = chain[0]._replace(url=self._way())
            self.node = PipelineNode(source, Links(keys, None), None)
        except BaseException:  # also after an interrupt, no ssh stays
            self._end_ssh()
            raise
        self.node.start([self.place, first, *chain[1:]], 0, verify=verify)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.node.stop("the notebook was interrupted, or a node has failed")
        self.node.done.wait(STAGE_SENDER_END_SECONDS)
        self._end_ssh()

    @property
    def fault(self) -> str:
        """The error that stopped it; empty if none did."""
        fault = "" if self.node.fault is None else f"{self.place.host}: {self.node.fault}"
        return fault.replace(f"ipc://{self._socket}", f"{self._first.url} through ssh to {self._via}")

    def __str__(self) -> str:
        """Describe this machine."""
        way = f", and sent through ssh to {self._via}" if self._via else ""
        return f"{self.place.host}, the notebook's machine{way}"

    def _way(self) -> str:
        """Return the ZeroMQ address at which the first node is reached from here."""
        first, launch, here = self._first, self._launch, self.place.host
        target = first.url.partition("://")[2]
        tunnel = tunnel_of(launch.folders.profile)
        if tunnel is not None:
            return self._through_ssh(tunnel.command, tunnel.host, target)
        address, _, port = target.rpartition(":")
        try:
            socket.create_connection((address.strip("[]"), int(port)), timeout=STAGE_SENDER_CONNECT_SECONDS).close()
        except OSError as error:
            if launch.config.hosts:
                assert first.rank is not None
                host = launch.table[first.rank].launch_host
                return self._through_ssh([*shlex.split(launch.config.ssh), *SSH_OPTIONS], host, target)
            raise StageError(
                f"{self._source} is on {here} alone, and {first.host} can't be reached from here at {first.url}: "
                f"{error.strerror or error}; open the ports of the nodes for {here}, or put it on a file system that a "
                "node sees"
            ) from error
        return first.url

    def _through_ssh(self, command: Sequence[str], host: str, target: str) -> str:
        """Forward an address that a host reaches to a Unix socket here, in a folder of the user."""
        self._via = host
        with tempfile.TemporaryFile() as errors:
            self._forward = subprocess.Popen(  # noqa: S603
                # ssh ends when its standard input closes, and so with this process, however that ends.
                [*command, *OPTIONS, "-L", f"{self._socket}:{target}", host, "echo forwards; exec cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # an interrupt of the notebook must not reach it
            )
            assert self._forward.stdout is not None
            timer = threading.Timer(FORWARD_SECONDS, self._forward.kill)
            timer.start()
            printed = b""
            try:
                for line in self._forward.stdout:
                    printed += line
                    if line.endswith(b"forwards\n"):  # ssh runs the command last; the login may print before it
                        return f"ipc://{self._socket}"
            finally:
                timer.cancel()
            errors.seek(0)
            reason = " ".join((errors.read() + printed).decode(errors="replace").split())[-300:]
            if self._forward.wait() == -signal.SIGKILL:
                reason = f"no reply within {FORWARD_SECONDS:g} s {reason}".rstrip()
            reason = reason or "ssh ended without a message"
            raise StageError(
                f"{self._source} is on {self.place.host} alone, and can't be sent through ssh to {host}: "
                f"{reason}; try: {shlex.join([*command, host, 'true'])}"
            )

    def _end_ssh(self) -> None:
        if self._forward is not None:
            try:
                self._forward.communicate(timeout=STAGE_SENDER_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._forward.kill()
                self._forward.communicate()
        self._socket.unlink(missing_ok=True)
