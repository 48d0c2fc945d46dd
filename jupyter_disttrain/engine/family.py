"""What the nanny and the rank ask of the operating system about each other: adoption, death, interrupts.

Covers: Linux' prctl and tgkill; the programs that a rank waits for.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM_SECONDS = 0.3  # for a program to end that was interrupted


def adopt_orphans() -> None:
    """Become the parent of what this process's descendants leave."""
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent, the nanny, dies."""
    parent = os.getppid()
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to a process's main thread.

    Sent to the process, Linux may give it to any thread, say while the process is stopped or just goes on. Python then
    only takes a note of an interrupt, and the main thread sleeps on.
    """
    import ctypes  # noqa: PLC0415

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "tgkill"):
        os.kill(pid, number)  # a C library from before 2019
    elif libc.tgkill(pid, pid, number) != 0 and ctypes.get_errno() != errno.ESRCH:  # it has just ended
        raise OSError(ctypes.get_errno(), "tgkill")


def interrupt(pid: int) -> None:
    """Interrupt a process's main thread, and the programs that it has started, as a terminal would.

    ``os.system`` has its caller ignore SIGINT until the program has ended; then the caller is interrupted again.
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
        return False  # it has ended, or this is no Linux
    ignored = next((line.split()[1] for line in text.splitlines() if line.startswith("SigIgn:")), "0")
    return bool(int(ignored, 16) >> (signal.SIGINT - 1) & 1)


def _interrupt_programs(pid: int) -> None:
    """Interrupt what runs in the process's own group, but for its forks, as a DataLoader's workers are."""
    own, group = _command(pid), os.getpgid(pid)
    for child in descendants(pid):
        try:
            if _command(child) != own and os.getpgid(child) == group:
                os.kill(child, signal.SIGINT)
        except (ProcessLookupError, PermissionError):
            continue  # it has just ended, or is another user's, as what sudo runs is


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it has ended, or this is no Linux


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes that a process has started, and those that they have."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in map(int, children):
        yield child
        yield from descendants(child)


def end_descendants() -> None:
    """End what this process has adopted: its rank's children have left it."""
    import psutil  # noqa: PLC0415

    left = psutil.Process().children(recursive=True)
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=2)


def runs(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _prctl(option: int, value: int) -> None:
    import ctypes  # noqa: PLC0415  (only the two ends of the fork need it)

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
