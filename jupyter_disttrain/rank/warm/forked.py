"""Turn a fork of the warm process into what the launcher's process would have become.

Covers: session, file descriptors, working directory, limits, signals, environment, random numbers, what ``ps`` shows.
Does not cover: what the process runs then (``process``).
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import resource
import signal
import sys
import time
from typing import Any

from .shown import show


def become(request: dict[str, Any], descriptors: list[int]) -> int | None:
    """Take over the state that a start has sent; return the descriptor that shows its end, if it has one.

    ``descriptors`` are those of the working directory, of the lifeline if there is one, and of ``request["numbers"]``.
    """
    os.setsid()
    _reset_signals(request["ignored"])
    folder, *rest = descriptors
    os.fchdir(folder)
    os.close(folder)
    lifeline = rest.pop(0) if request["has_lifeline"] else None
    lifeline = _place(rest, request["numbers"], lifeline)
    os.umask(request["umask"])
    for number, soft, hard in request["limits"]:
        if resource.getrlimit(number) != (soft, hard):
            resource.setrlimit(number, (soft, hard))
    os.sched_setaffinity(0, request["affinity"])
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    # As in a new process; Python's own random module does this by itself.
    multiprocessing.current_process().authkey = os.urandom(32)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    show(request["arguments"], request["environment"])
    return lifeline


def _reset_signals(ignored: list[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        if number in ignored:
            signal.signal(number, signal.SIG_IGN)
        elif number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        elif signal.getsignal(number) != signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)


def _place(given: list[int], numbers: list[int], lifeline: int | None) -> int | None:
    """Move descriptors to the numbers that they had in the process that sent them; return that of the lifeline."""
    above = max([*numbers, *given]) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in given]
    kept = None if lifeline is None else fcntl.fcntl(lifeline, fcntl.F_DUPFD_CLOEXEC, above)
    for each in [*given, *([] if lifeline is None else [lifeline])]:
        os.close(each)
    for each, number in zip(moved, numbers, strict=True):
        os.dup2(each, number)
        os.close(each)
    return kept
