"""Start the processes of a cluster, join a running one, and stop them.

Covers: folders, controller and rank processes; sending each rank its identity; joining a running cluster.
Does not cover: running cells (``client.cluster``), waiting for ranks to register (``registration``).

The controller and the ranks start at the same moment: the ranks import torch while the controller starts.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from ...errors import ClusterClosedError, LaunchError
from ...launchers.folders import Folders
from ...launchers.mpi_shared_memory import scarce_shared_memory
from ...launchers.placement import Placement
from ...private_files import read_own
from ...protocol.messages import NannyHello, RankDeath, RankHello
from ...protocol.ranks import counted
from ...protocol.requests import End
from ...protocol.states import RankState
from ...protocol.time_limits import PROCESSES_POLL_SECONDS, START_END_SECONDS
from ...sigint import deferred_interrupts, raise_interrupted
from ..cells.history import Journal
from ..recovery.collective_steps import Steps
from ..recovery.explanations import stuck_remedy, why_lost
from ..recovery.host_heartbeat import Reach
from ..recovery.replacement import Replacement
from ..recovery.spare_hosts import Moves
from ..registry.cluster_file import VERSION, ClusterFile, Hold, Sign
from ..transport.link import Link, Message
from ..transport.ssh_tunnel import tunnel_of
from .gpus import choose_backend, choose_gpus, note_of_devices, usable_gpus
from .host_placement import place
from .job_processes import JobProcesses
from .processes import Processes, said
from .progress import StartProgress
from .rank_table import RankEntry, decide, node_of
from .registration import Arrivals, answer, as_message, is_here, runs, untold_deaths

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ...config.cluster import ClusterConfig
    from ...protocol.ranks import RankInfo

TICKS_PER_LOOK = 2  # timer ticks of the link between two checks of this machine's processes


class Launch(Replacement):
    """The processes of one cluster.

    Parameters
    ----------
    config
        The configuration of the cluster.
    on_message, on_lost
        Called on the link's thread: with each message that ranks publish, and when the controller has ended.
    there
        A running cluster to join; None: start a new one, whose placement :meth:`decide` chooses.
    progress
        Receives the progress of the start.
    """

    folders: Folders
    placement: Placement

    def __init__(
        self,
        config: ClusterConfig,
        on_message: Callable[[str, Message], None],
        on_lost: Callable[[], None],
        there: ClusterFile | None = None,
        progress: StartProgress | None = None,
    ) -> None:
        self.config = config
        self.progress = progress or StartProgress(config, lambda _text: None, lambda _text: None)
        self._on_message = on_message
        self._on_lost = on_lost
        self._arrivals = Arrivals()
        self._started = False
        self._ticks = 0  # calls of ``_on_tick``
        self._awaits_rank = False  # a replacement process is starting
        self._is_being_stopped = False
        self._is_visitor = False
        # Start one process at a time: a process does not know its rank until the client sends it.
        self._one_at_a_time = threading.Lock()
        self._processes: Processes | JobProcesses | None = None
        self._hold: Hold | None = None
        self._sign: Sign | None = None
        self.link: Link | None = None
        self.closed_because = "was shut down"
        self.lost_because = ""  # why the ranks are unreachable, and what to do
        self.is_decided = there is not None  # the placement of the ranks is decided
        self._taken = ExitStack()  # releases what was taken for the ranks: folders, a Slurm allocation
        if there:
            self.folders, self.placement, self.gpus = there.folders, Placement.load(there.placement), there.gpus
            self.n, self.address, self.started_s = len(there.table), there.address, there.started_s
            self._taken.callback(self.folders.remove)
            if self.placement.grant is not None:
                self._taken.callback(self.placement.grant.release)
        self.generation = there.generation if there else 0  # how often the process group was formed
        self.table: list[RankEntry] = there.load_table() if there else []
        # MPI can be repaired: after a death, or in a job after an interrupt.
        self.mpi_heals = there.mpi_heals if there else False
        self.mpi_lost = there.mpi_lost if there else ""  # why MPI has no world of all ranks
        self._knows_mpiexec_end = bool(self.mpi_lost)  # an earlier notebook may have reported it
        self.mpi_revoked = False  # MPI's communicator was revoked; it is rebuilt with the process group
        self.steps = Steps()
        self.note_of_devices = ""  # why ranks use the CPU although there is an accelerator
        self.on_note: Callable[[str], None] = lambda _words: None  # receives notes about other hosts for the user
        self.killed: list[str] = []  # messages about ranks that were killed because they took too long to exit
        self.cut_s = 0.0  # seconds since any host of a job last answered
        self._reach = Reach(self._on_untold, self._note, self._on_cut if config.job else None, self._mpiexec_was_killed)
        self._moves = Moves(config, self._reach)
        self.journal = Journal(began_late=there is not None)
        self._births = there.births if there else {}
        self._deadline = time.monotonic() + config.start_timeout_s

    def _make_folders(self) -> Folders:
        return Folders.make(self.config.name)

    def _mpiexec_was_killed(self) -> bool:
        return self._processes is not None and self._processes.mpiexec_was_killed

    def _make_processes(self) -> Processes | JobProcesses:
        if self.config.job:
            return JobProcesses(self.config, self.folders.profile)
        return Processes(self.config, self.folders, self.n, self.gpus, self._births, placement=self.placement)

    def decide(self) -> None:
        """Decide the number and the placement of the ranks; :meth:`stop` releases what this takes.

        Raises
        ------
        LaunchError, UsageError
            If the ranks can't be started as requested; nothing is left behind then.
        """
        self.started_s = time.time()
        try:
            with deferred_interrupts():  # else an interrupt could leave a folder that nothing removes
                self.folders = self._make_folders()
                self._taken.callback(self.folders.remove)
                self.progress.open(self.folders)
            elsewhere = self.config.hosts or self.config.launcher == "slurm"
            self.gpus = [] if elsewhere else choose_gpus(self.config)
            self.placement = place(self.config, self.folders, self.progress.waits, self._taken)
        except BaseException as error:  # also an interrupt
            self._give_back()
            raise_interrupted(error)
            raise
        self.gpus = self.gpus or [str(gpu) for gpu in range(max(self.placement.gpus.values(), default=0))]
        self.n = self.placement.count or self.config.count or len(self.gpus) or 2
        self.address = self.config.address or self.placement.master
        self.is_decided = True
        self.progress.decided(self.n)

    # Start

    def start(self) -> None:
        """Start all processes; returns when every rank has joined its process group.

        Raises
        ------
        LaunchError
            If a rank can't be started; everything that was started has ended by then.
        """
        try:
            self._processes = self._make_processes()
            with deferred_interrupts():  # ipyparallel's event loop would lose an interrupt
                self._processes.start()
            began_s = time.monotonic()
            self.progress.came(0)
            self.mpi_heals = self._processes.mpi_heals
            info = self._wait_for_connection()
            self._hold = Hold(self.folders.profile)
            self._connect(info, self.folders.cluster_id)
            entries = self._hear_from_ranks()
            self._came_up_s = time.monotonic() - began_s
            self.progress.forms()
            self._introduce(entries)
        except BaseException as error:  # any error or interrupt: stop what was started, then raise it again
            scarce = scarce_shared_memory(self.config) if isinstance(error, LaunchError) else ""
            self.stop()
            raise_interrupted(error)
            if scarce:
                raise LaunchError(f"{scarce}:\n{error}") from error
            raise
        self._started = True
        self.write()
        self.progress.close()

    def join(self, *, visitor: bool = False) -> None:
        """Connect to the ranks of a running cluster.

        Parameters
        ----------
        visitor
            Do not take the right to send cells.

        Raises
        ------
        BlockingIOError
            If another process has that right.
        """
        self._is_visitor = visitor
        if not visitor:
            self._hold = Hold(self.folders.profile)
        self._processes = self._make_processes()
        identity = (
            f"{self.folders.cluster_id}-{os.getpid()}-{os.urandom(3).hex()}" if visitor else self.folders.cluster_id
        )
        self._started = True
        self._connect(self._wait_for_connection(), identity)
        if not visitor:
            self.write()
            self._show()

    def _show(self) -> None:
        """List a job among the clusters of this machine; other clusters are listed by their folders."""
        if self.config.job:
            self._sign = Sign(self.folders.profile, self.folders.cluster_id)

    def update(self, there: ClusterFile) -> None:
        """Adopt the holder's changes since this process joined: the rank table and the generation."""
        self.table[:] = there.load_table()
        self.generation = there.generation

    def _connect(self, info: dict[str, Any], identity: str) -> None:
        self.link = Link(info, identity, self._on_early_message, self._on_controller_lost, self._on_tick)

    def write(self) -> None:
        """Write the cluster file, from which a process that joins later reads the cluster."""
        assert self._processes is not None
        kept = {each.name for each in fields(RankEntry) if each.metadata.get("kept")}
        ClusterFile(
            version=VERSION,
            cluster_id=self.folders.cluster_id,
            host=socket.gethostname(),
            started_s=self.started_s,
            notebook=os.environ.get("JPY_SESSION_NAME", ""),
            holder_pid=os.getpid(),
            config=asdict(self.config),
            profile=str(self.folders.profile),
            run=str(self.folders.run),
            local=str(self.folders.local),
            address=self.address,
            placement=self.placement.as_dict(),
            gpus=self.gpus,
            generation=self.generation,
            mpi_heals=self.mpi_heals,
            mpi_lost=self.mpi_lost,
            table=[
                {name: getattr(entry, name) for name in kept} | {"info": entry.info.as_dict()} for entry in self.table
            ],
            births=self._processes.births,
        ).write()

    def stuck_remedy(self, ranks: Collection[int]) -> str:
        """Return the remedy for ranks that no longer respond."""
        return stuck_remedy(self.config, ranks, mpi_heals=self.mpi_heals)

    def _wait_for_connection(self) -> dict[str, Any]:
        while True:
            try:
                info: dict[str, Any] = json.loads(read_own(self.folders.client_file))
            except (FileNotFoundError, json.JSONDecodeError):
                self._check_time()
                time.sleep(PROCESSES_POLL_SECONDS)
            else:
                return info

    def _hear_from_ranks(self) -> list[tuple[RankInfo, RankHello, NannyHello]]:
        """Wait for the hello of every rank and every nanny; return the identity of each rank."""
        hellos, nannies = self._arrivals.hear_from_all(self.n, self._check_time, self.progress.came)
        hosts = [host.name for host in self.placement.hosts]
        placed = [self._placed(hello) for hello in hellos]
        shown = self.placement.gpus if hosts else dict.fromkeys(map(node_of, placed), len(self.gpus))
        self.note_of_devices = note_of_devices(self.config, placed, shown)
        gpus = usable_gpus(self.config, placed, shown)
        decided = decide(placed, choose_backend(self.config, placed, gpus), gpus, hosts)
        return [(info, hello, nannies[hello.engine]) for info, hello in decided]

    def _placed(self, hello: RankHello) -> RankHello:
        """Add the host that mpiexec started this rank on: two hosts may report the same host name."""
        if hello.launch_host or hello.launch_rank is None:
            return hello
        return replace(hello, launch_host=self.placement.host_of(hello.launch_rank))

    @property
    def is_being_stopped(self) -> bool:
        """Whether another process is ending the cluster, rank by rank."""
        self._is_being_stopped = self._is_being_stopped or self.folders.stop_mark.exists()
        return self._is_being_stopped

    @property
    def open_link(self) -> Link:
        """The sockets to the ranks.

        Raises
        ------
        ClusterClosedError
            If the cluster was shut down.
        """
        self.check_open()
        assert self.link is not None
        return self.link

    def check_open(self) -> None:
        """Raise a ClusterClosedError if the cluster was shut down or is no longer reachable."""
        if self.link is not None and self.lost_because:
            raise ClusterClosedError(self.lost_because)
        if self.link is None:
            how = "" if self.config.job else "; start one with %dist_init"
            raise ClusterClosedError(f"the cluster {self.config.name!r} {self.closed_because}{how}")

    # Failures

    def _on_controller_lost(self) -> None:
        """Report the loss, unless the cluster was shut down on purpose; called on the link's thread."""
        if self.link is not None and self._started:
            self.lost_because = why_lost(
                self.config, self.folders, self.table, cut_s=self.cut_s, controller_fate=self.controller_fate
            )
            self.link.fail_requests(self.lost_because)
            self._on_lost()

    @property
    def controller_fate(self) -> str:
        """How the controller ended, as text; empty while it runs, or where it is unknown."""
        return self._processes.controller_fate if self._processes is not None else ""

    def _on_early_message(self, channel: str, message: Message) -> None:
        """Collect hellos and deaths until every rank has joined; called on the link's thread."""
        if message["header"]["msg_type"] == RankDeath.msg_type:
            self._note_end(RankDeath.from_content(message["content"]))
        if not self._started or self._awaits_rank:
            self._arrivals.take(message)
            if self.link is not None:  # else the sender repeats the message
                answer(self.link, message)
        elif message["header"]["msg_type"] == NannyHello.msg_type and not self._is_visitor:
            self._send_away(NannyHello.from_content(message["content"]))
        self._on_message(channel, message)

    def _send_away(self, hello: NannyHello) -> None:
        """End a rank that registered too late to be used."""
        if self.link is not None and all(entry.engine != hello.engine for entry in self.table):
            self.link.request(hello.nanny, End())

    def _on_tick(self) -> None:
        """Report ranks whose nanny was killed with them, or whose host is lost; called on the link's thread."""
        self._ticks += 1
        if self._ticks % TICKS_PER_LOOK == 0:
            for death in untold_deaths(self.table):
                self._on_untold(death)
        tunnel = tunnel_of(self.folders.profile)
        if tunnel is not None:
            tunnel.beat()
        if self.placement.hosts and self.link is not None and self._started and not self._is_visitor:
            self._reach.turn(self.link, self.table)

    def _on_cut(self, silent_s: float) -> None:
        """Detach from the ranks of a job and let them run: a notebook that loses its network must not end them."""
        self.cut_s = silent_s
        self._on_controller_lost()

    def _note(self, words: str) -> None:
        self.on_note(words)

    def _on_untold(self, death: RankDeath) -> None:
        self._on_early_message("iopub", as_message(death))

    def _check_time(self, heard: int = 0) -> None:
        assert self._processes is not None
        self._processes.check()
        if time.monotonic() > self._deadline:
            if self.config.hosts:
                # Raises an error that names a host that is gone.
                place(self.config, self.folders, lambda _words: None, self._taken)
            words = said(self._processes.output)
            raise LaunchError(
                f"{heard} of {counted(self.n, 'rank')} came up within {self.config.start_timeout_s:g} s; "
                f"give more with --start-timeout, or see what {self._processes.launcher} did{words}"
            )

    # Stop

    def stop(self) -> None:
        """End every process and remove temporary state; a second call does nothing."""
        if not self.is_decided:
            self._give_back()
            return
        link, self.link = self.link, None
        processes, self._processes = self._processes, None
        nannies = [entry.nanny_pid for entry in self.table if entry.state != RankState.DEAD and is_here(entry)]
        try:
            if link is not None:
                self._end_ranks(link)
            if processes is not None:
                # Do not wait for ranks that can't receive the request to end: Jupyter gives a kernel only a few seconds
                # to clean up. mpiexec waits for a daemon that is lost with its host, and no request reaches it.
                can_be_told = link is not None and any(entry.state != RankState.DEAD for entry in self.table)
                can_be_told = can_be_told and not self._reach.lost_hosts
                until = time.monotonic() + (START_END_SECONDS if can_be_told else 0.0)
                while time.monotonic() < until and any(map(runs, nannies)):  # ranks may outlive a killed mpiexec
                    time.sleep(PROCESSES_POLL_SECONDS)
                processes.end(max(0.0, until - time.monotonic()))
        finally:  # also after an interrupt
            if link is not None:
                link.close()
            self._let_go()
            self._give_back()

    def _note_end(self, death: RankDeath) -> None:
        """Record a rank that was killed because it took too long to exit; called on the link's thread."""
        entry = next((each for each in self.table if each.engine == death.engine), None)
        if entry is None or not death.unfinished:
            return
        words = f"rank {entry.info.rank} on {entry.info.host} was killed: {death.unfinished}"
        if self.link is None:
            self.killed.append(words)
        else:
            self._note(words)

    def _give_back(self) -> None:
        with deferred_interrupts():
            self._taken.close()

    def leave(self, because: str = "was left to itself") -> None:
        """Detach from the processes and keep them running for a client that joins later."""
        link, self.link = self.link, None
        self._processes = None
        self._taken.pop_all()
        self.closed_because = because
        with deferred_interrupts():  # users press interrupt more than once
            if link is not None:
                link.close()
            self._let_go()

    def _let_go(self) -> None:
        if self._sign is not None:
            self._sign.remove()
            self._sign = None
        if self._hold is not None:
            self._hold.release()
            self._hold = None
        tunnel = tunnel_of(self.folders.profile)
        if tunnel is not None and not self._is_visitor:
            tunnel.close()

    def _end_ranks(self, link: Link) -> None:
        for entry in self.table:
            if entry.state != RankState.DEAD:
                link.request(entry.nanny, End())
