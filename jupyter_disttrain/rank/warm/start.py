"""Have a warm process fork: the side of the process that asks for it.

Covers: finding or starting the warm process, what it is sent, waiting for what it has forked; the nannies of a process
that a launcher has started.
Does not cover: the warm process (``process``), nannies that this process forks itself (``rank.nannies``), programs
(``features.scripts.programs``).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import LaunchError
from ...process_table import WARM_PROCESS, runs
from ...protocol.time_limits import OWNER_SECONDS, WARM_LISTEN_SECONDS, WARM_RETRY_SECONDS
from ..nannies import signal_all
from . import channel
from .label import import_environment, label_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NANNY, PROGRAM = "nanny", "program"  # what a fork becomes


class Wanted(NamedTuple):
    """What a fork becomes: see ``forked.become``."""

    what: str  # which of the functions of the warm process it runs
    environment: Mapping[str, str]
    folder: int  # a descriptor of the working directory
    arguments: Sequence[str]  # the command that is shown
    named: Mapping[str, int]  # descriptors that the function gets, by name
    numbered: Mapping[int, int]  # other descriptors, by the number that they get
    forks: int = 1  # number of processes to fork; a tuple has a method ``count``

    def to_content(self) -> dict[str, Any]:
        """Return the JSON form, with the state of this process that a program started by it would inherit."""
        return {
            "what": self.what,
            "count": self.forks,
            "environment": dict(self.environment),
            "arguments": list(self.arguments),
            "named": list(self.named),
            "numbers": list(self.numbered),
            "umask": _umask(),
            "limits": [[number, *resource.getrlimit(number)] for number in _limits()],
            "affinity": sorted(os.sched_getaffinity(0)),
            "ignored": [int(each) for each in signal.valid_signals() if signal.getsignal(each) is signal.SIG_IGN],
        }


class Forks:
    """Processes that a warm process has forked for this one; all ends of them are reported here."""

    def __init__(self, sock: socket.socket, started: Mapping[int, str]) -> None:
        self._sock = sock
        self._started = dict(started)
        self.is_abandoned = False  # the warm process was killed

    @property
    def pids(self) -> list[int]:
        """The processes that have not ended."""
        return list(self._started)

    def signal(self, number: int) -> None:
        """Send a signal to all of them that run."""
        signal_all(self.pids, number)

    def fileno(self) -> int:
        """Return the descriptor that is readable once one of them has ended."""
        return self._sock.fileno()

    def wait(self) -> tuple[int, int | None]:
        """Wait for the end of the next one; return its process ID and its status as from ``os.waitpid``.

        The status is None if the warm process was killed, which nothing that it has forked depends on.
        """
        while (end := self.poll()) is None:
            time.sleep(OWNER_SECONDS)
        return end

    def poll(self) -> tuple[int, int | None] | None:
        """Return the next end, for which this waits, as :meth:`wait` does.

        Once ``is_abandoned``, None if none has ended, without waiting.
        """
        message = None if self.is_abandoned else channel.receive(self._sock)[0]
        if message is not None:
            del self._started[message["ended"]]
            return message["ended"], message["status"]
        self.is_abandoned = True
        for pid, started in self._started.items():
            if not runs(pid, started):
                del self._started[pid]
                return pid, None
        return None

    def close(self) -> None:
        """End the connection: the warm process then kills what is left of the sessions of programs."""
        self._sock.close()


class WarmNannies(Forks):
    """Nannies that a warm process has forked for this process, which waits for them to the end."""

    def __init__(self, forks: Forks, lifeline: int | None) -> None:
        super().__init__(forks._sock, forks._started)  # noqa: SLF001
        self._lifeline = lifeline  # closed with this process, which the nanny sees

    def wait(self) -> tuple[int, int]:
        """Wait as :class:`Forks` does; an unknown status counts as 0."""
        pid, status = super().wait()
        return pid, status or 0


def fork_nannies(count: int) -> WarmNannies:
    """Have the warm process for this process's environment fork nannies, in this process's state.

    A single nanny ends its rank when this process is killed: a launcher that kills it means the rank.

    Raises
    ------
    LaunchError
        If it can't, with the reason.
    """
    ends = os.pipe() if count == 1 else None
    folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
    try:
        forks = fork(
            Wanted(
                what=NANNY,
                forks=count,
                environment=os.environ,
                folder=folder,
                arguments=[sys.executable, *sys.orig_argv[1:]],
                named={"lifeline": ends[0]} if ends else {},
                numbered={number: number for number in (0, 1, 2, *_inherited())},
            )
        )
    finally:
        os.close(folder)
        if ends:
            os.close(ends[0])
    return WarmNannies(forks, ends and ends[1])


def fork(wanted: Wanted) -> Forks:
    """Have the warm process for an environment fork processes.

    Raises
    ------
    LaunchError
        If it can't, with the reason.
    """
    request = wanted.to_content()
    descriptors = [wanted.folder, *wanted.named.values(), *wanted.numbered.values()]
    environment = import_environment(wanted.environment, str(Path(f"/proc/self/fd/{wanted.folder}").readlink()))
    for _ in range(2):  # a warm process that nothing needed may have ended just after the connection
        sock = connect(environment)
        reply = None
        with contextlib.suppress(OSError):
            channel.send(sock, request, descriptors)
            reply, _ = channel.receive(sock)
        if reply is not None and "forked" in reply:
            return Forks(sock, {int(pid): started for pid, started in reply["forked"].items()})
        sock.close()
        if reply is not None:
            raise LaunchError(reply["reason"])
    raise LaunchError("the warm process ended while it imported its modules")


def connect(environment: Mapping[str, str]) -> socket.socket:
    """Connect to the warm process for an environment, from ``label.import_environment``; start one if there is none.

    It ends some time after its last connection has closed and its last fork has ended.

    Raises
    ------
    LaunchError
        If it can't be used, with the reason.
    """
    address = channel.address_of(label_of(environment))
    deadline = time.monotonic() + WARM_LISTEN_SECONDS
    process: subprocess.Popen[bytes] | None = None
    while True:
        sock = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(ConnectionRefusedError):
            sock.connect(address)
            break
        sock.close()
        if process is None:
            process = _start(address, environment)
        elif time.monotonic() > deadline:
            raise LaunchError(f"the warm process did not start within {WARM_LISTEN_SECONDS:g} s")
        time.sleep(WARM_RETRY_SECONDS)
    if not channel.belongs_to_us(sock):
        sock.close()
        raise LaunchError("another user's process has the name of its socket")
    return sock


def _start(address: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a warm process; one that finds another with the same address exits."""
    command = [sys.executable, "-m", WARM_PROCESS, address.removeprefix("\0")]
    environment = {**environment, "PYTHONSAFEPATH": "1"}
    process = subprocess.Popen(  # noqa: S603
        command, env=environment, stdin=subprocess.DEVNULL, cwd="/", start_new_session=True
    )
    process.returncode = 0  # it outlives this process: no warning, and no waiting for it
    return process


def _inherited() -> list[int]:
    """Return the file descriptors, above 2, that a program started by this process would have."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # the folder's own descriptor is closed by now
            if int(name) > 2 and os.get_inheritable(int(name)):  # noqa: PLR2004
                found.append(int(name))
    return sorted(found)[: channel.MOST_DESCRIPTORS - 5]


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _limits() -> list[int]:
    return sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
