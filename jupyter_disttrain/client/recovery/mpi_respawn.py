"""Start a new process within the MPI job to replace a dead rank.

Covers: asking all living ranks to start it together, detecting early that this fails.
Does not cover: MPI itself (``rank.mpi.world``), processes beside the job (``client.startup.processes``).
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from ...errors import LaunchError
from ...protocol.requests import MpiFailure
from ...protocol.requests import Respawn as RespawnRequest
from ...protocol.states import RankState
from ...protocol.time_limits import ASLEEP_SECONDS
from ...rank_sessions import ranks_in

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from ..startup.processes import Processes
    from ..startup.rank_table import RankEntry
    from ..transport.link import Link, Message


class Respawn:
    """One attempt of all living ranks to start a process.

    It ``may_hang`` after a nanny was killed. mpiexec started the nannies: it drops the connection of the nanny's rank,
    and may not read from the next process that gets the same file descriptor.
    """

    def __init__(
        self,
        link: Link,
        table: Sequence[RankEntry],
        processes: Processes,
        host: str,
        local: Path,
        *,
        may_hang: bool = False,
    ) -> None:
        self._link = link
        self._may_hang = may_hang
        self._used_s, self._used_at = 0.0, time.monotonic()  # CPU time of the new process, and when it last grew
        self._processes = processes
        self._local = local  # the cluster's folder on this host
        self._before, self._ranks_before = processes.rank_processes(), ranks_in(local)
        self._new_processes: list[psutil.Process] = []  # that mpiexec has started
        self._starters = [entry for entry in table if entry.state != RankState.DEAD]
        self._asked: dict[int, Future[Message]] = {}  # by rank: its pending or last report on MPI failures
        for entry in self._starters:
            link.request(entry.engine, RespawnRequest(command=list(processes.command), host=host))

    def check(self) -> None:
        """Raise a LaunchError once the start has failed: the new process or a starting rank has died, or MPI failed.

        MPI does not notify the other ranks, which would wait for the one where it has failed.
        """
        there = self._processes.rank_processes()
        if any(each not in there for each in self._new_processes):
            raise LaunchError(f"the new process (process {self._new_processes[0].pid}) was killed while it started")
        self._new_processes = [each for each in there if each not in self._before]
        if self._may_hang and self._is_asleep():
            raise LaunchError("mpiexec does not reply to the new process, which can happen after a nanny was killed")
        alive = [entry for entry in self._starters if entry.state != RankState.DEAD]
        if not alive:
            raise LaunchError("the ranks that were to start a new process have died")
        for entry in alive:
            rank = entry.info.rank
            answer = self._asked.get(rank)
            if answer is not None and not answer.done():
                continue
            failure = "" if answer is None or answer.exception() is not None else answer.result()["content"]["failure"]
            if failure:
                raise LaunchError(f"MPI failed on rank {rank} while a new process was started: {failure}")
            self._asked[rank] = self._link.request(entry.engine, MpiFailure())

    def _is_asleep(self) -> bool:
        """Whether the new rank has used no CPU time for a while."""
        with suppress(psutil.NoSuchProcess):
            ranks = [psutil.Process(pid) for pid in ranks_in(self._local) - self._ranks_before]
            used_s = sum(sum(rank.cpu_times()[:2]) for rank in ranks)
            if not ranks or used_s != self._used_s or any(rank.status() != psutil.STATUS_SLEEPING for rank in ranks):
                self._used_s, self._used_at = used_s, time.monotonic()
        return time.monotonic() - self._used_at > ASLEEP_SECONDS

    def end_new_processes(self) -> None:
        """End the new process, which has missed its time limit."""
        for process in self._processes.rank_processes():
            if process not in self._before:
                with suppress(psutil.NoSuchProcess):
                    process.kill()  # its nanny ends the rank
