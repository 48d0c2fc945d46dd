"""Have a warm process fork nannies: the side of the process that a launcher has started.

Covers: finding or starting the warm process, what it is sent, waiting for the nannies that it has forked.
Does not cover: the warm process (``process``), nannies that this process forks itself (``rank.nannies``).
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
from typing import TYPE_CHECKING, Any

from ...errors import LaunchError
from ...process_table import runs
from ...protocol.time_limits import OWNER_SECONDS, WARM_LISTEN_SECONDS, WARM_RETRY_SECONDS
from ..nannies import signal_all
from . import channel
from .label import import_environment, label_of

if TYPE_CHECKING:
    from collections.abc import Mapping

PROCESS = "jupyter_disttrain.rank.warm"


class WarmNannies:
    """Nannies that a warm process has forked for this process."""

    def __init__(self, sock: socket.socket, started: Mapping[int, str], lifeline: int | None) -> None:
        self._sock = sock
        self._started = dict(started)
        self._lifeline = lifeline  # closed with this process, which the nanny sees

    @property
    def pids(self) -> list[int]:
        """The nannies that have not ended."""
        return list(self._started)

    def signal(self, number: int) -> None:
        """Send a signal to all nannies that run."""
        signal_all(self.pids, number)

    def wait(self) -> tuple[int, int]:
        """Wait for the end of the next nanny; return its process ID and its status as from ``os.waitpid``."""
        message, _ = channel.receive(self._sock)
        if message is not None:
            del self._started[message["ended"]]
            return message["ended"], message["status"]
        while True:  # the warm process was killed; nannies don't depend on it
            for pid, started in self._started.items():
                if not runs(pid, started):
                    del self._started[pid]
                    return pid, 0
            time.sleep(OWNER_SECONDS)


def fork_nannies(count: int) -> WarmNannies:
    """Have the warm process for this process's environment fork nannies, in this process's state.

    A single nanny ends its rank when this process is killed: a launcher that kills it means the rank.

    Raises
    ------
    LaunchError
        If it can't; the message says why.
    """
    ends = os.pipe() if count == 1 else None
    numbers = [0, 1, 2, *_inherited()]
    folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
    request = {
        "count": count,
        "environment": dict(os.environ),
        "numbers": numbers,
        "has_lifeline": ends is not None,
        "arguments": [sys.executable, *sys.orig_argv[1:]],
        "umask": _umask(),
        "limits": [[number, *resource.getrlimit(number)] for number in _limits()],
        "affinity": sorted(os.sched_getaffinity(0)),
        "ignored": [int(each) for each in signal.valid_signals() if signal.getsignal(each) is signal.SIG_IGN],
    }
    try:
        sock, nannies = _ask(request, [folder, *(ends[:1] if ends else ()), *numbers])
    finally:
        os.close(folder)
        if ends:
            os.close(ends[0])
    return WarmNannies(sock, nannies, ends and ends[1])


def _ask(request: dict[str, Any], descriptors: list[int]) -> tuple[socket.socket, dict[int, str]]:
    """Send the request; return the connection, and the start times of the nannies by process ID."""
    for _ in range(2):  # a warm process that nothing needed may have ended just after the connection
        sock = connect(os.environ)
        reply = None
        with contextlib.suppress(OSError):
            channel.send(sock, request, descriptors)
            reply, _ = channel.receive(sock)
        if reply is not None and "nannies" in reply:
            return sock, {int(pid): started for pid, started in reply["nannies"].items()}
        sock.close()
        if reply is not None:
            raise LaunchError(reply["reason"])
    raise LaunchError("the warm process ended while it imported its modules")


def connect(environment: Mapping[str, str]) -> socket.socket:
    """Connect to the warm process for these environment variables; start one if there is none.

    It ends some time after its last connection has closed and its last nanny has ended.

    Raises
    ------
    LaunchError
        If it can't be used; the message says why.
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
    command = [sys.executable, "-m", PROCESS, address.removeprefix("\0")]
    environment = import_environment(environment) | {"PYTHONSAFEPATH": "1"}
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
