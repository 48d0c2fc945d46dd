"""Signal, adopt and list processes for the nanny and the rank.

Covers: Linux' prctl and tgkill, interrupting the programs that a rank waits for, whether a process is in its exit.
Does not cover: ending processes in order (``rank_sessions``).
"""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ...process_table import WARM_PROCESS, stat_fields
from ...protocol.time_limits import INTERRUPT_WAKE_SECONDS, PROGRAM_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAKE_SIGNAL = signal.SIGURG  # ignored by default, so that it harms no program that the rank runs in its place


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has exited."""
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent, the nanny, dies."""
    parent = os.getppid()
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to a process's main thread.

    Linux may deliver a signal to the process to any thread, e.g. while the process is stopped or just continues. Python
    then only sets a flag for an interrupt, and the main thread continues to sleep.
    """
    import ctypes  # noqa: PLC0415

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "tgkill"):
        os.kill(pid, number)  # a C library from before 2019
    elif libc.tgkill(pid, pid, number) != 0 and ctypes.get_errno() != errno.ESRCH:  # ESRCH: it has just ended
        raise OSError(ctypes.get_errno(), "tgkill")


class Wake:
    """Wake a rank that an interrupt has not.

    A signal that arrives just before a system call does not end that call. Python has then only noted the interrupt,
    and raises KeyboardInterrupt after the call, e.g. a sleep of an hour. So does one whose caller was asked to restart
    system calls (``signal.siginterrupt``). Another signal, whose handler in the rank does nothing, ends the call.
    """

    def __init__(self, pid: int, is_pending: Callable[[], bool]) -> None:
        self._pid, self._is_pending = pid, is_pending
        self._pauses: list[float] = []
        self.due: float | None = None

    def begin(self) -> None:
        """Watch the rank from now on, when an interrupt has just been sent."""
        self._pauses = list(INTERRUPT_WAKE_SECONDS)
        self._wait()

    def check(self) -> None:
        """Wake the rank if it is time to, and Python has not handled the interrupt."""
        if self.due is None or time.monotonic() < self.due:
            return
        if not self._is_pending():
            self.due = None
            return
        signal_main_thread(self._pid, WAKE_SIGNAL)
        self._wait()

    def _wait(self) -> None:
        self.due = time.monotonic() + self._pauses.pop(0) if self._pauses else None


def interrupt(pid: int) -> None:
    """Interrupt a process's main thread and the programs that it has started, as a terminal would.

    ``os.system`` makes its caller ignore SIGINT until the program has ended; the caller is then interrupted again.
    """
    is_deaf = _ignores_interrupts(pid)
    signal_main_thread(pid, signal.SIGINT)
    _interrupt_programs(pid)
    if is_deaf:
        deadline = time.monotonic() + PROGRAM_SECONDS
        while _ignores_interrupts(pid) and time.monotonic() < deadline:
            time.sleep(0.005)
        signal_main_thread(pid, signal.SIGINT)


def _ignores_interrupts(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False  # it has ended, or this is not Linux
    ignored = next((line.split()[1] for line in text.splitlines() if line.startswith("SigIgn:")), "0")
    return bool(int(ignored, 16) >> (signal.SIGINT - 1) & 1)


def _interrupt_programs(pid: int) -> None:
    """Interrupt the descendants in the process's own process group, except its forks, e.g. DataLoader workers."""
    own, group = _command(pid), os.getpgid(pid)
    for child in descendants(pid):
        try:
            if _command(child) != own and os.getpgid(child) == group:
                os.kill(child, signal.SIGINT)
        except (ProcessLookupError, PermissionError):
            continue  # it has just ended, or runs as another user, e.g. under sudo


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it has ended, or this is not Linux


def descendants(pid: int) -> Iterator[int]:
    """Yield the pids of a process's descendants, without warm processes and their forks."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in map(int, children):
        if WARM_PROCESS.encode() not in _command(child).split(b"\0"):
            yield child
            yield from descendants(child)


def is_ending(pid: int) -> bool:
    """Whether a process has ended or is inside its exit system call, which closes its files."""
    fields = stat_fields(pid)
    return not fields or bool(int(fields[6]) & 4)  # PF_EXITING


def _prctl(option: int, value: int) -> None:
    import ctypes  # noqa: PLC0415  (only nanny and rank need it)

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
