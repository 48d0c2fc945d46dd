"""Turn a fork of the warm process into what the launcher's process would have become.

Covers: session, file descriptors, working directory, limits, signals, environment, random numbers, what ``ps`` shows.
Does not cover: what the process runs then (``warm_process``).
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from typing import Any

from .process_title import show


def become(request: dict[str, Any], descriptors: list[int]) -> dict[str, int]:
    """Take over the state that was sent: see ``start.fork``; return the descriptors that have a name.

    ``descriptors`` are those of the working directory, of ``request["named"]`` and of ``request["numbers"]``.
    """
    os.setsid()
    _reset_signals(request["ignored"])
    folder, *rest = descriptors
    os.fchdir(folder)
    os.close(folder)
    count = len(request["named"])
    named = _place(rest[count:], request["numbers"], rest[:count])
    os.umask(request["umask"])
    for number, soft, hard in request["limits"]:
        if resource.getrlimit(number) != (soft, hard):
            resource.setrlimit(number, (soft, hard))
    os.sched_setaffinity(0, request["affinity"])
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    tempfile.tempdir = None  # a preloaded module may have chosen it
    _seed()
    show(request["arguments"], request["environment"])
    return dict(zip(request["named"], named, strict=True))


def _seed() -> None:
    """Choose random seeds as a new process does; Python's own random module does this by itself after a fork."""
    multiprocessing.current_process().authkey = os.urandom(32)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _reset_signals(ignored: list[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        if number in ignored:
            signal.signal(number, signal.SIG_IGN)
        elif number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        elif signal.getsignal(number) != signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)


def _place(given: list[int], numbers: list[int], others: list[int]) -> list[int]:
    """Move descriptors to their numbers, and the others out of the way; return the others' new numbers."""
    above = max([*numbers, *given, *others]) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in (*given, *others)]
    for each in (*given, *others):
        os.close(each)
    for each, number in zip(moved, numbers, strict=False):
        os.dup2(each, number)
        os.close(each)
    return moved[len(given) :]
