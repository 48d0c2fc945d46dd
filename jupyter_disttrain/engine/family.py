"""What the nanny and the rank ask of the operating system about each other: adoption, death, interrupts.

Covers: Linux' prctl and tgkill.
"""

from __future__ import annotations

import errno
import os
import signal


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


def _prctl(option: int, value: int) -> None:
    import ctypes  # noqa: PLC0415  (only the two ends of the fork need it)

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
