"""Fork the nannies of a process that a launcher has started, in that process.

Covers: nannies that are its own children.
Does not cover: nannies that a warm process has forked (``rank.warm.start``), what a nanny does (``rank.nanny``).
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def signal_all(pids: list[int], number: int) -> None:
    """Send a signal to processes, some of which may just have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class OwnNannies:
    """Nannies that this process forks; each calls ``run``, as in :meth:`rank.warm.warm_process.WarmProcess.serve`."""

    def __init__(self, count: int, run: Callable[[Mapping[str, int]], None]) -> None:
        self.pids: list[int] = []  # of those that have not ended
        lifeline = os.pipe() if count == 1 else None
        for _ in range(count):
            pid = os.fork()
            if pid == 0:
                if lifeline:
                    os.close(lifeline[1])
                run({"lifeline": lifeline[0]} if lifeline else {})
                os._exit(0)
            self.pids.append(pid)
        if lifeline:
            os.close(lifeline[0])

    def signal(self, number: int) -> None:
        """Send a signal to all nannies that run."""
        signal_all(self.pids, number)

    def wait(self) -> tuple[int, int]:
        """Wait for the end of the next nanny; return its process ID and its status as from ``os.waitpid``."""
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            assert ended is not None  # waitid blocks without WNOHANG
            is_nanny = ended.si_pid in self.pids  # else a child of a shell that exec'ed this process
            if is_nanny:
                self.pids.remove(ended.si_pid)  # before the pid can be reused: no other process must get a signal
            _, status = os.waitpid(ended.si_pid, 0)
            if is_nanny:
                return ended.si_pid, status
