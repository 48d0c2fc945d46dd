"""Start new processes for ranks that died, in a running cluster.

Covers: starting one within the MPI job, beside it or on another host, and sending it its identity.
Does not cover: when to replace a rank (``state_machine``), forming the group with it
(``client.startup.rank_assignment``).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import IrreplaceableError, LaunchError
from ...launchers.slurm.state import UNKNOWN
from ...protocol.states import RankState
from ...protocol.time_limits import RESPAWN_SECONDS
from ..startup.rank_assignment import Introduction
from ..startup.rank_table import RankEntry
from ..startup.registration import killed_nannies
from .explanations import remedy
from .mpi_respawn import Respawn
from .spare_hosts import GO_ON

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from ...protocol.messages import NannyHello, RankHello
    from ..startup.job_processes import JobProcesses
    from ..startup.processes import Processes
    from .host_heartbeat import Reach
    from .spare_hosts import Moves

MOST_LOAD = 3.0  # load per core up to which the time limit grows
REMEDY = "%dist_reset begins a new job"


class Replacement(Introduction):
    """The part of a launch that starts replacements for dead ranks."""

    mpi_heals: bool
    _processes: Processes | JobProcesses | None
    _moves: Moves
    _reach: Reach
    _knows_mpiexec_end: bool
    _awaits_rank: bool  # a replacement process is starting
    on_note: Callable[[str], None]
    _came_up_s = 0.0  # seconds the ranks took to start; 0: another process started them
    _one_at_a_time: threading.Lock  # a process does not know its rank until the client sends it

    @property
    def why_hosts_lost(self) -> str:
        """Which hosts are lost without a spare in their place, and the remedy; empty if there is none."""
        return self._moves.why_lost(self.table)

    @property
    def ranks_of_lost_hosts(self) -> list[int]:
        """The dead ranks that have no host to start on."""
        return self._moves.lost_ranks(self.table)

    def try_lost_hosts(self) -> None:
        """Consider no host lost any more: the user says that they may be back."""
        self._reach.forget_lost(self.open_link)
        self._moves.forget_failed()

    def replace(self, rank: int) -> None:
        """Start a new process for a rank that died and send it its identity; it joins no group yet.

        Raises
        ------
        LaunchError
            If it does not start.
        """
        assert self._processes is not None
        with self._one_at_a_time:
            self._awaits_rank = True
            try:
                self._note_mpiexec_end(self._processes.mpiexec_end())
                entry = self._new_entry(rank)
                self.table[rank] = entry
                self._arrivals.heed_deaths([entry], others=False)  # a death that was reported before the entry existed
                if entry.state == RankState.DEAD:
                    raise LaunchError("the new process has died as well")
            finally:
                self._awaits_rank = False

    def _new_entry(self, rank: int) -> RankEntry:
        """Start a process for one rank on its own host, or on one spare after another."""
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
                self._moves.give_up(old.launch_host, host)  # the spare may be down, or have fewer GPUs
                self.on_note(f"{host} can't stand in for {old.launch_host}: {' '.join(str(error).split())}")
            else:
                for words in entry.troubles:
                    self.on_note(f"rank {rank} on {info.host}, in your IPython profile: {words}")
                entry.group = "none" if self.config.backend == "none" else "broken"
                return entry

    def _note_mpiexec_end(self, end: str) -> None:
        """Record once that mpiexec has ended: ranks may have ended with it, also where ``comm`` was lost before."""
        if end and not self._knows_mpiexec_end:
            self._knows_mpiexec_end = True
            if self.mpi_lost and self.placement.hosts:
                self.on_note(end)
            self._lose_mpi(end)

    def _lose_mpi(self, why: str) -> None:
        """Record that MPI permanently has no world of all ranks."""
        if not self.mpi_lost:
            self.mpi_lost = why
            self.on_note(f"comm is lost: {why}; use dist, or {REMEDY}")

    def _start_one(self, rank: int, host: str) -> tuple[RankHello, NannyHello]:
        """Start a process for one rank: within the MPI job if MPI can be repaired, else beside it."""
        assert self._processes is not None
        if self.config.job:
            within = f"nothing can be started within a job of {self.config.job} from outside"
            alone = "" if self.config.backend == "none" else ", but without dist, whose process group needs all ranks"
            raise IrreplaceableError(f"{within}; {GO_ON}{alone}; {remedy(self.config)}")
        killed = killed_nannies(self.table)
        if self.mpi_heals and killed > 1:  # a new process would start, and wait in MPI_Init for ever
            self._lose_mpi("several nannies were killed at once, after which Open MPI starts no process")
        known = {entry.engine for entry in self.table}
        if self.mpi_heals and not self.mpi_lost:
            attempt = Respawn(self.open_link, self.table, self._processes, host, may_hang=killed > 0)
            load = os.getloadavg()[0] / (os.cpu_count() or 1)
            limit_s = max(RESPAWN_SECONDS * min(MOST_LOAD, max(1.0, load)), 2 * self._came_up_s)
            try:
                return self._arrivals.hear_from_one(known, limit_s, attempt.check, in_mpi=True)
            except LaunchError as error:
                self._note_mpiexec_end(self._processes.mpiexec_end(is_dying=True))
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
