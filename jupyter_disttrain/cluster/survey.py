"""Ask all hosts at once what they have.

Covers: one command for each host (an ssh, or another way there) with the probe at its other end, time limits, who
reaches whom, ending every command.
Does not cover: what the answers mean (``preflight``), what is asked there (``host_probe``), the nodes of a Slurm job
(``slurm.node_survey``).

One thread waits for all of them, so that an interrupt ends it at once.
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

from ..errors import LaunchError
from . import host_probe
from .host_report import SILENT, HostReport, own_addresses, read_report
from .interrupts import deferred_interrupts
from .network import choose_network

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from .host_report import Wanted

    Way = Callable[[str, list[str]], list[str]]  # from a host and a command, to the one here that runs it there

CONNECT_SECONDS = 8  # for ssh to reach a host
END_SECONDS = 1.0  # for an ssh to end by itself
SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}")
LONGEST_SAID = 4000  # characters of what ssh complained of
CLIENT = ""  # its name among those that hosts try to reach
_READ_BYTES = 1 << 16
# The probe comes through the same pipe as the requests: its length, and then itself. An older Python could not read it.
_BOOT = (
    "import sys;sys.version_info<(3,10) and sys.exit('this is Python %d.%d'%sys.version_info[:2]);"
    "i=sys.stdin.buffer;exec(i.read(int(i.readline())))"
)


def survey(hosts: Sequence[str], ssh: Sequence[str], wanted: Wanted) -> list[HostReport]:
    """Ask all hosts at once; when it returns, none of what it started runs any more, here or there.

    Parameters
    ----------
    hosts
        As ssh takes them.
    ssh
        The command that runs another one on a host, e.g. ``["ssh"]``; it takes OpenSSH's options.
    wanted
        What the hosts are asked for.

    Returns
    -------
    list of HostReport
        In the order of ``hosts``, also for those that could not be asked. Who reaches whom is known where
        ``choose_network`` finds a network in which those that answered are.

    Raises
    ------
    LaunchError
        If there is no such ssh, or if no file can be written into the shared folder.
    UsageError
        If ``wanted.interface`` can't be read.
    """
    return survey_by(lambda host, command: [*ssh, *SSH_OPTIONS, host, shlex.join(command)], hosts, wanted, {})


def survey_by(way: Way, hosts: Sequence[str], wanted: Wanted, reached: Mapping[str, str]) -> list[HostReport]:
    """Ask all hosts at once, as :func:`survey` does, by another way than ssh.

    Parameters
    ----------
    way
        Returns the command that runs another one on a host, its input and output those of here.
    hosts
        As ``way`` takes them.
    wanted
        What the hosts are asked for.
    reached
        At which addresses the way leads to them, by host, as far as they can't tell that by themselves.
    """
    talks: list[_Talk] = []
    try:
        with _nonce(wanted) as nonce:
            request = _request(wanted, nonce)
            for host in hosts:
                with deferred_interrupts():  # one that runs and is in no list would never be ended
                    talks.append(_Talk(host, way, wanted))
                talks[-1].begin(request)
            _hear(talks, wanted.limit_s)
        reports = [_at(talk.report(), reached.get(talk.host)) for talk in talks]
        return _who_reaches_whom(talks, reports, wanted)
    finally:
        with deferred_interrupts():
            _end(talks)


def _at(report: HostReport, address: str | None) -> HostReport:
    return report if address is None else replace(report, ssh_address=address)


def _request(wanted: Wanted, nonce: str) -> dict[str, Any]:
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
def _nonce(wanted: Wanted) -> Iterator[str]:
    """Put a file into the shared folder that no other folder has; its name is its content."""
    name = f".disttrain-{secrets.token_hex(8)}"
    if wanted.shared_folder is None:
        yield name
        return
    path = wanted.shared_folder / name
    try:
        path.write_text(name)
    except OSError as error:
        raise LaunchError(
            f"cannot write into {wanted.shared_folder} on this machine: {error.strerror}; make room or mend its rights"
        ) from error
    try:
        yield name
    finally:
        path.unlink(missing_ok=True)


def _who_reaches_whom(talks: Sequence[_Talk], reports: list[HostReport], wanted: Wanted) -> list[HostReport]:
    """Have every host that answered open a port on its address, and try those of all others and one of this machine."""
    try:
        network = choose_network(own_addresses(), reports, wanted.interface)
    except LaunchError:
        return reports  # whoever chooses the network next tells it
    addresses = {node.name: node.address for node in network.nodes}
    inside = {talk.host: talk for talk in talks if talk.host in addresses}
    ports = {host: told.get("port", 0) for host, told in _ask_each(inside, addresses, wanted).items()}
    targets = {host: (addresses[host], port) for host, port in ports.items() if port}
    with _listener(network.client_address) as targets[CLIENT]:
        named = {host: [name for name in targets if name != host] for host in ports if ports[host]}
        for host, names in named.items():
            limits = {"limit_s": wanted.reach_s, "targets": [targets[name] for name in names]}
            inside[host].ask({"ask": "reach", **limits})
        _hear([inside[host] for host in named], wanted.reach_s + wanted.limit_s)
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


def _ask_each(inside: Mapping[str, _Talk], addresses: Mapping[str, str], wanted: Wanted) -> dict[str, dict[str, Any]]:
    """Have each open a port on its address, and return what each told."""
    for host, talk in inside.items():
        talk.ask({"ask": "listen", "address": addresses[host]})
    _hear(list(inside.values()), wanted.limit_s)
    return {host: talk.answer or {} for host, talk in inside.items()}


def _outcome(talk: _Talk, names: Sequence[str]) -> dict[str, Any]:
    """Return whom a host did not reach, why it could not try, or that it fell silent."""
    if talk.answer is None:
        return {"failure": talk.why or SILENT}
    unreached = {name: why for name, why in zip(names, talk.answer.get("reached", ()), strict=False) if why}
    return {"unreached": unreached, "unopened": talk.answer.get("why", "")}


@contextlib.contextmanager
def _listener(address: str) -> Iterator[tuple[str, int]]:
    listener, answer = host_probe.listen(address)
    if listener is None:
        raise LaunchError(f"cannot listen on {address}, an address of this machine: {answer['why']}")
    with listener:
        yield address, answer["port"]


class _Talk:
    """One command that leads to a host, and the probe at its other end."""

    def __init__(self, host: str, way: Way, wanted: Wanted) -> None:
        self.host = host
        self.answer: dict[str, Any] | None = None  # to the last question
        self.answered_s = 0.0
        self._out, self._err = b"", b""
        self._chatter = ""  # that is no answer
        self.has_ended = False  # it says nothing more
        # What Python itself may need to be loaded; it takes PYTHONPATH from the request.
        early = ["env", f"LD_LIBRARY_PATH={wanted.library_path}"] if wanted.library_path else []
        command = way(host, [*early, wanted.python, "-c", _BOOT])
        try:
            self.process = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "LC_ALL": "C"},  # its complaints are read
                start_new_session=True,  # so that what it starts, such as a jump host's ssh, can be ended with it
            )
        except OSError as error:
            raise LaunchError(
                f"cannot run {command[0]}: {error.strerror}; install OpenSSH's client, or name another command"
            ) from error
        for pipe in self.pipes:
            os.set_blocking(pipe, False)

    @property
    def pipes(self) -> tuple[int, int]:
        """What it says, and what it complains of."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        return self.process.stdout.fileno(), self.process.stderr.fileno()

    @property
    def why(self) -> str:
        """What it complained of, after what a shell or nologin may have said in place of an answer."""
        return f"{self._chatter}{self._err.decode(errors='replace')}".strip()[-LONGEST_SAID:]

    def begin(self, request: Mapping[str, Any]) -> None:
        """Send the probe and the first question."""
        program = Path(host_probe.__file__).read_bytes()
        self._send(b"%d\n%s" % (len(program), program))
        self.ask(request)

    def ask(self, request: Mapping[str, Any]) -> None:
        """Ask the next question."""
        self.answer = None
        self._send(json.dumps(request).encode() + b"\n")

    def _send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(data)
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and what it complained of says why

    def read(self, pipe: int) -> bool:
        """Take what has come; False at its end."""
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return True
        if pipe == self.pipes[1]:
            self._err += data
        else:
            self._out += data
            self.has_ended = self.has_ended or not data
            self._look_for_answer()
        return bool(data)

    def _look_for_answer(self) -> None:
        while b"\n" in self._out:
            line, _, self._out = self._out.partition(b"\n")
            # A login script's words may come before it, even in the same line.
            before, mark, said = line.decode(errors="replace").partition(host_probe.MARK)
            self._chatter = f"{self._chatter}{before}\n"[-LONGEST_SAID:]
            if mark:
                self.answer, self.answered_s = json.loads(said), time.time()

    def report(self) -> HostReport:
        """Return what it said of its host, or why it said nothing."""
        if self.answer is not None:
            return read_report(self.host, self.answer, self.answered_s)
        code = None
        if self.has_ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(END_SECONDS)
            while self.read(self.pipes[1]) and self._more_to_read():
                pass
        return HostReport(name=self.host, failure=self.why or SILENT, exit_code=code)

    def _more_to_read(self) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self.pipes[1], selectors.EVENT_READ)
            return bool(selector.select(0))


def _hear(talks: Sequence[_Talk], limit_s: float) -> None:
    """Wait until each has answered or ended, or until the time is over."""
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
    """End every ssh: by closing its input, which the probe takes for the end, else by signals."""
    for talk in talks:
        assert talk.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            talk.process.stdin.close()
    answered = [talk for talk in talks if talk.answer is not None or talk.has_ended]
    deadline = time.monotonic() + END_SECONDS
    for talk in answered:
        with contextlib.suppress(subprocess.TimeoutExpired):
            talk.process.wait(max(0.0, deadline - time.monotonic()))
    for number in (signal.SIGTERM, signal.SIGKILL):
        alive = [talk for talk in talks if talk.process.poll() is None]
        for talk in alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(talk.process.pid, number)
        deadline = time.monotonic() + END_SECONDS
        for talk in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                talk.process.wait(max(0.0, deadline - time.monotonic()))
    for talk in talks:
        with talk.process:  # closes its pipes
            pass
