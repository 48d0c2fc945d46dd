"""Start the processes of a cluster, join a running one, and stop them.

Covers: folders, controller and rank processes; joining a running cluster; detecting that ranks or hosts are lost.
Does not cover: running cells (``client.cluster``). A launch delegates the processes' registration (``registration``),
their identities and the process group (``rank_assignment``), and new processes for dead ranks
(``client.recovery.replacement``).

The controller and the ranks start at the same moment: the ranks import torch while the controller starts.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ...errors import LaunchError, UsageError
from ...launchers.folders import Folders, answers, remove_paths
from ...launchers.mpi import scarce_shared_memory
from ...private_files import read_own
from ...process_table import runs
from ...protocol.ranks import counted
from ...protocol.requests import End
from ...protocol.states import RankState
from ...protocol.time_limits import PROCESSES_POLL_SECONDS, START_END_SECONDS
from ...rank_sessions import end_abandoned
from ...sigint import deferred_interrupts, raise_interrupted
from ..cells.history import Journal
from ..recovery.host_heartbeats import HostHeartbeat
from ..recovery.remedies import stuck_remedy, why_lost
from ..recovery.replacement import RankReplacer
from ..registry import cluster_file
from ..registry.cluster_file import list_job, take_lease
from ..transport.dispatch import MessageDispatcher
from ..transport.link import Link
from ..transport.ssh_tunnel import tunnel_of
from .cluster_state import ClusterState
from .gpus import choose_gpus
from .host_placement import place
from .processes import JobProcesses, Processes, output_end
from .progress import StartProgress
from .rank_assignment import RankAssignment
from .registration import Registration, as_message, is_here, responds, unreported_deaths

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from ...config.cluster import ClusterConfig
    from ...protocol.rank_death import RankDeath
    from ..registry.cluster_file import ClusterFile

TICKS_PER_CHECK = 2  # timer ticks of the link between two checks of this machine's processes


class Launch:
    """The processes of one cluster: a new one, or a running one to join (``there``).

    With ``before``, the launch whose ranks these replace: its controller and its folders are taken over, and its ranks
    end while these start.
    """

    def __init__(
        self,
        config: ClusterConfig,
        there: ClusterFile | None = None,
        progress: StartProgress | None = None,
        before: Launch | None = None,
    ) -> None:
        self.state = ClusterState.from_file(there, config) if there else ClusterState.before_start(config)
        self.table, self.steps = self.state.table, self.state.steps  # the same objects throughout
        self.registration = Registration(self.state)
        self.dispatcher = MessageDispatcher(self.state, self.registration)
        self.assignment = RankAssignment(self.state, self.registration)
        on_cut = self._on_cut if config.job else None
        self._heartbeat = HostHeartbeat(self._on_unreported_death, self._note, on_cut, self._mpiexec_was_killed)
        self.replacer = RankReplacer(self.state, self.registration, self.assignment, self._heartbeat)
        self.journal = Journal(began_late=there is not None)
        self.progress = progress or StartProgress(config, lambda _text: None, lambda _text: None)
        self.killed: list[str] = []  # messages about ranks that were killed because they took too long to exit
        self._before = before
        self._ending: tuple[Processes | JobProcesses, list[tuple[int, str]], bool] | None = None  # see ``_begin_end``
        self._ticks = 0  # calls of ``_on_tick``
        self._is_being_stopped = False
        self._cut_s = 0.0  # seconds since any host of a job last replied
        self._births = there.births if there else {}
        self._taken = ExitStack()  # releases what was taken for the ranks: folders, a Slurm allocation
        self._held = ExitStack()  # releases the lease, also where the ranks are left
        if there:
            self._taken.callback(self.folders.remove)
            if self.state.placement.allocated is not None:
                self._taken.callback(self.state.placement.allocated.release)

    # The state that others read

    @property
    def config(self) -> ClusterConfig:
        """The configuration of the cluster."""
        return self.state.config

    @property
    def folders(self) -> Folders:
        """The folders of the cluster; available once the placement is decided."""
        return self.state.folders

    @property
    def lost_because(self) -> str:
        """Why the ranks are unreachable, and what to do; empty while they are reachable."""
        return self.state.lost_because

    @property
    def link(self) -> Link | None:
        """The sockets to the ranks; None before the start and after the end."""
        return self.state.link

    @property
    def open_link(self) -> Link:
        """The sockets to the ranks; raises a ClusterClosedError if the cluster was shut down."""
        return self.state.open_link

    def check_open(self) -> None:
        """Raise a ClusterClosedError if the cluster was shut down or is no longer reachable."""
        self.state.check_open()

    @property
    def can_be_followed(self) -> bool:
        """Whether other ranks can take over the controller: it responds, and serves no ranks on other hosts.

        Not while a new process for a dead rank starts, which would report to the other ranks' client.
        """
        state, link = self.state, self.state.link
        if link is None or not state.is_started or state.lost_because or state.placement.hosts:
            return False
        if not isinstance(state.processes, Processes) or not state.processes.has_controller:
            return False
        if not answers(self.folders.local):  # its sockets may have been removed
            return False
        return not self.registration.awaits_rank and responds(link, state.table)

    @property
    def ending(self) -> Processes | JobProcesses | None:
        """The processes of ranks that were asked to end."""
        return None if self._ending is None else self._ending[0]

    # Start

    def _mpiexec_was_killed(self) -> bool:
        return self.state.processes is not None and self.state.processes.mpiexec_was_killed

    def _make_processes(self) -> Processes | JobProcesses:
        state = self.state
        if state.config.job:
            return JobProcesses(state.config, state.folders.profile)
        before = self._before.ending if self._before is not None else None
        assert not isinstance(before, JobProcesses)
        return Processes(
            state.config, state.folders, state.n, state.gpus, self._births, placement=state.placement, before=before
        )

    def decide(self) -> None:
        """Decide the number and the placement of the ranks; :meth:`stop` releases what this takes.

        Raises a LaunchError or a UsageError, and leaves nothing behind, if the ranks can't be started as requested.
        """
        state, config = self.state, self.config
        state.started_s = time.time()
        try:
            with deferred_interrupts():  # else an interrupt could leave a folder that nothing removes
                if self._before is None:
                    state.folders = Folders.make(config.name)
                    self._taken.callback(state.folders.remove)
                else:
                    state.folders = self._before.folders.renewed()
                    self._taken.callback(state.folders.remove_logs_if_empty)
                self.progress.open(state.folders)
            elsewhere = config.hosts or config.launcher == "slurm"
            gpus = [] if elsewhere else choose_gpus(config)
            state.placement = place(config, state.folders, self.progress.waits, self._taken)
        except BaseException as error:  # also an interrupt
            self.progress.close()
            self._give_back()
            raise_interrupted(error)
            raise
        state.gpus = gpus or [str(gpu) for gpu in range(max(state.placement.gpus.values(), default=0))]
        state.n = state.placement.count or config.count or len(state.gpus) or 2
        state.address = config.address or state.placement.master
        state.is_decided = True
        self.progress.decided(state.n)

    def start(self) -> None:
        """Start all processes; returns when every rank has joined its process group.

        Raises a LaunchError if a rank can't be started; everything that was started has ended by then.
        """
        try:
            stale = [] if self._before is None else self._take_over(self._before)
            with deferred_interrupts():  # ipyparallel's event loop would lose an interrupt
                processes = self.state.processes = self._make_processes()
                assert isinstance(processes, Processes)  # a job starts its own
                processes.start()
            began_s = time.monotonic()
            self.progress.came(0)
            self.state.mpi_heals = processes.mpi_heals
            if self._before is None:
                self._take_lease()
            self._connect(self.folders.cluster_id)
            hellos, nannies = self.registration.wait_for_all(self.state.n, self._check_time, self.progress.came)
            came_up_s = time.monotonic() - began_s
            if self._before is not None:
                self._before.finish_end()  # its ranks may hold the GPUs' memory
                self._before.folders.remove_logs_if_empty()
                self._before = None
                end_abandoned(self.folders.local)  # what a killed nanny has left
                remove_paths(stale)
            ranks = self.assignment.assign(hellos)
            self.state.came_up_s = came_up_s
            self.progress.forms()
            self.assignment.introduce(ranks, nannies)
        except BaseException as error:  # any error or interrupt: stop what was started, then raise it again
            scarce = scarce_shared_memory(self.config) if isinstance(error, LaunchError) else ""
            self.stop()
            raise_interrupted(error)
            if scarce:
                raise LaunchError(f"{scarce}:\n{error}") from error
            raise
        self.state.is_started = True
        self.write()
        self.progress.close()

    def _take_over(self, before: Launch) -> list[Path]:
        """Take the folders and the lease of the ranks that these replace, and have those ranks end.

        Returns what those leave in the folder on this host, to be removed once they have ended.
        """
        with deferred_interrupts():
            self._taken, self._held = before._taken.pop_all(), before._held.pop_all()
            self._taken.callback(self.folders.remove_logs_if_empty)
            self.registration.follow(before.registration, before.table)
            link = before._begin_end()
            if link is not None:
                link.close()
        folders = self.folders
        cluster_file.remove(folders.profile)
        for path in (folders.cell_log, folders.stop_mark, *folders.profile.glob("trouble-*.txt")):  # of those ranks
            path.unlink(missing_ok=True)
        return folders.of_ranks()

    def join(self, *, observer: bool = False) -> None:
        """Connect to the ranks of a running cluster, and take the lease unless this is an observer.

        Raises a UsageError if another process has just taken the lease.
        """
        self.state.is_observer = observer
        if not observer:
            self._take_lease()
        self.state.processes = self._make_processes()
        identity = (
            f"{self.folders.cluster_id}-{os.getpid()}-{os.urandom(3).hex()}" if observer else self.folders.cluster_id
        )
        self.state.is_started = True
        self._connect(identity)
        if not observer:
            self.write()
            self._show()

    def _take_lease(self) -> None:
        try:
            self._held.enter_context(take_lease(self.folders.profile))
        except BlockingIOError as error:
            raise UsageError(
                f"another process has just attached to the cluster {self.config.name!r}; use or detach it there"
            ) from error

    def _show(self) -> None:
        """List a job among the clusters of this machine; other clusters are listed by their folders."""
        if self.config.job:
            link = list_job(self.folders.profile, self.folders.cluster_id)
            self._held.callback(link.unlink, missing_ok=True)

    def update(self, there: ClusterFile) -> None:
        """Adopt the holder's changes since this process joined: the rank table and the generation."""
        self.table[:] = there.load_table()
        self.state.generation = there.generation

    def _connect(self, identity: str) -> None:
        """Open the sockets to the ranks, once the controller has written its connection file."""
        info: dict[str, Any] | None = None
        while info is None:
            try:
                info = json.loads(read_own(self.folders.client_file))
            except (FileNotFoundError, json.JSONDecodeError):
                self._check_time()
                time.sleep(PROCESSES_POLL_SECONDS)
        self.state.link = Link(info, identity, self.dispatcher.on_message, self._on_controller_lost, self._on_tick)

    def write(self) -> None:
        """Write the cluster file, from which a process that joins later reads the cluster."""
        self.state.to_file().write()

    def stuck_remedy(self, ranks: Collection[int]) -> str:
        """Return the remedy for ranks that no longer respond."""
        return stuck_remedy(self.config, ranks, mpi_heals=self.state.mpi_heals)

    @property
    def is_being_stopped(self) -> bool:
        """Whether another process is ending the cluster, rank by rank."""
        self._is_being_stopped = self._is_being_stopped or self.folders.stop_mark.exists()
        return self._is_being_stopped

    # Failures

    def _on_controller_lost(self) -> None:
        """Report the loss, unless the cluster was shut down on purpose; called on the link's thread."""
        if self.link is not None and self.state.is_started:
            fate = "" if self.state.processes is None else self.state.processes.controller_fate
            self.state.lost_because = why_lost(
                self.config, self.folders, self.table, cut_s=self._cut_s, controller_fate=fate
            )
            self.link.fail_requests(self.lost_because)
            self.dispatcher.on_lost()

    def _on_tick(self) -> None:
        """Report ranks whose nanny was killed with them, or whose host is lost; called on the link's thread."""
        self._ticks += 1
        if self._ticks % TICKS_PER_CHECK == 0:
            for death in unreported_deaths(self.table):
                self._on_unreported_death(death)
        tunnel = tunnel_of(self.folders.profile)
        if tunnel is not None:
            tunnel.beat()
        state = self.state
        if state.placement.hosts and state.link is not None and state.is_started and not state.is_observer:
            self._heartbeat.turn(state.link, state.table)

    def _on_cut(self, silent_s: float) -> None:
        """Detach from the ranks of a job and let them run: a notebook that loses its network must not end them."""
        self._cut_s = silent_s
        self._on_controller_lost()

    def _note(self, text: str) -> None:
        self.state.on_note(text)

    def _on_unreported_death(self, death: RankDeath) -> None:
        self.dispatcher.on_message("iopub", as_message(death))

    def _check_time(self, arrived: int = 0) -> None:
        assert self.state.processes is not None
        self.state.processes.check()
        if time.monotonic() > self.state.start_deadline:
            if self.config.hosts:
                # Raises an error that names a lost host.
                place(self.config, self.folders, lambda _text: None, self._taken)
            text = output_end(self.state.processes.output)
            raise LaunchError(
                f"{arrived} of {counted(self.state.n, 'rank')} started within {self.config.start_timeout_s:g} s; "
                f"increase --start-timeout, or check the output of {self.state.processes.launcher}{text}"
            )

    # Stop

    def stop(self) -> None:
        """End every process and remove temporary state; a second call does nothing."""
        if not self.state.is_decided:
            self.progress.close()
            self._give_back()
            return
        link = self.link
        try:
            try:
                with deferred_interrupts():
                    self._begin_end()
            finally:
                self.finish_end()
                if self._before is not None:
                    self._before.finish_end()
        finally:  # also after an interrupt
            if link is not None:
                link.close()
            self.progress.close()
            self._let_go()
            self._give_back()

    def _begin_end(self) -> Link | None:
        """Ask all ranks to end; return the link, which is to be closed."""
        link, self.state.link = self.link, None
        processes, self.state.processes = self.state.processes, None
        here = [entry for entry in self.table if entry.state != RankState.DEAD and is_here(entry)]
        nannies = [(entry.nanny_pid, entry.nanny_started) for entry in here]
        # Do not wait for ranks that can't receive the request to end: Jupyter gives a kernel only a few seconds to
        # clean up. mpiexec waits for a daemon that is lost with its host, and no request reaches it.
        is_reachable = link is not None and any(entry.state != RankState.DEAD for entry in self.table)
        if processes is not None:
            self._ending = processes, nannies, is_reachable and not self._heartbeat.lost_hosts
        if link is not None:
            self._end_ranks(link)
        return link

    def finish_end(self) -> None:
        """Wait until the ranks that were asked to end have ended, and end what is left."""
        ending, self._ending = self._ending, None
        if ending is None:
            return
        processes, nannies, is_reachable = ending
        until = time.monotonic() + (START_END_SECONDS if is_reachable else 0.0)
        try:
            while time.monotonic() < until and any(runs(*nanny) for nanny in nannies):  # they may outlive mpiexec
                time.sleep(PROCESSES_POLL_SECONDS)
        finally:
            processes.end(max(0.0, until - time.monotonic()))

    def _give_back(self) -> None:
        with deferred_interrupts():
            self._taken.close()

    def leave(self, because: str = "was detached") -> None:
        """Detach from the processes and keep them running for a client that joins later."""
        link, self.state.link = self.link, None
        self.state.processes = None
        self._taken.pop_all()
        self.state.closed_because = because
        with deferred_interrupts():  # users press interrupt more than once
            if link is not None:
                link.close()
            self._let_go()

    def _let_go(self) -> None:
        self._held.close()
        tunnel = tunnel_of(self.folders.profile)
        if tunnel is not None and not self.state.is_observer:
            tunnel.close()

    def _end_ranks(self, link: Link) -> None:
        for entry in self.table:
            if entry.state != RankState.DEAD:
                link.request(entry.nanny, End())
