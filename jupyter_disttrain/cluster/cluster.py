"""A cluster of ranks, as a person holds it in Python.

Covers: starting, running cells, moving variables, status, ending.
Does not cover: processes (``start``), the state of a cell (``cell_run``), drawing (``notebook``).
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
import weakref
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

from ..config import ClusterConfig
from ..errors import UsageError
from ..messages import NANNY_REQUEST
from ..ranks import label_ranks, parse_ranks
from . import variables
from .cells import Cells
from .group import restore_group
from .guardian import Guardian
from .hang import explain
from .inbox import event_from
from .recovery import Rules
from .start import Launch
from .telemetry import MetricsTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from typing_extensions import Self

    from .cell_run import CellRun, Listener
    from .link import Message
    from .rank_table import RankEntry

NANNY_SECONDS = 2.0  # for nannies to say that they have passed an interrupt on
SETTLE_SECONDS = 60.0  # for ranks to come back before a cell is sent; a new process imports torch meanwhile

_open: weakref.WeakSet[Cluster] = weakref.WeakSet()


class Cluster:
    """Ranks that are ready to train.

    Parameters
    ----------
    n
        The number of ranks; None for one per GPU, or 2 without GPUs.
    launcher
        ``"mpi"``: one MPI job, so that ``comm`` and Horovod work. ``"local"``: plain processes.
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

    def __init__(self, n: int | None = None, launcher: str = "mpi", **options: Any) -> None:
        self.config = ClusterConfig(n=n, launcher=launcher, **options)
        self.metrics = MetricsTable()
        self._interrupts: list[Future[Message]] = []  # that nannies may not have passed on yet
        self._cells: Cells | None = None
        self._restarting = threading.RLock()
        self._closed = False
        self._pid = os.getpid()
        self._start()
        _open.add(self)

    def _start(self) -> None:
        started = time.monotonic()
        self._launch = Launch(self.config, self._on_message, self._on_lost)
        self._launch.start()
        self.start_seconds = time.monotonic() - started
        config = self.config
        rules = Rules(
            grace_s=config.grace_s,
            hang_after_s=config.hang_after_s,
            on_rank_death=config.on_rank_death,
            has_group=config.backend != "none",
        )
        self._guardian = Guardian(self._launch, rules, self.reset, self.shutdown)
        self._cells = Cells(self._launch, self._guardian, 0 if self._cells is None else self._cells.count)

    @property
    def name(self) -> str:
        """The name by which several clusters are told apart."""
        return self.config.name

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._launch.table)

    @property
    def table(self) -> tuple[RankEntry, ...]:
        """Each rank: who it is and what state it is in."""
        return tuple(self._launch.table)

    @property
    def closed(self) -> bool:
        """Whether it was shut down."""
        return self._closed

    @property
    def log_folder(self) -> str:
        """The folder with one log per rank."""
        return str(self._launch.folders.run)

    def __repr__(self) -> str:
        """Say how many ranks there are, and where."""
        hosts = ", ".join(dict.fromkeys(entry.info.host for entry in self.table))
        state = "closed" if self._closed else f"{label_ranks(range(self.world_size))} on {hosts}"
        return f"<Cluster {self.name!r}: {state}>"

    def __enter__(self) -> Self:
        """Return itself; the end of the block shuts it down."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Shut down."""
        self.shutdown()

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
        execution_count: int | None = None,
        lines_before: int = 0,
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
        execution_count, lines_before
            The prompt number and the lines of the notebook's cell before ``code``, for tracebacks.

        Raises
        ------
        RankFailure
            If it failed on a rank.
        UsageError
            If the ranks are not there, or still run an earlier cell.
        """
        self._settle()
        chosen = parse_ranks(ranks, self.world_size)
        wait(self._interrupts, NANNY_SECONDS)  # one that comes late would hit this cell
        self._interrupts.clear()
        restore_group(self._launch, chosen)
        run = self._open_cells.send(
            code,
            chosen,
            self.interrupt,
            values=values,
            listener=listener,
            execution_count=execution_count,
            lines_before=lines_before,
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

        Ranks that wait in a collective are released: its process group is aborted and formed anew. ``forced`` aborts it
        without looking whether anybody waits.
        """
        self._guardian.on_interrupt(forced=forced)
        chosen = None if ranks is None else set(ranks)
        for entry in self.table:
            if entry.state == "running" and (chosen is None or entry.info.rank in chosen):
                request = {"do": "interrupt", "cell": entry.request}
                self._interrupts.append(self._launch.open_link.request(entry.nanny, NANNY_REQUEST, request))

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
        barrier = "__import__('torch.distributed').distributed.barrier()"  # a cell may have used the name dist
        if self.config.backend == "none":
            if self.config.launcher != "mpi":
                raise UsageError("these ranks have no process group to meet in; start them without --backend none")
            if self._launch.replaced:
                raise UsageError("a rank was replaced, and MPI has no world of all ranks since; %dist_reset makes one")
            barrier = "__import__('mpi4py.MPI').MPI.COMM_WORLD.Barrier()"
        start = time.monotonic()
        self.run(barrier, timeout_s=timeout_s, values=False)
        return time.monotonic() - start

    # Variables

    def push(self, values: Mapping[str, Any], ranks: str | int | Iterable[int] = "all") -> None:
        """Set variables on ranks.

        Raises
        ------
        UsageError
            If a name isn't one.
        UnserializableValueError
            If a value can't be sent; the message names it.
        """
        self._settle()
        chosen = parse_ranks(ranks, self.world_size)
        variables.check_names(values)
        self._open_cells.check_free(chosen)
        variables.push(self._launch, chosen, values)

    def pull(self, names: str | Sequence[str], ranks: str | int | Iterable[int] = 0) -> dict[int, dict[str, Any]]:
        """Bring variables back: by rank, then by name.

        Raises
        ------
        UsageError
            If a name isn't one, or isn't there on a rank.
        UnserializableValueError
            If a value can't be sent; the message names it and its ranks.
        """
        self._settle()
        chosen = parse_ranks(ranks, self.world_size)
        wanted = [names] if isinstance(names, str) else list(names)
        variables.check_names(wanted)
        self._open_cells.check_free(chosen)
        return variables.pull(self._launch, chosen, wanted)

    def copy(self, names: Sequence[str], source: int = 0, ranks: str | int | Iterable[int] = "all") -> None:
        """Copy variables from one rank to others.

        Raises
        ------
        UsageError
            If a name isn't one, or isn't there on the source.
        UnserializableValueError
            If a value can't be sent; the message names it.
        """
        self._settle()
        (source,) = parse_ranks(source, self.world_size)
        others = [rank for rank in parse_ranks(ranks, self.world_size) if rank != source]
        if not others:
            raise UsageError(f"rank {source} has its own variables already; name other ranks with --to")
        variables.check_names(names)
        self._open_cells.check_free([source, *others])
        variables.copy(self._launch, source, others, names)

    def send_comm(self, rank: int, content: dict[str, Any], buffers: list[Any]) -> None:
        """Pass a front end's widget message on to a rank."""
        engine = self._launch.table[rank].engine
        self._launch.open_link.post(engine, "comm_msg", content, buffers=buffers)

    # What arrives, on the link's thread

    def _on_message(self, channel: str, message: Message) -> None:
        if channel != "iopub":
            return
        engine = message["metadata"].get("engine", "")
        entry = next((entry for entry in self._launch.table if entry.engine == engine), None)
        if entry is None:
            return
        rank = entry.info.rank
        msg_type = message["header"]["msg_type"]
        if msg_type == "metrics":
            self.metrics.add(rank, message["content"])
            return
        event = event_from(rank, message)
        if event is not None and self._cells is not None:
            self._cells.take(entry, message, event)

    def _on_lost(self) -> None:
        """Take note that the controller is gone, and nobody can be reached any more."""
        for entry in self.table:
            entry.state = "dead"
        self._open_cells.abandon(f"the controller of cluster {self.name!r} ended; %dist_reset starts the ranks anew")

    # What ranks do

    def where(self, timeout_s: float = 1.0) -> list[str]:
        """Say what each rank is doing at this moment, one line for ranks that do the same; also while a cell runs."""
        running = {entry.info.rank for entry in self.table if entry.state == "running"}
        dead = [entry.info.rank for entry in self.table if entry.state == "dead"]
        idle = [entry.info.rank for entry in self.table if entry.state == "idle"]
        lines = explain(self._guardian.look_now(running, timeout_s), idle)
        return [*lines, f"{label_ranks(dead)}: dead"] if dead else lines

    def replace(self, ranks: Iterable[int]) -> list[str]:
        """End the processes of some ranks, even if they hang, and start new ones; returns what was done, in words.

        The other ranks keep their variables; all form a new process group.
        """
        chosen = sorted(set(ranks))
        gone = [self._launch.table[rank].pid_gone for rank in chosen]
        for rank in chosen:
            self.signal(rank, signal.SIGKILL)
        for each in gone:
            each.wait(NANNY_SECONDS)
        self._guardian.wait_until_settled(SETTLE_SECONDS)
        return self._guardian.take_notes()

    # The end

    def reset(self) -> None:
        """End all ranks and start as many anew; variables are gone.

        Raises
        ------
        LaunchError
            If they can't be started again; the cluster is closed then.
        """
        with self._restarting:
            self._guardian.close()
            self._launch.stop()
            self._open_cells.abandon(f"the cluster {self.name!r} was reset while the cell ran; run it again")
            try:
                self._start()
            except BaseException:  # an interrupt too: whatever stopped the start, the cluster is closed
                self._closed = True
                _open.discard(self)
                raise

    def shutdown(self) -> None:
        """End every process of this cluster; does nothing the second time."""
        if self._closed or self._pid != os.getpid():  # a forked child has no right to its parent's ranks
            return
        self._closed = True
        _open.discard(self)
        with self._restarting:
            self._guardian.close()
            self._launch.stop()
        self._open_cells.abandon("the cluster was shut down while the cell ran; start one with %dist_init")


@atexit.register
def _shutdown_all() -> None:
    for cluster in list(_open):
        if not cluster.config.keep:
            cluster.shutdown()
