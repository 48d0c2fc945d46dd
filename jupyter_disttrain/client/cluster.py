"""Start and control a cluster of ranks from Python.

Covers: starting, running cells, moving variables, status, shutdown.
Does not cover: processes (``client.startup.launch``), the state of a cell (``client.cells.cell_run``), drawing
(``notebook``).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import warnings
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..config.cluster import ClusterConfig
from ..config.rank_selection import parse_ranks
from ..errors import LaunchError, UsageError
from ..features.checkpoints.client import CheckpointKeeper
from ..features.reloading.client import CodeSyncer
from ..features.scripts.client import ScriptRunner
from ..features.staging.client import DataStager
from ..features.telemetry.client import Telemetry
from ..protocol.ranks import label_ranks
from ..protocol.requests import End, Interrupt, Signal
from ..protocol.states import RankState
from ..protocol.time_limits import CLUSTER_END_SECONDS, CLUSTER_NANNY_SECONDS, CLUSTER_SETTLE_SECONDS
from ..sigint import deferred_interrupts, held_interrupts, raise_interrupted
from .cells.executor import Cells
from .cells.history import Origin
from .cells.session_group import barrier_code, restore_group
from .cells.variables import VariableMover
from .joining import Joining, open_clusters
from .recovery.state_machine import Rules
from .recovery.supervisor import Supervisor
from .registry.cluster_file import Ledger
from .startup.job_watch import JobWatch
from .startup.launch import Launch
from .startup.progress import StartProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from typing_extensions import Self

    from .cells.cell_run import CellRun, Listener
    from .startup.rank_table import RankEntry
    from .transport.link import Message


class Cluster(Joining, VariableMover, ScriptRunner, CheckpointKeeper, DataStager, CodeSyncer):
    """A cluster of ranks that are ready to train.

    Parameters
    ----------
    n
        The number of ranks; None for one per GPU, or 2 without GPUs.
    launcher
        ``"mpi"``: one MPI job, so that ``comm`` and Horovod work. ``"local"``: plain processes. ``"slurm"``: a Slurm
        job, or the allocation around this process.
    tell
        Called with a line on what the start waits for before it can start ranks, each time it changes. By default the
        line is printed to stderr.
    on_start
        Called with a line on the progress of the start, such as ``"starting: 3 of 4 ranks, importing torch"``, each
        time it changes.
    **options
        The other fields of :class:`jupyter_disttrain.config.cluster.ClusterConfig`.

    Raises
    ------
    UsageError
        If the options are invalid, or this machine or these hosts can't satisfy them.
    LaunchError
        If the ranks can't be started; nothing is left running then.

    Examples
    --------
    >>> with Cluster(n=4) as cluster:                                        # doctest: +SKIP
    ...     run = cluster.run("x = torch.ones(3) * rank; dist.all_reduce(x); x")
    ...     run.results
    {0: tensor([6., 6., 6.]), 1: tensor([6., 6., 6.]), ...}
    """

    def __init__(
        self,
        n: int | None = None,
        launcher: str = "mpi",
        *,
        tell: Callable[[str], None] | None = None,
        on_start: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        self._prepare(ClusterConfig(n=n, launcher=launcher, **options), tell)
        self._start(self._new_launch(on_start))
        open_clusters.add(self)

    def _prepare(self, config: ClusterConfig, tell: Callable[[str], None] | None = None) -> None:
        self.config = config
        self._tell = tell or partial(print, file=sys.stderr, flush=True)
        self.telemetry = Telemetry(config.sample_s)
        self.missed: list[CellRun] = []
        self.is_met = False  # whether this is a job whose ranks no notebook had joined before
        self._interrupts: list[tuple[RankEntry, Future[Message]]] = []  # those that nannies may not have passed on yet
        self._cells: Cells | None = None
        self._restarting = threading.RLock()
        self._closed = False
        self.killed: list[str] = []  # messages on ranks killed at the last shutdown or reset: they took too long to end
        self._job_watch = None
        self._places = {}
        self._brought_code = {}
        self._pid = os.getpid()
        self._last_use = time.monotonic()

    def _new_launch(self, on_start: Callable[[str], None] | None) -> Launch:
        progress = StartProgress(self.config, self._tell, on_start or (lambda _text: None))
        return Launch(self.config, self._on_message, self._on_lost, progress=progress)

    def _start(self, launch: Launch) -> None:
        """Start the ranks; decide first where they run, unless that is done."""
        started = time.monotonic()
        self._launch = launch
        is_up = False
        try:
            if not launch.is_decided:
                launch.decide()
            launch.start()
            self.start_seconds = time.monotonic() - started
            with deferred_interrupts():
                self._look_after()
                is_up = True
        except BaseException as error:  # also a KeyboardInterrupt, wherever it is raised
            if is_up:
                self._stop_looking()
            launch.stop()
            raise_interrupted(error)
            raise

    def _look_after(self) -> None:
        self._guardian = Supervisor(
            self._launch, Rules.of(self.config), self.telemetry.remarks, self.reset, self.shutdown
        )
        ledger = Ledger(self._launch.folders.ledger if self.config.keep else None)
        count = ledger.last if self._cells is None else self._cells.count
        self._cells = Cells(self._launch, self._guardian, ledger, count)
        grant = self._launch.placement.grant
        self._job_watch = JobWatch(grant.job, self._on_job_notice, self._on_job_over) if grant else None

    def _stop_looking(self) -> None:
        if self._job_watch is not None:
            self._job_watch.close()
        self._guardian.close()

    def __enter__(self) -> Self:
        """Return the cluster; the end of the block shuts it down."""
        return self

    def __exit__(self, kind: object, *_exc: object) -> None:
        """Shut down; wait for a checkpoint that is being written, unless an error ends the block."""
        try:
            told = self.finish_saves() if kind is None else ""
        finally:
            self.shutdown()
        if told:
            warnings.warn(told, stacklevel=2)

    # Cells

    def run(
        self,
        code: str,
        ranks: str | int | Iterable[int] = "all",
        *,
        timeout_s: float | None = None,
        values: bool = True,
        block: bool = True,
        listener: Listener | None = None,
        origin: Origin | None = None,
    ) -> CellRun:
        """Run code on ranks as an IPython cell.

        Parameters
        ----------
        code
            What a notebook cell may hold: statements, magics, top-level await.
        ranks
            E.g. ``"0,2-3"``, ``0`` or ``"all"``.
        timeout_s
            Interrupt the ranks after this many seconds.
        values
            Return the last expression's value from each rank, in :attr:`CellRun.results`.
        block
            Wait until every rank has ended the cell; otherwise call :meth:`CellRun.wait` later.
        listener
            Receives the cell's events while it runs.
        origin
            Where the code comes from in a notebook.

        Raises
        ------
        RankFailure
            If the cell failed on a rank.
        UsageError
            If a rank does not exist, has died, or still runs an earlier cell.
        """
        self._settle()
        chosen = parse_ranks(ranks, self.world_size)
        # An interrupt that a nanny delivers late would hit this cell.
        wait([future for entry, future in self._interrupts if entry.state != RankState.DEAD], CLUSTER_NANNY_SECONDS)
        self._interrupts.clear()
        self._last_use = time.monotonic()
        with held_interrupts():
            restore_group(self._launch, chosen, self._guardian.form)
            run = self._open_cells.send(
                code,
                chosen,
                self.interrupt,
                values=values,
                listener=listener,
                origin=origin or Origin(),
            )
            return run.wait(timeout_s) if block else run

    def _settle(self) -> None:
        """Wait until the session has recovered from earlier failures and interrupts."""
        self._guardian.wait_until_settled(CLUSTER_SETTLE_SECONDS)
        with self._restarting:  # a rank's death may have started a reset or a shutdown
            self._launch.check_open()
        self._guardian.wait_until_settled(CLUSTER_SETTLE_SECONDS)

    @property
    def _open_cells(self) -> Cells:
        assert self._cells is not None  # set when the cluster was started
        return self._cells

    def interrupt(self, ranks: Iterable[int] | None = None, *, forced: bool = False) -> None:
        """Interrupt ranks that run a cell, through their nannies.

        A rank that has not begun its cell is interrupted when it begins. Ranks that wait in a collective are released:
        their process group is aborted and formed again. The second interrupt of a cell, or one that is ``forced``,
        aborts the group without a check whether they wait.
        """
        chosen = None if ranks is None else set(ranks)
        if not forced:
            self._guardian.note_waits({entry.info.rank for entry in self.table if entry.state == RankState.RUNNING})
        self._guardian.on_interrupt(chosen, forced=forced)
        for entry in self.table:
            if entry.state == RankState.RUNNING and (chosen is None or entry.info.rank in chosen):
                request = Interrupt(cell=entry.request)
                self._interrupts.append((entry, self._launch.open_link.request(entry.nanny, request)))

    def interrupt_and_wait(self, ranks: str | int | Iterable[int] = "all") -> list[str]:
        """Interrupt ranks that run a cell, as :meth:`interrupt`, and wait some seconds until they have ended it.

        Returns messages on the outcome. Each call, and each KeyboardInterrupt during the wait, is one more interrupt.
        """
        words = self._open_cells.interrupt_and_wait(parse_ranks(ranks, self.world_size), self.interrupt)
        self._guardian.wait_until_settled(CLUSTER_SETTLE_SECONDS)
        return [*words, *self._guardian.take_notes()]

    def take_notes(self) -> list[str]:
        """Return messages on what happened since the last cell, e.g. that ranks recovered; each message only once."""
        return self._guardian.take_notes()

    @property
    def running_cells(self) -> list[CellRun]:
        """The cells that have not ended on all their ranks, whether a thread waits for them or not."""
        return self._open_cells.running

    def change(self, **rules: float | str) -> None:
        """Change ``grace_s``, ``hang_after_s`` or ``on_rank_death`` of a running cluster.

        Raises
        ------
        UsageError
            If a value is invalid, or another field of the configuration is named.
        ClusterClosedError
            If the cluster has ended.
        """
        self._launch.check_open()
        settled = rules.keys() - {"grace_s", "hang_after_s", "on_rank_death"}
        if settled:
            raise UsageError(f"{', '.join(sorted(settled))} can't be changed while ranks run; start another cluster")
        self.config = self._launch.state.config = replace(self.config, **rules)  # type: ignore[arg-type]  # see above
        self._launch.write()
        self._guardian.change(Rules.of(self.config))

    def signal(self, rank: int, number: int) -> Future[Message]:
        """Send a signal to one rank's process."""
        nanny = self._launch.table[parse_ranks(rank, self.world_size)[0]].nanny
        return self._launch.open_link.request(nanny, Signal(number=int(number)))

    def sync(self, timeout_s: float | None = None) -> float:
        """Wait at a barrier of all ranks; return the time that took, in seconds.

        Raises
        ------
        UsageError
            If the ranks have neither a process group nor MPI.
        """
        start = time.monotonic()
        self.run(barrier_code(self._launch), timeout_s=timeout_s, values=False, origin=Origin(is_cell=False))
        return time.monotonic() - start

    def _ready(self, ranks: str | int | Iterable[int]) -> tuple[Launch, tuple[int, ...]]:
        self._settle()
        chosen = parse_ranks(ranks, self.world_size)
        self._open_cells.check_free(chosen)
        self._last_use = time.monotonic()
        return self._launch, chosen

    def send_comm(self, rank: int, content: dict[str, Any], buffers: list[Any]) -> None:
        """Forward a front end's widget message to a rank."""
        engine = self._launch.table[rank].engine
        link = self._launch.open_link
        link.post(engine, link.make("comm_msg", content), buffers=buffers)

    def replace(self, ranks: Iterable[int]) -> list[str]:
        """End the processes of some ranks and start new ones; return messages on what was done.

        The processes end as at a shutdown: ``atexit`` functions run, and files are closed. Those that hang are killed.

        The other ranks keep their variables; all ranks form a new process group.

        Raises
        ------
        LaunchError
            If a rank can't be replaced.
        """
        self._check_own()
        chosen = parse_ranks(ranks, self.world_size)
        self._launch.replacer.try_lost_hosts()
        gone = [self._launch.table[rank].pid_gone for rank in chosen]
        for rank in chosen:
            self._guardian.on_asked(rank)
            if self._launch.table[rank].state != RankState.DEAD:
                self._launch.open_link.request(self._launch.table[rank].nanny, End())
        until = time.monotonic() + CLUSTER_END_SECONDS
        for each in gone:
            each.wait(until - time.monotonic())
        self._guardian.wait_until_settled(CLUSTER_SETTLE_SECONDS)
        if left := [rank for rank, each in zip(chosen, gone, strict=True) if not each.is_set()]:
            raise LaunchError(
                f"{label_ranks(left)} did not end: the parent process of a rank, which ends it, does not respond, as "
                "if it was stopped or its host out of reach; a new process follows when it does, and %dist_reset "
                "starts all ranks anew"
            )
        notes = self._guardian.take_notes()
        if any(self._launch.table[rank].state == RankState.DEAD for rank in chosen):
            raise LaunchError("; ".join(notes) or f"{label_ranks(chosen)} did not come back; %dist_reset starts anew")
        return notes

    # Shutdown

    def reset(self, *, on_start: Callable[[str], None] | None = None) -> None:
        """End all ranks and start as many new ones; all variables are lost.

        Parameters
        ----------
        on_start
            As of :class:`Cluster`.

        Raises
        ------
        LaunchError
            If hosts can't be used any more; the cluster then stays as it is. Also if new ranks can't be started; the
            cluster is then closed.
        """
        self._check_own()
        with self._restarting:
            fresh, is_gone = self._new_launch(on_start), False
            try:
                if self.config.hosts:
                    fresh.decide()
                is_gone = True
                self._stop_looking()
                try:
                    self._launch.stop()
                finally:  # Slurm may refuse to end a job; threads that wait for a cell must be released even then
                    self.killed = self._launch.killed
                    self._open_cells.abandon(f"the cluster {self.name!r} was reset while the cell ran; run it again")
                self._start(fresh)
            except BaseException:  # also a KeyboardInterrupt: once the old ranks are gone, the cluster is closed
                fresh.stop()
                if is_gone:
                    self._closed = True
                    open_clusters.discard(self)
                raise

    def shutdown(self) -> None:
        """End every process of this cluster; a second call does nothing."""
        if self._closed or self._pid != os.getpid():  # a forked child must not end its parent's ranks
            return
        self._closed = True
        open_clusters.discard(self)
        try:
            with self._restarting:
                self._stop_looking()
                self._launch.stop()
        finally:  # as above
            self.killed = self._launch.killed
            self._open_cells.abandon("the cluster was shut down while the cell ran; start one with %dist_init")


@atexit.register
def _shutdown_all() -> None:
    for cluster in list(open_clusters):
        if not cluster.config.keep:
            cluster.shutdown()
