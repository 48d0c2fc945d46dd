"""A new process within the MPI job, in the place of a dead one.

Covers: having the living ranks start it together, knowing early that they can't.
Does not cover: MPI itself (``engine.mpi_world``), processes beside the job (``processes``).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from ..errors import LaunchError
from ..messages import RANK_REQUEST

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from .job import JobProcesses
    from .link import Link, Message
    from .processes import Processes
    from .rank_table import RankEntry


class Respawn:
    """One attempt of all living ranks to start a process."""

    def __init__(self, link: Link, table: Sequence[RankEntry], processes: Processes | JobProcesses, host: str) -> None:
        self._link = link
        self._processes = processes
        self._before = processes.rank_processes()
        self._newborn: list[psutil.Process] = []
        self._starters = [entry for entry in table if entry.state != "dead"]
        self._asked: dict[int, Future[Message]] = {}  # by rank: how it went so far
        for entry in self._starters:
            request = {"do": "respawn", "command": list(processes.command), "host": host}
            link.request(entry.engine, RANK_REQUEST, request, beside=True)

    def check(self) -> None:
        """Raise a LaunchError once the process can't come: it or a rank that starts it has died, or MPI has failed.

        MPI does not tell the others, which would wait for the one where it has failed.
        """
        there = self._processes.rank_processes()
        if any(each not in there for each in self._newborn):
            raise LaunchError(f"the new process (process {self._newborn[0].pid}) was killed while it started")
        self._newborn = [each for each in there if each not in self._before]
        alive = [entry for entry in self._starters if entry.state != "dead"]
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
            self._asked[rank] = self._link.request(entry.engine, RANK_REQUEST, {"do": "mpi_failure"}, beside=True)

    def end_newborn(self) -> None:
        """End the new process, which would come too late."""
        for process in self._processes.rank_processes():
            if process not in self._before:
                with suppress(psutil.NoSuchProcess):
                    process.kill()  # its rank ends with it
