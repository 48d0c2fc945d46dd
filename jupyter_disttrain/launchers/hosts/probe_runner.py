"""Query all hosts at once.

Covers: one command for each host (ssh, or another way to reach it) that runs the probe there, time limits, which hosts
reach each other, ending every command.
Does not cover: judging the reports (``preflight``), the checks on a host (``probe``), the nodes of a Slurm job
(``client.startup.host_placement``).

A single thread waits for all of them, so that an interrupt ends the survey at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shlex
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import LaunchError
from ...protocol.time_limits import SURVEY_CONNECT_SECONDS, SURVEY_END_SECONDS
from ...sigint import deferred_interrupts
from . import probe
from .network import choose_network
from .report import SILENT, HostReport, own_addresses, read_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from .report import HostRequirements

    # Takes a host and a command; returns the local command that runs it there.
    Way = Callable[[str, list[str]], list[str]]

SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={SURVEY_CONNECT_SECONDS}")
LONGEST_OUTPUT = 4000  # characters of error output that are kept
CLIENT = ""  # this machine's name among the targets that hosts try to reach
_READ_BYTES = 1 << 16
# The probe is sent through the same pipe as the requests: its length, then its source. Pythons older than 3.10 can't
# run it.
_BOOT = (
    "import sys;sys.version_info<(3,10) and sys.exit('this is Python %d.%d'%sys.version_info[:2]);"
    "i=sys.stdin.buffer;exec(i.read(int(i.readline())))"
)


def survey(hosts: Sequence[str], ssh: Sequence[str], wanted: HostRequirements) -> list[HostReport]:
    """Query all hosts at once; when it returns, every process that it started has ended, here and on the hosts.

    Parameters
    ----------
    hosts
        The hosts, as ssh takes them.
    ssh
        The command that runs another one on a host, e.g. ``["ssh"]``; it takes OpenSSH's options.
    wanted
        What the hosts are asked for.

    Returns
    -------
    list of HostReport
        In the order of ``hosts``, also for those that could not be queried. Which hosts reach each other is known if
        ``choose_network`` finds a network that all hosts that replied share.

    Raises
    ------
    LaunchError
        If there is no such ssh, or if no file can be written into the shared folder.
    UsageError
        If ``wanted.interface`` can't be parsed.
    """
    return survey_by(lambda host, command: [*ssh, *SSH_OPTIONS, host, shlex.join(command)], hosts, wanted, {})


def survey_by(way: Way, hosts: Sequence[str], wanted: HostRequirements, reached: Mapping[str, str]) -> list[HostReport]:
    """Query all hosts at once, as :func:`survey` does, by another command than ssh.

    ``way`` returns the command that runs another one on a host, with its input and output connected to this process;
    ``reached`` has the address at which it reaches a host, by host, for hosts that can't report it themselves.
    """
    talks: list[_Talk] = []
    try:
        with _nonce(wanted) as nonce:
            request = _request(wanted, nonce)
            for host in hosts:
                with deferred_interrupts():  # a process that is not in the list would never be ended
                    talks.append(_Talk(host, way, wanted))
                talks[-1].begin(request)
            _receive_all(talks, wanted.limit_s)
        reports = [talk.report() for talk in talks]
        reports = [replace(each, ssh_address=reached.get(each.name, each.ssh_address)) for each in reports]
        return _who_reaches_whom(talks, reports, wanted)
    finally:
        with deferred_interrupts():
            _end(talks)


def _request(wanted: HostRequirements, nonce: str) -> dict[str, Any]:
    return {
        "ask": "report",
        "mpiexec": wanted.mpiexec or "",
        "python_path": wanted.python_path,
        "shared_folder": str(wanted.shared_folder or ""),
        "nonce": nonce,
        "temporary_folder": wanted.temporary_folder,
        "working_folder": wanted.working_folder,
    }


@contextlib.contextmanager
def _nonce(wanted: HostRequirements) -> Iterator[str]:
    """Create a file with a unique name in the shared folder; its content is its name."""
    name = f".disttrain-{secrets.token_hex(8)}"
    if wanted.shared_folder is None:
        yield name
        return
    path = wanted.shared_folder / name
    try:
        path.write_text(name)
    except OSError as error:
        raise LaunchError(
            f"cannot write into {wanted.shared_folder} on this machine: {error.strerror}; free disk space "
            "or correct its permissions"
        ) from error
    try:
        yield name
    finally:
        path.unlink(missing_ok=True)


def _who_reaches_whom(talks: Sequence[_Talk], reports: list[HostReport], wanted: HostRequirements) -> list[HostReport]:
    """Let every host that replied listen on its address, and connect to all others and to this machine."""
    try:
        network = choose_network(own_addresses(), reports, wanted.interface)
    except LaunchError:
        return reports  # choosing the network again later reports the error
    addresses = {node.name: node.address for node in network.nodes}
    inside = {talk.host: talk for talk in talks if talk.host in addresses}
    for host, talk in inside.items():
        talk.ask({"ask": "listen", "address": addresses[host]})
    _receive_all(list(inside.values()), wanted.limit_s)
    ports = {host: (talk.answer or {}).get("port", 0) for host, talk in inside.items()}
    targets = {host: (addresses[host], port) for host, port in ports.items() if port}
    with _listener(network.client_address) as targets[CLIENT]:
        named = {host: [name for name in targets if name != host] for host in ports if ports[host]}
        for host, names in named.items():
            limits = {"limit_s": wanted.reach_s, "targets": [targets[name] for name in names]}
            inside[host].ask({"ask": "reach", **limits})
        _receive_all([inside[host] for host in named], wanted.reach_s + wanted.limit_s)
    return [
        replace(
            report,
            client_address=network.client_address,
            address=addresses[report.name],
            port=ports[report.name],
            **_outcome(inside[report.name], named.get(report.name, [])),
        )
        if report.name in inside
        else report
        for report in reports
    ]


def _outcome(talk: _Talk, names: Sequence[str]) -> dict[str, Any]:
    """Return which hosts a host did not reach, why it could not try, or that it did not reply."""
    if talk.answer is None:
        return {"failure": talk.why or SILENT}
    unreached = {name: why for name, why in zip(names, talk.answer.get("reached", ()), strict=False) if why}
    return {"unreached": unreached, "unopened": talk.answer.get("why", "")}


@contextlib.contextmanager
def _listener(address: str) -> Iterator[tuple[str, int]]:
    listener, answer = probe.listen(address)
    if listener is None:
        raise LaunchError(f"cannot listen on {address}, an address of this machine: {answer['why']}")
    with listener:
        yield address, answer["port"]


class _Talk:
    """A command that reaches a host, and the probe that it runs there."""

    def __init__(self, host: str, way: Way, wanted: HostRequirements) -> None:
        self.host = host
        self.answer: dict[str, Any] | None = None  # to the last request
        self.answered_s = 0.0
        self._out, self._err = b"", b""
        self._chatter = ""  # output before a reply, e.g. of a login script
        self.has_ended = False  # end of its output
        # Needed to load Python itself; the probe takes PYTHONPATH from the request.
        early = ["env", f"LD_LIBRARY_PATH={wanted.library_path}"] if wanted.library_path else []
        command = way(host, [*early, wanted.python, "-c", _BOOT])
        try:
            self.process = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "LC_ALL": "C"},  # error messages are parsed
                start_new_session=True,  # so that its children, such as a jump host's ssh, can be ended with it
            )
        except OSError as error:
            raise LaunchError(
                f"cannot run {command[0]}: {error.strerror}; install OpenSSH's client, or name another command"
            ) from error
        for pipe in self.pipes:
            os.set_blocking(pipe, False)

    @property
    def pipes(self) -> tuple[int, int]:
        """File descriptors of its stdout and stderr."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        return self.process.stdout.fileno(), self.process.stderr.fileno()

    @property
    def why(self) -> str:
        """Its error output, after any output of a shell or nologin that preceded a reply."""
        return f"{self._chatter}{self._err.decode(errors='replace')}".strip()[-LONGEST_OUTPUT:]

    def begin(self, request: Mapping[str, Any]) -> None:
        """Send the probe and the first request."""
        program = Path(probe.__file__).read_bytes()
        self._send(b"%d\n%s" % (len(program), program))
        self.ask(request)

    def ask(self, request: Mapping[str, Any]) -> None:
        """Send the next request."""
        self.answer = None
        self._send(json.dumps(request).encode() + b"\n")

    def _send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(data)
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; its error output has the reason

    def read(self, pipe: int) -> bool:
        """Read available output; returns False at its end."""
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return True
        if pipe == self.pipes[1]:
            self._err += data
        else:
            self._out += data
            self.has_ended = self.has_ended or not data
            self._find_answer()
        return bool(data)

    def _find_answer(self) -> None:
        while b"\n" in self._out:
            line, _, self._out = self._out.partition(b"\n")
            # Output of a login script may precede the reply, even on the same line.
            before, mark, text = line.decode(errors="replace").partition(probe.MARK)
            self._chatter = f"{self._chatter}{before}\n"[-LONGEST_OUTPUT:]
            if mark:
                self.answer, self.answered_s = json.loads(text), time.time()

    def report(self) -> HostReport:
        """Return the host's report, or one with the reason why there is none."""
        if self.answer is not None:
            return read_report(self.host, self.answer, self.answered_s)
        code = None
        if self.has_ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(SURVEY_END_SECONDS)
            while self.read(self.pipes[1]) and self._more_to_read():
                pass
        return HostReport(name=self.host, failure=self.why or SILENT, exit_code=code)

    def _more_to_read(self) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self.pipes[1], selectors.EVENT_READ)
            return bool(selector.select(0))


def _receive_all(talks: Sequence[_Talk], limit_s: float) -> None:
    """Wait until each has replied or ended, or until the time limit."""
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for talk in talks:
            for pipe in talk.pipes:
                selector.register(pipe, selectors.EVENT_READ, talk)
        while any(talk.answer is None and not talk.has_ended for talk in talks):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            for key, _ in selector.select(left):
                if not key.data.read(key.fd):
                    selector.unregister(key.fd)


def _end(talks: Sequence[_Talk]) -> None:
    """End every command: close its input, on which the probe exits, then send signals to those that are left."""
    for talk in talks:
        assert talk.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            talk.process.stdin.close()
    answered = [talk for talk in talks if talk.answer is not None or talk.has_ended]
    deadline = time.monotonic() + SURVEY_END_SECONDS
    for talk in answered:
        with contextlib.suppress(subprocess.TimeoutExpired):
            talk.process.wait(max(0.0, deadline - time.monotonic()))
    for number in (signal.SIGTERM, signal.SIGKILL):
        alive = [talk for talk in talks if talk.process.poll() is None]
        for talk in alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(talk.process.pid, number)
        deadline = time.monotonic() + SURVEY_END_SECONDS
        for talk in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                talk.process.wait(max(0.0, deadline - time.monotonic()))
    for talk in talks:
        with talk.process:  # closes its pipes
            pass
