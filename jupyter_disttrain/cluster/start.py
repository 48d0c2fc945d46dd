"""Bring a cluster up, and down.

Covers: the folders, controller and ranks as processes, telling each rank who it is, joining what runs already.
Does not cover: running cells (``cluster``), ranks that come and go (``arrivals``).

Controller and ranks are started at the same moment: while the controller comes up, the ranks import torch.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import ClusterClosedError, LaunchError
from ..messages import NANNY_REQUEST, NannyHello, RankDeath, RankHello
from ..private_files import read_own
from ..ranks import counted
from .arrivals import Arrivals, answer, as_message, untold_deaths
from .devices import choose_backend, choose_gpus, note_of_devices, usable_gpus
from .folders import Folders
from .interrupts import deferred_interrupts, raise_interrupted
from .journal import Journal
from .link import Link, Message
from .loss import why_lost
from .moves import Moves
from .placement import Placement, place
from .processes import POLL_SECONDS, Processes, said
from .rank_table import RankEntry, decide, node_of
from .reach import Reach
from .registry import ClusterFile, Hold, Sign
from .replacement import Replacement
from .shared_memory import scarce_shared_memory
from .start_progress import StartProgress
from .steps import Steps
from .tunnel import tunnel_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..config import ClusterConfig
    from ..ranks import RankInfo
    from .job import JobProcesses

TICKS_PER_LOOK = 2  # at the processes of this machine
END_SECONDS = 6.0  # for ranks to end by themselves at a shutdown


class Launch(Replacement):
    """The processes of one cluster.

    Parameters
    ----------
    config
        What is asked for.
    on_message, on_lost
        Called on the link's thread: with what ranks publish, and when the controller has ended.
    there
        A cluster that runs already and is joined; None: a new one is started, once it is decided where.
    progress
        Takes how far the start has come.
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
        self._ticks = 0  # of the link
        self._awaits_rank = False  # a new process for a rank that died
        self._is_being_stopped = False
        self._is_visitor = False
        self._one_at_a_time = threading.Lock()  # a process does not know for which rank it was started
        self._processes: Processes | JobProcesses | None = None
        self._hold: Hold | None = None
        self._sign: Sign | None = None
        self.link: Link | None = None
        self.closed_because = "was shut down"
        self.lost_because = ""  # why nobody can be reached any more, and what to do
        self.is_decided = there is not None  # where the ranks are, or will be
        self._taken = ExitStack()  # what gives back what was taken for them
        if there:
            self.folders, self.placement, self.gpus = there.folders, Placement.load(there.placement), there.gpus
            self.n, self.address, self.started_s = len(there.table), there.address, there.started_s
            self._taken.callback(self.folders.remove)
            if self.placement.grant is not None:
                self._taken.callback(self.placement.grant.release)
        self.generation = there.generation if there else 0  # of the process group: how often it was formed
        self.table: list[RankEntry] = there.load_table() if there else []
        self.mpi_heals = there.mpi_heals if there else False  # of a job: its calls can be ended
        self.mpi_lost = there.mpi_lost if there else ""  # why MPI has no world of all ranks
        self.mpi_revoked = False  # and is to be made anew with the group
        self.steps = Steps()
        self.note_of_devices = ""  # why ranks use the CPU although there is an accelerator
        self.on_note: Callable[[str], None] = lambda _words: None  # what a person should know of other hosts
        self.killed: list[str] = []  # ranks that took too long to end, in words
        self.cut_s = 0.0  # that no host of a job has answered
        self._reach = Reach(self._on_untold, self._note, self._on_cut if config.job else None)
        self._moves = Moves(config, self._reach)
        self.journal = Journal(began_late=there is not None)
        self._births = there.births if there else {}
        self._deadline = time.monotonic() + config.start_timeout_s

    def _make_folders(self) -> Folders:
        return Folders.make(self.config.name)

    def _make_processes(self) -> Processes | JobProcesses:
        if self.config.job:
            from .job import JobProcesses  # noqa: PLC0415  (which imports this module)

            return JobProcesses(self.config, self.folders.profile)
        return Processes(self.config, self.folders, self.n, self.gpus, self._births, placement=self.placement)

    def decide(self) -> None:
        """Decide how many ranks there will be, and where; what is taken for that, :meth:`stop` gives back.

        Raises
        ------
        LaunchError, UsageError
            If they can't be started as asked; nothing is left then.
        """
        self.started_s = time.time()
        try:
            with deferred_interrupts():  # else nobody would know of a folder that was just made
                self.folders = self._make_folders()
                self._taken.callback(self.folders.remove)
                self.progress.open(self.folders)
            elsewhere = self.config.hosts or self.config.launcher == "slurm"
            self.gpus = [] if elsewhere else choose_gpus(self.config)
            self.placement = place(self.config, self.folders, self.progress.waits, self._taken)
        except BaseException as error:  # an interrupt too
            self._give_back()
            raise_interrupted(error)
            raise
        self.gpus = self.gpus or [str(gpu) for gpu in range(max(self.placement.gpus.values(), default=0))]
        self.n = self.placement.count or self.config.count or len(self.gpus) or 2
        self.address = self.config.address or self.placement.master
        self.is_decided = True
        self.progress.decided(self.n)

    # Up

    def start(self) -> None:
        """Start everything; when it returns, every rank has joined its process group.

        Raises
        ------
        LaunchError
            If a rank can't be started; what was started has ended by then.
        """
        try:
            self._processes = self._make_processes()
            with deferred_interrupts():  # ipyparallel's event loop would lose one
                self._processes.start()
            self.progress.came(0)
            self.mpi_heals = self._processes.mpi_heals
            info = self._wait_for_connection()
            self._hold = Hold(self.folders.profile)
            self._connect(info, self.folders.cluster_id)
            entries = self._hear_from_ranks()
            self.progress.forms()
            self._introduce(entries)
        except BaseException as error:  # whatever it was, nothing that was started may stay; it is raised again
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
        """Reach the ranks of a cluster that runs already.

        Parameters
        ----------
        visitor
            Don't take the right to send cells.

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
        """Have a job be seen by who looks for clusters on this machine; others are seen by their folders."""
        if self.config.job:
            self._sign = Sign(self.folders.profile, self.folders.cluster_id)

    def update(self, there: ClusterFile) -> None:
        """Take what whoever holds the cluster has changed since it was joined."""
        self.table[:] = there.load_table()
        self.generation = there.generation

    def _connect(self, info: dict[str, Any], identity: str) -> None:
        self.link = Link(info, identity, self._on_early_message, self._on_controller_lost, self._on_tick)

    def write(self) -> None:
        """Write what somebody who joins later has to know."""
        assert self._processes is not None
        ClusterFile.of(self, self._processes.births).write()

    def _wait_for_connection(self) -> dict[str, Any]:
        while True:
            try:
                info: dict[str, Any] = json.loads(read_own(self.folders.client_file))
            except (FileNotFoundError, json.JSONDecodeError):
                self._check_time()
                time.sleep(POLL_SECONDS)
            else:
                return info

    def _hear_from_ranks(self) -> list[tuple[RankInfo, RankHello, NannyHello]]:
        """Wait for every rank and every nanny to say hello; return who is which rank."""
        hellos, nannies = self._arrivals.hear_from_all(self.n, self._check_time, self.progress.came)
        hosts = [host.name for host in self.placement.hosts]
        placed = [self._placed(hello) for hello in hellos]
        shown = self.placement.gpus if hosts else dict.fromkeys(map(node_of, placed), len(self.gpus))
        self.note_of_devices = note_of_devices(self.config, placed, shown)
        gpus = usable_gpus(self.config, placed, shown)
        decided = decide(placed, choose_backend(self.config, placed, gpus), gpus, hosts)
        return [(info, hello, nannies[hello.engine]) for info, hello in decided]

    def _placed(self, hello: RankHello) -> RankHello:
        """Add the host that mpiexec was told for this rank: two hosts may have one name of their own."""
        if hello.launch_host or hello.launch_rank is None:
            return hello
        return replace(hello, launch_host=self.placement.host_of(hello.launch_rank))

    @property
    def is_being_stopped(self) -> bool:
        """Whether another process ends the cluster, rank by rank."""
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
        """Raise a ClusterClosedError if the cluster was shut down, or can't be reached any more."""
        if self.link is not None and self.lost_because:
            raise ClusterClosedError(self.lost_because)
        if self.link is None:
            how = "" if self.config.job else "; start one with %dist_init"
            raise ClusterClosedError(f"the cluster {self.config.name!r} {self.closed_because}{how}")

    # What goes wrong on the way

    def _on_controller_lost(self) -> None:
        """Tell the cluster, unless this is how it was ended; called on the link's thread."""
        if self.link is not None and self._started:
            self.lost_because = why_lost(self)
            self.link.fail_requests(self.lost_because)
            self._on_lost()

    @property
    def controller_fate(self) -> str:
        """How the controller ended, in words; empty while it runs, or where that can't be known."""
        return self._processes.controller_fate if self._processes is not None else ""

    def _on_early_message(self, channel: str, message: Message) -> None:
        """Collect hellos and deaths until every rank has joined; called on the link's thread."""
        if self.link is None and message["header"]["msg_type"] == RankDeath.msg_type:
            self._note_end(RankDeath.from_content(message["content"]))
        if not self._started or self._awaits_rank:
            self._arrivals.take(message)
            if self.link is not None:  # else it is said again
                answer(self.link, message)
        elif message["header"]["msg_type"] == NannyHello.msg_type and not self._is_visitor:
            self._send_away(NannyHello.from_content(message["content"]))
        self._on_message(channel, message)

    def _send_away(self, hello: NannyHello) -> None:
        """End a rank that came up too late to be taken."""
        if self.link is not None and all(entry.engine != hello.engine for entry in self.table):
            self.link.request(hello.nanny, NANNY_REQUEST, {"do": "end"})

    def _on_tick(self) -> None:
        """Tell of ranks whose nanny was killed with them, or whose host is lost; called on the link's thread."""
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
        """Leave the ranks of a job to themselves: a notebook that loses its network must not end them."""
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
                place(self.config, self.folders, lambda _words: None, self._taken)  # one that is gone is named
            words = said(self._processes.output)
            raise LaunchError(
                f"{heard} of {counted(self.n, 'rank')} came up within {self.config.start_timeout_s:g} s; "
                f"give more with --start-timeout, or see what {self._processes.launcher} did{words}"
            )

    # Down

    def stop(self) -> None:
        """End every process and remove what must not stay; does nothing the second time."""
        if not self.is_decided:
            self._give_back()
            return
        link, self.link = self.link, None
        processes, self._processes = self._processes, None
        try:
            if link is not None:
                self._end_ranks(link)
            if processes is not None:
                # Who can't be told to end is not waited for: Jupyter gives a kernel a few seconds to put all away.
                # mpiexec waits for a daemon that is lost with its host, and nothing can be said to it.
                can_be_told = link is not None and any(entry.state != "dead" for entry in self.table)
                can_be_told = can_be_told and not self._reach.lost_hosts
                processes.end(END_SECONDS if can_be_told else 0.0)
        finally:  # an interrupt here, too
            if link is not None:
                link.close()
            self._let_go()
            self._give_back()

    def _note_end(self, death: RankDeath) -> None:
        """Note a rank that was killed because it took too long to end; called on the link's thread."""
        entry = next((each for each in self.table if each.engine == death.engine), None)
        if entry is None or not death.expected:
            return
        whose = f"rank {entry.info.rank} on {entry.info.host}"
        if death.signal_number == signal.SIGALRM:
            self.killed.append(
                f"{whose} was killed: its atexit functions, its threads and its open files took longer than 2 s to end"
            )
        elif death.signal_number == signal.SIGKILL:
            self.killed.append(
                f"{whose} was killed: it did not react within 3 s, so its atexit functions and open files may be lost"
            )

    def _give_back(self) -> None:
        with deferred_interrupts():
            self._taken.close()

    def leave(self, because: str = "was left to itself") -> None:
        """Leave the processes to themselves: they are there for who joins them later."""
        link, self.link = self.link, None
        self._processes = None
        self._taken.pop_all()
        self.closed_because = because
        with deferred_interrupts():  # a person presses more than once
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
            if entry.state != "dead":
                link.request(entry.nanny, NANNY_REQUEST, {"do": "end"})
