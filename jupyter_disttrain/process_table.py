"""Look up processes by their ID and start time: the system may give the ID of an ended process to another one.

Covers: whether a process runs, when it started, waiting for the end of one that is no child; ending as
another has ended.
Does not cover: what a process has started (``rank.nanny.process_tree``, ``rank_sessions``).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from typing import NoReturn

from .protocol.time_limits import OWNER_SECONDS

WARM_PROCESS = "jupyter_disttrain.rank.warm"  # the module that a warm process runs


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of Linux's record from the state on; empty if there is no process of that ID."""
    try:
        # The same check as psutil's, which takes five times as long; it runs twice a second for each rank.
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def runs(pid: int, started: str = "") -> bool:
    """Whether a process runs, and is the one of that start time if one is given; a zombie does not."""
    fields = stat_fields(pid)
    return bool(fields) and fields[0] not in (b"Z", b"X") and started in ("", fields[19].decode())


def start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since the boot; empty if there is none of that ID."""
    fields = stat_fields(pid)
    return fields[19].decode() if fields else ""


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        # An old Linux kernel, or a Python built for one, such as conda's, has no pidfd_open.
        while runs(pid):
            time.sleep(OWNER_SECONDS)
    else:
        select.select([process], [], [])
        os.close(process)


def end_as(status: int) -> NoReturn:
    """End this process as another has ended; ``status`` is as from ``os.waitpid``."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(os.waitstatus_to_exitcode(status))
