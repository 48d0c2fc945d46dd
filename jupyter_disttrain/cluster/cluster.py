"""A cluster of ranks, as a person holds it in Python.

Covers: starting, running cells, moving variables, status, ending.
Does not cover: processes (``start``), the state of a cell (``cell_run``), drawing (``notebook``).
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

from ..config import ClusterConfig
from ..errors import UsageError
from ..messages import NANNY_REQUEST, OPTIONS
from ..ranks import label_ranks, parse_ranks
from . import variables
from .cell_run import CellRun, Listener
from .events import Died, Replied, Silent
from .group import restore_group
from .inbox import event_from
from .rank_table import check_idle
from .start import Launch
from .telemetry import MetricsTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from typing_extensions import Self

    from .events import Event
    from .link import Message
    from .rank_table import RankEntry

NANNY_SECONDS = 2.0  # for nannies to say that they have passed an interrupt on
LATE_LIMIT = 1000  # events kept for the next cell, said by threads that earlier cells left behind

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
        self._lock = threading.RLock()
        self._cells: dict[str, tuple[CellRun, int]] = {}  # by the id of the request, with its rank
        self._current: CellRun | None = None
        self._late: list[Event] = []
        self._interrupts: list[Future[Message]] = []  # that nannies may not have passed on yet
        self._count = 0
        self._closed = False
        self._pid = os.getpid()
        self._start()
        _open.add(self)

    def _start(self) -> None:
        started = time.monotonic()
        self._launch = Launch(self.config, self._on_message, self._on_lost)
        self._launch.start()
        self.start_seconds = time.monotonic() - started

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
        chosen = parse_ranks(ranks, self.world_size)
        # Without the lock, because what ranks say meanwhile has to be taken.
        wait(self._interrupts, NANNY_SECONDS)  # one that comes late would hit this cell
        self._interrupts.clear()
        restore_group(self._launch, chosen)
        run = self._send_cell(code, chosen, values, listener, execution_count, lines_before)
        return run.wait(timeout_s) if block else run

    def _send_cell(
        self,
        code: str,
        ranks: tuple[int, ...],
        values: bool,
        listener: Listener | None,
        execution_count: int | None,
        lines_before: int,
    ) -> CellRun:
        with self._lock:
            self._check_free(ranks)
            self._count += 1
            hosts = {entry.info.rank: entry.info.host for entry in self.table}
            run = CellRun(self._count, ranks, hosts, self.interrupt, listener)
            rest = [] if self._current is None else self._current.take_rest()
            for event in (*rest, *self._late):
                run.put(event)
            self._late.clear()
            self._current = run
            options = {
                "cell": self._count,
                "value": values,
                "execution_count": execution_count or self._count,
                "lines_before": lines_before,
            }
            content = {
                "code": code,
                "silent": False,
                "store_history": True,
                "allow_stdin": False,
                "stop_on_error": False,
            }
            for rank in ranks:
                self._send_to_rank(run, rank, content, options)
        return run

    def _send_to_rank(self, run: CellRun, rank: int, content: Message, options: Message) -> None:
        entry = self._launch.table[rank]
        entry.state, entry.cell = "running", options["execution_count"]

        def on_reply(message: Message) -> None:
            told = message["metadata"].get(OPTIONS, {})
            content, buffers = variables.with_value(message["content"], message["buffers"])
            quiet = told.get("quiet", True)
            event = Replied(rank=rank, time_s=time.time(), content=content, buffers=buffers, quiet=quiet)
            entry.has_group = told.get("has_group", True)
            if entry.state == "running":
                entry.state = "idle"
            run.put(event)

        msg_id = self._launch.open_link.post(
            entry.engine, "execute_request", content, metadata={OPTIONS: options}, on_reply=on_reply
        )
        entry.request = msg_id
        self._cells[msg_id] = (run, rank)

    def _check_free(self, ranks: Sequence[int]) -> None:
        """Refuse to queue a cell behind one that may never end."""
        self._launch.check_open()
        check_idle(self._launch.table, ranks)
        self._cells = {
            msg_id: cell for msg_id, cell in self._cells.items() if not cell[0].done or cell[0] is self._current
        }

    def interrupt(self, ranks: Iterable[int] | None = None) -> None:
        """Interrupt ranks that run a cell, through their nannies; an interrupt is never too early."""
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
        chosen = parse_ranks(ranks, self.world_size)
        variables.check_names(values)
        with self._lock:
            self._check_free(chosen)
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
        chosen = parse_ranks(ranks, self.world_size)
        wanted = [names] if isinstance(names, str) else list(names)
        variables.check_names(wanted)
        with self._lock:
            self._check_free(chosen)
        return variables.pull(self._launch, chosen, wanted)

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
        if event is None:
            return
        if isinstance(event, Died):
            self._on_death(entry, event)
            return
        run, _ = self._cells.get(message["parent_header"].get("msg_id", ""), (None, rank))
        with self._lock:
            if run is not None and not run.ended_s:
                run.put(event)
            elif isinstance(event, Silent):
                return  # of a cell that was given up; the cell that runs now has its own
            elif self._current is not None and not self._current.ended_s:
                self._current.put(event)  # said by a thread that an earlier cell left behind
            elif len(self._late) < LATE_LIMIT:
                self._late.append(event)

    def _on_death(self, entry: RankEntry, event: Died) -> None:
        with self._lock:  # a cell that is being sent at this moment has to learn of it too
            entry.state = "dead"
            for run, rank in list(self._cells.values()):
                if rank == entry.info.rank:
                    run.put(event)

    def _on_lost(self) -> None:
        """Take note that the controller is gone, and nobody can be reached any more."""
        with self._lock:
            for entry in self.table:
                entry.state = "dead"
            self._abandon_cells(f"the controller of cluster {self.name!r} ended; %dist_reset starts the ranks anew")

    # The end

    def reset(self) -> None:
        """End all ranks and start as many anew; variables are gone.

        Raises
        ------
        LaunchError
            If they can't be started again; the cluster is closed then.
        """
        self._launch.stop()
        self._abandon_cells(f"the cluster {self.name!r} was reset while the cell ran; run it again")
        self._current = None
        self._late.clear()
        try:
            self._start()
        except BaseException:  # an interrupt too: whatever stopped the start, the cluster is closed
            self._closed = True
            _open.discard(self)
            raise

    def _abandon_cells(self, reason: str) -> None:
        for run, _ in list(self._cells.values()):
            run.abandon(reason)
        self._cells.clear()

    def shutdown(self) -> None:
        """End every process of this cluster; does nothing the second time."""
        if self._closed or self._pid != os.getpid():  # a forked child has no right to its parent's ranks
            return
        self._closed = True
        _open.discard(self)
        self._launch.stop()
        self._abandon_cells("the cluster was shut down while the cell ran; start one with %dist_init")


@atexit.register
def _shutdown_all() -> None:
    for cluster in list(_open):
        if not cluster.config.keep:
            cluster.shutdown()
