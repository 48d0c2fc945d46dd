"""Query all hosts at once.

Covers: one command for each host (ssh, or another way to reach it) that runs the probe there, time limits, which hosts
reach each other, ending every command.
Does not cover: judging the reports (``preflight``), the checks on a host (``probe``), the nodes of a Slurm job
(``client.startup.host_placement``).

A thread for each host reads its replies, so that an interrupt ends the survey at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import LaunchError
from ...protocol.time_limits import SURVEY_CONNECT_SECONDS, SURVEY_END_SECONDS
from ...sigint import deferred_interrupts
from ..ssh import SSH_OPTIONS
from . import probe
from .network import choose_network
from .report import SILENT, HostReport, own_addresses, read_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from .report import HostRequirements

    # Takes a host and a command; returns the local command that runs it there.
    Way = Callable[[str, list[str]], list[str]]

LONGEST_OUTPUT = 4000  # characters of error output that are kept
CLIENT = ""  # this machine's name among the targets that hosts try to reach
LET_IN = (
    "open this machine's firewall for the hosts, name another network with --interface, or start the notebook on a "
    "machine in the hosts' network"
)
OPEN_PORTS = (
    "torch and MPI use arbitrary ports between hosts: open them in the firewall for the cluster's network, or name "
    "another network with --interface"
)
# The probe is sent through the same pipe as the requests: its length, then its source. Pythons older than 3.10 can't
# run it.
_BOOT = (
    "import sys;sys.version_info<(3,10) and sys.exit('this is Python %d.%d'%sys.version_info[:2]);"
    "i=sys.stdin.buffer;exec(i.read(int(i.readline())))"
)


def survey(hosts: Sequence[str], ssh: Sequence[str], wanted: HostRequirements) -> list[HostReport]:
    """Query all hosts at once over ``ssh``, a command that takes OpenSSH's options; see :func:`survey_by`."""
    options = ["-T", "-o", f"ConnectTimeout={SURVEY_CONNECT_SECONDS}", *SSH_OPTIONS]  # ssh uses the first of each
    return survey_by(lambda host, command: [*ssh, *options, host, shlex.join(command)], hosts, wanted, {})


def survey_by(way: Way, hosts: Sequence[str], wanted: HostRequirements, reached: Mapping[str, str]) -> list[HostReport]:
    """Query all hosts at once; when it returns, every process that it started has ended, here and on the hosts.

    The reports are in the order of ``hosts``, also for those that could not be queried. Which hosts reach each other is
    known if ``choose_network`` finds a network that all hosts with addresses share.

    Parameters
    ----------
    way
        Returns the command that runs another one on a host, with its input and output connected to this process.
    reached
        The address at which ``way`` reaches a host, by host, for hosts that can't report it themselves.

    Raises
    ------
    LaunchError
        If the command can't be run, or if no file can be written into the shared folder.
    UsageError
        If ``wanted.interface`` can't be parsed.
    """
    probes: dict[str, _Probe] = {}
    try:
        with _nonce(wanted.shared_folder) as nonce:
            for host in dict.fromkeys(hosts):
                with deferred_interrupts():  # a process that is not in the list would never be ended
                    probes[host] = _Probe(host, way, wanted)
            request = {"ask": "report", "nonce": nonce, **asdict(wanted)}
            answers = _ask(probes, dict.fromkeys(hosts, request), wanted.limit_s)
        reports = [probes[host].report(answers[host]) for host in hosts]
        reports = [replace(each, ssh_address=reached.get(each.name, each.ssh_address)) for each in reports]
        return _connect_all(probes, reports, wanted)
    finally:
        with deferred_interrupts():
            _end(list(probes.values()))


@contextlib.contextmanager
def _nonce(folder: Path | None) -> Iterator[str]:
    """Create a file with a unique name in the shared folder; its content is its name."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", prefix=".disttrain-", dir=folder))
            name = Path(file.name).name
            file.write(name)
            file.flush()
        except OSError as error:
            raise LaunchError(
                f"cannot write into {folder} on this machine: {error.strerror}; free disk space or correct its "
                "permissions"
            ) from error
        yield name


def _connect_all(probes: Mapping[str, _Probe], reports: list[HostReport], wanted: HostRequirements) -> list[HostReport]:
    """Let every host that reported addresses listen on one, and connect to all hosts and to this machine."""
    try:
        network = choose_network(own_addresses(), [each for each in reports if each.addresses], wanted.interface)
    except LaunchError:
        return reports  # choosing the network again later reports the error
    addresses = {host: address.address for host, address in network.addresses.items()}
    listening = {host: {"ask": "listen", "address": address} for host, address in addresses.items()}
    opened = _ask(probes, listening, wanted.limit_s)
    targets = {host: (addresses[host], answer["port"]) for host, answer in opened.items() if answer and answer["port"]}
    try:
        listener, port = probe.listen(network.client_address)
    except OSError as error:
        raise LaunchError(f"cannot listen on {network.client_address}, an address of this machine: {error}") from error
    with listener:
        to_all = {CLIENT: (network.client_address, port), **targets}
        request = {"ask": "connect", "targets": to_all, "limit_s": wanted.reach_s}
        connected = _ask(probes, dict.fromkeys(targets, request), wanted.reach_s + wanted.limit_s)
    found = []
    for report in reports:
        answer = {**opened, **connected}.get(report.name, {})
        if answer is None:
            found.append(replace(report, failure=probes[report.name].why))
        else:
            problems = _connection_problems(report.name, answer, to_all)
            found.append(replace(report, problems=(*report.problems, *problems)))
    return found


def _connection_problems(
    host: str, answer: Mapping[str, Any], targets: Mapping[str, tuple[str, int]]
) -> Iterator[tuple[str, str]]:
    """Yield what prevents connections from a host, each with its remedy."""
    if "why" in answer:
        yield (
            f"no port could be opened on {answer['address']} ({answer['why']})",
            "name another network with --interface",
        )
    errors = dict(answer.get("unreached", {}))
    if CLIENT in errors:
        yield f"can't reach this machine at {targets[CLIENT][0]} ({errors.pop(CLIENT)})", LET_IN
    others = targets.keys() - {CLIENT, host}
    if len(others) > 1 and others <= errors.keys():
        yield f"can't reach any of the other hosts ({', '.join(sorted(set(errors.values())))})", OPEN_PORTS
        return
    for name, error in errors.items():
        address, port = targets[name]
        yield f"can't reach {name} ({address}) on port {port} ({error})", OPEN_PORTS


class _Probe:
    """A command that reaches a host, and the probe that it runs there."""

    def __init__(self, host: str, way: Way, wanted: HostRequirements) -> None:
        self._host = host
        self._answers: queue.SimpleQueue[tuple[dict[str, Any] | None, float]] = queue.SimpleQueue()
        self.answered_s = 0.0  # time of the last reply, in seconds since the epoch; 0: none came
        self._chatter = ""  # output before a reply, e.g. of a login script
        self.has_ended = False  # whether its output has ended
        # Needed to load Python itself; the probe takes PYTHONPATH from the request.
        early = ["env", f"LD_LIBRARY_PATH={wanted.library_path}"] if wanted.library_path else []
        command = way(host, [*early, wanted.python, "-c", _BOOT])
        with contextlib.ExitStack() as undo:
            try:
                # In memory: the error output must not be lost on a full disk.
                self.errors = undo.enter_context(os.fdopen(os.memfd_create("disttrain-errors"), "rb"))
                self.process = subprocess.Popen(  # noqa: S603
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self.errors,
                    env={**os.environ, "LC_ALL": "C"},  # error messages are parsed
                    start_new_session=True,  # so that its children, such as a jump host's ssh, can be ended with it
                )
                undo.enter_context(self.process)  # closes its pipes, and waits for its end
                undo.callback(os.killpg, self.process.pid, signal.SIGKILL)
                threading.Thread(target=self._read, name=f"disttrain survey of {host}", daemon=True).start()
            except OSError as error:
                raise LaunchError(
                    f"cannot run {command[0]}: {error.strerror}; install OpenSSH's client, or name another command"
                ) from error
            except RuntimeError as error:
                raise LaunchError(
                    f"cannot query {host}: {error}; raise this machine's limit of threads and processes (ulimit -u, or "
                    "that of the container)"
                ) from error
            undo.pop_all()
        program = Path(probe.__file__).read_bytes()
        self.send(b"%d\n%s" % (len(program), program))

    def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            with self.process.stdout as output:
                for line in output:
                    # Output of a login script may precede the reply, even on the same line.
                    before, mark, text = line.decode(errors="replace").partition(probe.MARK)
                    self._chatter = f"{self._chatter}{before}\n"[-LONGEST_OUTPUT:]
                    if mark and text.endswith("\n"):  # else it ended within its reply
                        self._answers.put((json.loads(text), time.time()))
        finally:  # also after a reply that can't be read
            self._answers.put((None, 0.0))

    def send(self, data: bytes) -> None:
        """Send the probe, or a request."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; its error output has the reason
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def answer(self, deadline: float) -> dict[str, Any] | None:
        """Wait for the reply to a request; None if the command has ended, or at the deadline."""
        if self.has_ended:
            return None
        try:
            answer, at_s = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None
        self.answered_s = at_s or self.answered_s
        self.has_ended = answer is None
        return answer

    @property
    def why(self) -> str:
        """Its error output, after any output of a shell or nologin that preceded a reply."""
        errors = self.errors.fileno()
        size = os.fstat(errors).st_size
        # The command writes at the position of this file, so that may not be moved.
        read = os.pread(errors, LONGEST_OUTPUT, max(0, size - LONGEST_OUTPUT))
        return f"{self._chatter}{read.decode(errors='replace')}".strip()[-LONGEST_OUTPUT:] or SILENT

    def report(self, answer: Mapping[str, Any] | None) -> HostReport:
        """Return the host's report, or one with the reason why there is none."""
        if answer is not None:
            return read_report(self._host, answer, self.answered_s)
        if self.has_ended:
            _wait([self])
        return HostReport(name=self._host, failure=self.why, exit_code=self.process.poll() if self.has_ended else None)


def _ask(
    probes: Mapping[str, _Probe], requests: Mapping[str, Mapping[str, Any]], limit_s: float
) -> dict[str, dict[str, Any] | None]:
    """Send each host its request, and return the replies; None for a host without one."""
    for host, request in requests.items():
        probes[host].send(json.dumps(request, default=str).encode() + b"\n")
    deadline = time.monotonic() + limit_s
    return {host: probes[host].answer(deadline) for host in requests}


def _end(probes: Sequence[_Probe]) -> None:
    """End every command: close its input, on which the probe exits, then send signals to those that are left."""
    for each in probes:
        assert each.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            each.process.stdin.close()
    _wait([each for each in probes if each.answered_s or each.has_ended])
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = [each for each in probes if each.process.poll() is None]
        for each in left:
            os.killpg(each.process.pid, number)
        _wait(left)
    for each in probes:
        each.errors.close()


def _wait(probes: Sequence[_Probe]) -> None:
    """Wait for commands to end, ``SURVEY_END_SECONDS`` at most."""
    deadline = time.monotonic() + SURVEY_END_SECONDS
    for each in probes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.process.wait(max(0.0, deadline - time.monotonic()))
