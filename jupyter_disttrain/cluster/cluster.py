"""A cluster of ranks, as a person holds it in Python.

Covers: starting, running cells, moving variables, status, ending.
Does not cover: processes (``start``), the state of a cell (``cell_run``), drawing (``notebook``).
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..config import ClusterConfig
from ..errors import LaunchError, UsageError
from ..messages import NANNY_REQUEST
from ..ranks import label_ranks, parse_ranks
from .cells import Cells
from .checkpoints import CheckpointKeeper
from .group import barrier_code, restore_group
from .guardian import Guardian
from .interrupts import deferred_interrupts, held_interrupts, raise_interrupted
from .job_watch import JobWatch
from .joining import Joining, open_clusters
from .journal import Origin
from .local_code import CodeSyncer
from .recovery import Rules
from .registry import Ledger
from .scripts import ScriptRunner
from .staging import DataStager
from .start import Launch
from .start_progress import StartProgress
from .telemetry import Telemetry
from .variables import VariableMover

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from typing_extensions import Self

    from .cell_run import CellRun, Listener
    from .link import Message
    from .rank_table import RankEntry

NANNY_SECONDS = 2.0  # for nannies to say that they have passed an interrupt on
SETTLE_SECONDS = 60.0  # for ranks to come back before a cell is sent; a new process imports torch meanwhile


class Cluster(Joining, VariableMover, ScriptRunner, CheckpointKeeper, DataStager, CodeSyncer):
    """Ranks that are ready to train.

    Parameters
    ----------
    n
        The number of ranks; None for one per GPU, or 2 without GPUs.
    launcher
        ``"mpi"``: one MPI job, so that ``comm`` and Horovod work. ``"local"``: plain processes. ``"slurm"``: a Slurm
        job, or the allocation around this process.
    tell
        Called with a line on what is waited for before ranks can be started, each time it changes; by default it is
        printed to stderr.
    on_start
        Called with a line on how far the start has come, such as ``"starting: 3 of 4 ranks, importing torch"``, each
        time it changes.
    **options
        The other fields of :class:`jupyter_disttrain.config.ClusterConfig`.

    Raises
    ------
    UsageError
        If what is asked for can't be.
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
        self.is_met = False  # it is a job whose ranks no notebook had joined before
        self._interrupts: list[tuple[RankEntry, Future[Message]]] = []  # that nannies may not have passed on yet
        self._cells: Cells | None = None
        self._restarting = threading.RLock()
        self._closed = False
        self.killed: list[str] = []  # ranks that took too long to end at the last shutdown or reset, in words
        self._job_watch = None
        self._places = {}
        self._brought_code = {}
        self._pid = os.getpid()
        self._last_use = time.monotonic()

    def _new_launch(self, on_start: Callable[[str], None] | None) -> Launch:
        progress = StartProgress(self.config, self._tell, on_start or (lambda _text: None))
        return Launch(self.config, self._on_message, self._on_lost, progress=progress)

    def _start(self, launch: Launch) -> None:
        """Start ranks where it is decided, or decide first."""
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
        except BaseException as error:  # an interrupt too, wherever it came between
            if is_up:
                self._stop_looking()
            launch.stop()
            raise_interrupted(error)
            raise

    def _look_after(self) -> None:
        self._guardian = Guardian(
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
        """Return itself; the end of the block shuts it down."""
        return self

    def __exit__(self, kind: object, *_exc: object) -> None:
        """Shut down; a checkpoint that is being written is waited for, unless an error ends the block."""
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
        """Run code on ranks, as IPython runs a cell.

        Parameters
        ----------
        code
            What a notebook cell may hold: statements, magics, top-level await.
        ranks
            E.g. ``"0,2-3"``, ``0`` or ``"all"``.
        timeout_s
            Interrupt the ranks after this many seconds.
        values
            Bring back the last expression's value, for :attr:`CellRun.results`.
        block
            Wait until every rank has ended; otherwise call :meth:`CellRun.wait` later.
        listener
            Sees what happens while it happens.
        origin
            Where the code stands in a notebook.

        Raises
        ------
        RankFailure
            If it failed on a rank.
        UsageError
            If the ranks are not there, or still run an earlier cell.
        """
        self._settle()
        chosen = parse_ranks(ranks, self.world_size)
        # One that comes late would hit this cell.
        wait([future for entry, future in self._interrupts if entry.state != "dead"], NANNY_SECONDS)
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
        """Wait until the session has come back from whatever befell it before."""
        self._guardian.wait_until_settled(SETTLE_SECONDS)
        with self._restarting:  # a death may have set off a reset, or the end
            self._launch.check_open()
        self._guardian.wait_until_settled(SETTLE_SECONDS)

    @property
    def _open_cells(self) -> Cells:
        assert self._cells is not None  # since the start
        return self._cells

    def interrupt(self, ranks: Iterable[int] | None = None, *, forced: bool = False) -> None:
        """Interrupt ranks that run a cell, through their nannies; an interrupt is never too early.

        Ranks that wait in a collective are released: its process group is aborted and formed again. The second
        interrupt of a cell, or one that is ``forced``, aborts it without looking whether they wait.
        """
        chosen = None if ranks is None else set(ranks)
        if not forced:
            self._guardian.note_waits({entry.info.rank for entry in self.table if entry.state == "running"})
        self._guardian.on_interrupt(chosen, forced=forced)
        for entry in self.table:
            if entry.state == "running" and (chosen is None or entry.info.rank in chosen):
                request = {"do": "interrupt", "cell": entry.request}
                self._interrupts.append((entry, self._launch.open_link.request(entry.nanny, NANNY_REQUEST, request)))

    def interrupt_and_wait(self, ranks: str | int | Iterable[int] = "all") -> list[str]:
        """Interrupt ranks that run a cell, as :meth:`interrupt`, and wait some seconds until they have ended it.

        Returns what came of it, in words. Each call, and each KeyboardInterrupt meanwhile, is one more interrupt.
        """
        words = self._open_cells.interrupt_and_wait(parse_ranks(ranks, self.world_size), self.interrupt)
        self._guardian.wait_until_settled(SETTLE_SECONDS)
        return [*words, *self._guardian.take_notes()]

    def take_notes(self) -> list[str]:
        """Return what happened since the last cell that a user should know, e.g. ranks that came back; only once."""
        return self._guardian.take_notes()

    @property
    def running_cells(self) -> list[CellRun]:
        """The cells that have not ended on all their ranks, whether they are waited for or not."""
        return self._open_cells.running

    def change(self, **rules: float | str) -> None:
        """Change ``grace_s``, ``hang_after_s`` or ``on_rank_death``, which a running cluster can be told.

        Raises
        ------
        UsageError
            If a value can't be used, or another field of the configuration is named.
        """
        settled = rules.keys() - {"grace_s", "hang_after_s", "on_rank_death"}
        if settled:
            raise UsageError(f"{', '.join(sorted(settled))} can't be changed while ranks run; start another cluster")
        self.config = self._launch.config = replace(self.config, **rules)  # type: ignore[arg-type]  # see above
        self._launch.write()
        self._guardian.change(Rules.of(self.config))

    def signal(self, rank: int, number: int) -> Future[Message]:
        """Send a signal to one rank's process."""
        nanny = self._launch.table[rank].nanny
        return self._launch.open_link.request(nanny, NANNY_REQUEST, {"do": "signal", "signal": int(number)})

    def sync(self, timeout_s: float | None = None) -> float:
        """Wait at a barrier of all ranks; returns the seconds that it took.

        Raises
        ------
        UsageError
            If the ranks have nothing to meet in: no process group, and no MPI.
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
        """Pass a front end's widget message on to a rank."""
        engine = self._launch.table[rank].engine
        link = self._launch.open_link
        link.post(engine, link.make("comm_msg", content), buffers=buffers)

    def replace(self, ranks: Iterable[int]) -> list[str]:
        """End the processes of some ranks, even if they hang, and start new ones; returns what was done, in words.

        The other ranks keep their variables; all form a new process group.

        Raises
        ------
        LaunchError
            If a rank can't be replaced.
        """
        self._check_own()
        chosen = sorted(set(ranks))
        self._launch.try_lost_hosts()
        gone = [self._launch.table[rank].pid_gone for rank in chosen]
        for rank in chosen:
            self._guardian.on_asked(rank)
            if self._launch.table[rank].state != "dead":
                self.signal(rank, signal.SIGKILL)
        for each in gone:
            each.wait(NANNY_SECONDS)
        self._guardian.wait_until_settled(SETTLE_SECONDS)
        notes = self._guardian.take_notes()
        if any(self._launch.table[rank].state == "dead" for rank in chosen):
            raise LaunchError("; ".join(notes) or f"{label_ranks(chosen)} did not come back; %dist_reset starts anew")
        return notes

    # The end

    def reset(self, *, on_start: Callable[[str], None] | None = None) -> None:
        """End all ranks and start as many new ones; variables are gone.

        Parameters
        ----------
        on_start
            As of :class:`Cluster`.

        Raises
        ------
        LaunchError
            If hosts can't be used any more, and all stays as it is; or if ranks can't be started again, and the cluster
            is closed then.
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
                finally:  # Slurm may refuse to end a job; who waits for a cell waits in vain all the same
                    self.killed = self._launch.killed
                    self._open_cells.abandon(f"the cluster {self.name!r} was reset while the cell ran; run it again")
                self._start(fresh)
            except BaseException:  # an interrupt too: whatever stopped the start, the cluster is closed
                fresh.stop()
                if is_gone:
                    self._closed = True
                    open_clusters.discard(self)
                raise

    def shutdown(self) -> None:
        """End every process of this cluster; does nothing the second time."""
        if self._closed or self._pid != os.getpid():  # a forked child has no right to its parent's ranks
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
