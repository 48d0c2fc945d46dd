"""Start new processes for ranks that died, in a running cluster.

Covers: starting one within the MPI job, beside it or on another host, and sending it its identity.
Does not cover: when to replace a rank (``state_machine``), forming the group with it
(``client.startup.rank_assignment``).
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import IrreplaceableError, LaunchError
from ...launchers.slurm.job_state import UNKNOWN
from ...protocol.states import RankState
from ...protocol.time_limits import RESPAWN_SECONDS
from ..startup.cluster_state import cold_note
from ..startup.processes import Processes
from ..startup.rank_table import RankEntry
from ..startup.registration import killed_nannies
from .mpi_respawn import Respawn
from .remedies import remedy
from .spare_hosts import GO_ON, SpareHosts

if TYPE_CHECKING:
    from ...protocol.messages import NannyHello, RankHello
    from ..startup.cluster_state import ClusterState
    from ..startup.rank_assignment import RankAssignment
    from ..startup.registration import Registration
    from .host_heartbeats import HostHeartbeat

MOST_LOAD = 3.0  # load per core up to which the time limit grows


class RankReplacer:
    """Starts replacements for the dead ranks of a cluster."""

    def __init__(
        self, state: ClusterState, registration: Registration, assignment: RankAssignment, heartbeat: HostHeartbeat
    ) -> None:
        self._state = state
        self._registration = registration
        self._assignment = assignment
        self.spare_hosts = SpareHosts(state.config, state.table, heartbeat)
        self._knows_mpiexec_end = bool(state.mpi_lost)  # an earlier notebook may have reported it
        # Start one process at a time: a process does not know its rank until the client sends it.
        self.one_at_a_time = threading.Lock()

    def replace(self, rank: int) -> None:
        """Start a new process for a rank that died and send it its identity; it joins no group yet.

        Raises
        ------
        LaunchError
            If it does not start.
        """
        state = self._state
        assert state.processes is not None
        with self.one_at_a_time:
            self._registration.awaits_rank = True
            try:
                self._note_mpiexec_end(state.processes.mpiexec_end())
                entry = self._new_entry(rank)
                state.table[rank] = entry
                self._registration.check_deaths([entry], others=False)  # reported before the entry existed
                if entry.state == RankState.DEAD:
                    raise LaunchError("the new process has died as well")
            finally:
                self._registration.awaits_rank = False

    def _new_entry(self, rank: int) -> RankEntry:
        """Start a process for one rank on its own host, or on one spare after another."""
        state = self._state
        old = state.table[rank]
        while True:
            host = "" if state.config.job else self.spare_hosts.host_for(old.launch_host)
            try:
                hello, nanny = self._start_one(rank, host)
                info = replace(old.info, host=hello.host, pid=hello.pid)
                entry = RankEntry.of(info, hello, nanny, old.launch_host)
                asked = [(entry, self._assignment.identify(entry))]
                entry.take_identity_reply(self._assignment.wait_for_replies(asked, "answer", is_new=True)[0])
            except LaunchError as error:
                if state.config.job or host == old.launch_host:
                    raise
                self.spare_hosts.give_up(old.launch_host, host)  # the spare may be down, or have fewer GPUs
                state.on_note(f"{host} can't replace {old.launch_host}: {' '.join(str(error).split())}")
            else:
                for text in entry.troubles:
                    state.on_note(f"rank {rank} on {info.host}, in your IPython profile: {text}")
                if hello.cold_reason and hello.cold_reason not in state.cold_reasons:
                    state.cold_reasons[hello.cold_reason] = [rank]
                    state.on_note(cold_note([rank], hello.cold_reason))
                entry.group = "none" if state.config.backend == "none" else "broken"
                return entry

    def _note_mpiexec_end(self, end: str) -> None:
        """Record once that mpiexec has ended: ranks may have ended with it, also where ``comm`` was lost before."""
        state = self._state
        if end and not self._knows_mpiexec_end:
            self._knows_mpiexec_end = True
            if state.mpi_lost and state.placement.hosts:
                state.on_note(end)
            self._lose_mpi(end)

    def _lose_mpi(self, why: str) -> None:
        """Record that MPI permanently has no world of all ranks."""
        state = self._state
        if not state.mpi_lost:
            state.mpi_lost = why
            state.on_note(f"comm is lost: {why}; use dist, or start a new MPI job with %dist_reset")

    def _start_one(self, rank: int, host: str) -> tuple[RankHello, NannyHello]:
        """Start a process for one rank: within the MPI job if MPI can be repaired, else beside it."""
        state = self._state
        if state.config.job:
            within = f"no process can be added to a running job of {state.config.job}"
            alone = "" if state.config.backend == "none" else ", but without dist, whose process group needs all ranks"
            raise IrreplaceableError(f"{within}; {GO_ON}{alone}; {remedy(state.config)}")
        assert isinstance(state.processes, Processes)
        killed = killed_nannies(state.table)
        if state.mpi_heals and killed > 1:  # a new process would start, and wait in MPI_Init forever
            self._lose_mpi("several nannies were killed at the same time, after which Open MPI can't start processes")
        known = {entry.engine for entry in state.table}
        if state.mpi_heals and not state.mpi_lost:
            local = state.folders.local
            attempt = Respawn(state.open_link, state.table, state.processes, host, local, may_hang=killed > 0)
            load = os.getloadavg()[0] / (os.cpu_count() or 1)
            limit_s = max(RESPAWN_SECONDS * min(MOST_LOAD, max(1.0, load)), 2 * state.came_up_s)
            try:
                return self._registration.wait_for_one(known, limit_s, attempt.check, in_mpi=True)
            except LaunchError as error:
                self._note_mpiexec_end(state.processes.mpiexec_end(is_dying=True))
                self._lose_mpi(f"rank {rank} died, and no process could be started within the MPI job: {error}")
                attempt.end_new_processes()
        elif state.config.has_mpi:
            self._lose_mpi(f"rank {rank} died, and was replaced by a process beside the MPI job")
        check = state.processes.start_one(f"replacement-{rank}", host)
        try:
            return self._registration.wait_for_one(known, state.config.start_timeout_s, check)
        except LaunchError as error:
            allocated = state.placement.allocated
            if allocated is not None and allocated.job.state().state == UNKNOWN:
                raise LaunchError(
                    f"Slurm does not respond, so no process can be started on {host}; try again later"
                ) from error
            raise
