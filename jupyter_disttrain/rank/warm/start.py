"""Have a warm process fork: the side of the process that asks for it.

Covers: finding or starting the warm process, what it is sent, waiting for what it has forked; the nannies of a process
that a launcher has started.
Does not cover: the warm process (``warm_process``), nannies that this process forks itself (``rank.cold_nannies``),
programs (``features.scripts.runner``).
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
from typing import TYPE_CHECKING

from ...errors import LaunchError
from ...process_table import WARM_PROCESS, runs
from ...protocol.time_limits import OWNER_SECONDS, WARM_LISTEN_SECONDS, WARM_RETRY_SECONDS
from ..cold_nannies import signal_all
from . import channel
from .start_label import import_environment, label_of, limits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NANNY, PROGRAM = "nanny", "program"  # what a fork becomes


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

    def wait(self) -> tuple[int, int]:
        """Wait for the end of the next one; return what :meth:`poll` does, but 0 as an unknown status."""
        while (end := self.poll()) is None:
            time.sleep(OWNER_SECONDS)
        pid, status = end
        return pid, status or 0

    def poll(self) -> tuple[int, int | None] | None:
        """Return the next end: process ID, and status as from ``os.waitpid``; wait for it unless ``is_abandoned``.

        The status is None if the warm process was killed, which nothing that it has forked depends on. The result is
        None if ``is_abandoned`` and none has ended.
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


def fork_nannies(count: int) -> Forks:
    """Have the warm process for this process's environment fork nannies, in this process's state.

    A single nanny ends its rank when this process is killed: a launcher that kills it means the rank.

    Raises
    ------
    LaunchError
        If it can't, with the reason.
    """
    ends = os.pipe() if count == 1 else None  # the second is closed with this process, which the nanny sees
    folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
    try:
        return fork(
            NANNY,
            count=count,
            environment=os.environ,
            folder=folder,
            arguments=[sys.executable, *sys.orig_argv[1:]],
            named={"lifeline": ends[0]} if ends else {},
            numbered={number: number for number in (0, 1, 2, *_inherited())},
        )
    except BaseException:  # also an interrupt: nannies that are forked here would inherit the descriptor
        if ends:
            os.close(ends[1])
        raise
    finally:
        os.close(folder)
        if ends:
            os.close(ends[0])


def fork(
    what: str,
    *,
    environment: Mapping[str, str],
    folder: int,
    arguments: Sequence[str],
    named: Mapping[str, int],
    numbered: Mapping[int, int],
    count: int = 1,
) -> Forks:
    """Have the warm process for an environment fork processes.

    They get this process's umask, limits, CPU affinity and ignored signals, as a program that it starts would.

    Parameters
    ----------
    what
        Which of the functions of the warm process they run.
    folder
        A descriptor of the working directory.
    arguments
        The command that is shown.
    named
        Descriptors that the function gets, by name.
    numbered
        Other descriptors, by the number that they get.

    Raises
    ------
    LaunchError
        If it can't, with the reason.
    """
    request = {
        "what": what,
        "count": count,
        "environment": dict(environment),
        "arguments": list(arguments),
        "named": list(named),
        "numbers": list(numbered),
        "umask": _umask(),
        "limits": [[number, *resource.getrlimit(number)] for number in limits()],
        "affinity": sorted(os.sched_getaffinity(0)),
        "ignored": [int(each) for each in signal.valid_signals() if signal.getsignal(each) is signal.SIG_IGN],
    }
    descriptors = [folder, *named.values(), *numbered.values()]
    imports_in = import_environment(environment, str(Path(f"/proc/self/fd/{folder}").readlink()))
    for _ in range(2):  # a warm process that nothing needed may have ended just after the connection
        sock = connect(imports_in)
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
        elif end := _failure(process):
            raise LaunchError(f"the warm process {end} while it started")
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
    environment = {name: value for name, value in environment.items() if name != "PYTHONSAFEPATH"}
    process = subprocess.Popen(  # noqa: S603
        command, env=environment, stdin=subprocess.DEVNULL, cwd="/", start_new_session=True
    )
    process.returncode = 0  # it outlives this process: no warning, and no waiting for it
    return process


def _failure(process: subprocess.Popen[bytes]) -> str:
    """Return how a warm process has failed, as text.

    Empty while it runs, if it found another with its address, and if this process's children are reaped elsewhere.
    """
    try:
        end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return ""
    if end is None or end.si_status == 0:
        return ""
    if end.si_code == os.CLD_EXITED:
        return f"exited with code {end.si_status}"
    return f"was killed by {signal.Signals(end.si_status).name}"


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
