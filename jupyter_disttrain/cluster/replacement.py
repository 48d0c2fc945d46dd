"""New processes for ranks that died, in a cluster that runs.

Covers: starting one, in the MPI job, beside it or on another host, and telling it who it is.
Does not cover: when (``recovery``), forming the group with it (``introduction``).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import IrreplaceableError, LaunchError
from .introduction import Introduction
from .loss import remedy
from .moves import GO_ON
from .rank_table import RankEntry
from .respawn import Respawn
from .slurm.state import UNKNOWN

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from ..messages import NannyHello, RankHello
    from .job import JobProcesses
    from .moves import Moves
    from .processes import Processes
    from .reach import Reach

RESPAWN_SECONDS = 5.0  # for the living ranks to start a process together; more where the machine is busy
REMEDY = "%dist_reset begins a new job"


class Replacement(Introduction):
    """The part of a launch that starts processes in the place of dead ones."""

    mpi_heals: bool
    _processes: Processes | JobProcesses | None
    _moves: Moves
    _reach: Reach
    _awaits_rank: bool  # a new process for a rank that died
    on_note: Callable[[str], None]
    _told_job = ""
    _one_at_a_time: threading.Lock  # a process does not know for which rank it was started

    @property
    def why_hosts_lost(self) -> str:
        """Which hosts are lost that no spare stands for, and what helps; empty where there is none."""
        return self._moves.why_lost(self.table)

    @property
    def ranks_of_lost_hosts(self) -> list[int]:
        """The dead ranks that have no host to be started on."""
        return self._moves.lost_ranks(self.table)

    def try_lost_hosts(self) -> None:
        """Take no host for lost: a person says that they may be there again."""
        self._reach.forget_lost(self.open_link)
        self._moves.forget_failed()

    def replace(self, rank: int) -> None:
        """Start a new process for a rank that died, and tell it who it is; it joins no group yet.

        Raises
        ------
        LaunchError
            If it does not come up.
        """
        with self._one_at_a_time:
            self._awaits_rank = True
            try:
                self._note_lost_job()
                entry = self._new_entry(rank)
                self.table[rank] = entry
                self._arrivals.heed_deaths([entry], others=False)  # one that came before it was known
                if entry.state == "dead":
                    raise LaunchError("the new process has died as well")
            finally:
                self._awaits_rank = False

    def _new_entry(self, rank: int) -> RankEntry:
        """Start a process for one rank where that can be done: on its host, or on a spare after the other."""
        old = self.table[rank]
        while True:
            host = "" if self.config.job else self._moves.host_for(old.launch_host, self.table)
            try:
                hello, nanny = self._start_one(rank, host)
                info = replace(old.info, host=hello.host, pid=hello.pid)
                entry = RankEntry(
                    info=info,
                    engine=hello.engine,
                    nanny=nanny.nanny,
                    nanny_pid=hello.nanny_pid,
                    probe=nanny.probe,
                    launch_host=hello.launch_host or old.launch_host,
                )
                entry.know(self._wait([(entry, self._identify(entry))], "answer", is_new=True)[0])
            except LaunchError as error:
                if self.config.job or host == old.launch_host:
                    raise
                self._moves.give_up(old.launch_host, host)  # it may be down, or have fewer GPUs
                self.on_note(f"{host} can't stand in for {old.launch_host}: {' '.join(str(error).split())}")
            else:
                entry.group = "none" if self.config.backend == "none" else "broken"
                return entry

    def _note_lost_job(self) -> None:
        """Say once why all ranks died, if that is so."""
        assert self._processes is not None
        if (words := self._processes.lost_job) and words != self._told_job:
            self._told_job = words
            self.on_note(f"{words}; new ones start without MPI, so that comm has no world: {REMEDY}")

    def _lose_mpi(self, why: str) -> None:
        """Note for good that MPI has no world of all ranks."""
        if not self.mpi_lost:
            self.mpi_lost = why
            self.on_note(f"comm is lost: {why}; use dist, or {REMEDY}")

    def _start_one(self, rank: int, host: str) -> tuple[RankHello, NannyHello]:
        """Start a process for one rank: in the MPI job, if MPI can be made whole again, else beside it."""
        assert self._processes is not None
        if self.config.job:
            within = f"nothing can be started within a job of {self.config.job} from outside"
            alone = "" if self.config.backend == "none" else ", but without dist, whose process group needs all ranks"
            raise IrreplaceableError(f"{within}; {GO_ON}{alone}; {remedy(self.config)}")
        known = {entry.engine for entry in self.table}
        if self.mpi_heals and not self.mpi_lost:
            attempt = Respawn(self.open_link, self.table, self._processes, host)
            limit_s = RESPAWN_SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
            try:
                return self._arrivals.hear_from_one(known, limit_s, attempt.check, in_mpi=True)
            except LaunchError as error:
                self._lose_mpi(f"rank {rank} died, and no process could be started within the MPI job: {error}")
                attempt.end_newborn()
        elif self.config.has_mpi:
            self._lose_mpi(f"rank {rank} died, and was replaced by a process beside the MPI job")
        check = self._processes.start_one(f"replacement-{rank}", host)
        try:
            return self._arrivals.hear_from_one(known, self.config.start_timeout_s, check)
        except LaunchError as error:
            grant = self.placement.grant
            if grant is not None and grant.job.state().state == UNKNOWN:
                raise LaunchError(f"Slurm does not answer, and starts nothing on {host} until it does") from error
            raise
