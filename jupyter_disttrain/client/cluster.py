"""Start and control a cluster of ranks from Python.

Covers: the interface of a cluster; each method delegates to a collaborator.
Does not cover: the state of a running cluster (``client.session``), starting and ending it (``client.lifecycle``,
``client.attach``), drawing (``notebook``).
"""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any

from ..config.cluster import ClusterConfig
from ..features.checkpoints.client import Checkpoints
from ..features.introspection.client import Introspection
from ..features.reloading.client import Reloading
from ..features.scripts.client import Scripts
from ..features.staging.client import Staging
from ..protocol.ranks import label_ranks
from ..protocol.states import RankState
from . import attach
from .cells import push_pull
from .cells.history import Origin
from .cells.session_group import barrier_code
from .lifecycle import Lifecycle
from .session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from typing_extensions import Self

    from ..features.debugger.client import Debugger
    from ..features.telemetry.client import Telemetry
    from ..features.telemetry.metrics_table import MetricsTable
    from .cells.cell_run import CellRun, Listener
    from .cells.compare import Comparison
    from .session import StartReport
    from .startup.rank_table import RankEntry


class Cluster:
    """A cluster of ranks that are ready to train.

    Parameters
    ----------
    n
        The number of ranks; None for one per GPU, or 2 without GPUs.
    launcher
        ``"mpi"``: one MPI job, so that ``comm`` and Horovod work. ``"local"``: plain processes. ``"slurm"``: a Slurm
        job, or the allocation around this process.
    report
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
        report: Callable[[str], None] | None = None,
        on_start: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        lifecycle = Lifecycle(Session(ClusterConfig(n=n, launcher=launcher, **options)), report)
        lifecycle.start(on_start)
        self._compose(lifecycle)

    def _compose(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._session = session = lifecycle.session
        self._checkpoints = Checkpoints(session)
        self._introspection = Introspection(session)
        self._reloading = Reloading(session)
        self._scripts = Scripts(session)
        self._staging = Staging(session)

    @classmethod
    def attach(
        cls, which: str | None = None, *, ssh: str = "ssh", unless: Callable[[str], None] = lambda _name: None
    ) -> Self:
        """Attach to a cluster that outlived its notebook.

        Parameters
        ----------
        which
            Name or ID of the cluster; or a job's ``FILE``, or ``HOST:FILE`` to connect through ssh; None if there is
            only one cluster.
        ssh
            The ssh command, with its options.
        unless
            Called with the cluster's name before attaching; raises an error to prevent it.

        Returns
        -------
        Cluster
            The cluster, whose ranks have kept their variables. Its :attr:`missed` lists the cells that had not ended
            when the earlier notebook left; they may still run.

        Raises
        ------
        UsageError
            If there is no such cluster, or another running process holds it.
        """
        self = cls.__new__(cls)
        self._compose(attach.attach(which, ssh, unless))
        return self

    def detach(self) -> None:
        """Close the cluster here and leave its ranks and their cells running, to be attached to later.

        Raises
        ------
        UsageError
            If the cluster was not started with ``keep``: it would end with this process.
        """
        attach.detach(self._lifecycle)

    def __enter__(self) -> Self:
        """Return the cluster; the end of the block shuts it down."""
        return self

    def __exit__(self, kind: object, *_exc: object) -> None:
        """Shut down; wait for a checkpoint that is being written, unless an error ends the block."""
        try:
            message = self.checkpoints.finish() if kind is None else ""
        finally:
            self.shutdown()
        if message:
            warnings.warn(message, stacklevel=2)

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
        stop_at_error: bool = False,
    ) -> CellRun:
        """Run code on ranks as an IPython cell.

        Parameters
        ----------
        code
            What a notebook cell may hold: statements, magics, top-level await.
        ranks
            E.g. ``"0,2-3"``, ``0`` or ``"all"``.
        timeout_s
            Interrupt the ranks after this many seconds, with ``block=False`` too.
        values
            Return the last expression's value from each rank, in :attr:`CellRun.results`.
        block
            Wait until every rank has ended the cell; otherwise call :meth:`CellRun.wait` later.
        listener
            Receives the cell's events while it runs.
        origin
            Where the code comes from in a notebook.
        stop_at_error
            Start a debugger in the frame of an error, whose prompts the listener shows.

        Raises
        ------
        RankFailure
            If the cell failed on a rank.
        UsageError
            If a rank does not exist, has died, or still runs an earlier cell.
        """
        return self._session.run(
            code,
            ranks,
            timeout_s=timeout_s,
            values=values,
            block=block,
            listener=listener,
            origin=origin,
            stop_at_error=stop_at_error,
        )

    def interrupt(self, ranks: Iterable[int] | None = None, *, forced: bool = False) -> None:
        """Interrupt ranks that run a cell, through their nannies.

        A rank that has not begun its cell is interrupted when it begins. Ranks that wait in a collective are released:
        their process group is aborted and formed again. The second interrupt of a cell, or one that is ``forced``,
        aborts the group without a check whether they wait.
        """
        self._session.interrupt(ranks, forced=forced)

    def interrupt_and_wait(self, ranks: str | int | Iterable[int] = "all") -> list[str]:
        """Interrupt ranks that run a cell, as :meth:`interrupt`, and wait some seconds until they have ended it.

        Returns messages on the outcome. Each call, and each KeyboardInterrupt during the wait, is one more interrupt.
        """
        return self._session.interrupt_and_wait(ranks)

    @property
    def running_cells(self) -> list[CellRun]:
        """The cells that have not ended on all their ranks, whether a thread waits for them or not."""
        return self._session.open_cells.running

    @property
    def missed(self) -> list[CellRun]:
        """The cells that had not ended when the earlier notebook left, if this process has attached to the cluster."""
        return self._session.missed

    def sync(self, timeout_s: float | None = None) -> float:
        """Wait at a barrier of all ranks; return the time that took, in seconds.

        Raises
        ------
        UsageError
            If the ranks have neither a process group nor MPI.
        """
        start = time.monotonic()
        code = barrier_code(self._session.launch)
        self.run(code, timeout_s=timeout_s, values=False, origin=Origin(is_cell=False))
        return time.monotonic() - start

    # Variables

    def push(self, values: Mapping[str, Any], ranks: str | int | Iterable[int] = "all") -> None:
        """Set variables on ranks.

        Raises
        ------
        UsageError
            If a name is not a valid variable name.
        UnserializableValueError
            If a value can't be sent; the message names it.
        """
        push_pull.check_names(values)
        push_pull.push(*self._session.ready(ranks), values)

    def pull(self, names: str | Sequence[str], ranks: str | int | Iterable[int] = 0) -> dict[int, dict[str, Any]]:
        """Return variables of ranks: by rank, then by name.

        Raises
        ------
        UsageError
            If a name is not valid, or a rank has no such variable.
        UnserializableValueError
            If a value can't be sent; the message names it and its ranks.
        """
        wanted = [names] if isinstance(names, str) else list(names)
        push_pull.check_names(wanted)
        return push_pull.pull(*self._session.ready(ranks), wanted)

    def copy(self, names: str | Sequence[str], source: int = 0, ranks: str | int | Iterable[int] = "all") -> None:
        """Copy variables from one rank to others.

        Raises
        ------
        UsageError
            If a name is not valid, or the source has no such variable.
        UnserializableValueError
            If a value can't be sent; the message names it.
        """
        names = [names] if isinstance(names, str) else names
        push_pull.check_names(names)
        _, (source,) = self._session.ready(source)
        launch, chosen = self._session.ready(ranks)
        push_pull.copy(launch, source, chosen, names)

    def diff(self, name: str, ranks: str | int | Iterable[int] = "all") -> Comparison:
        """Compare a variable over ranks, e.g. a model whose parameters should be the same on all.

        Returns
        -------
        Comparison
            True if ranks differ; its text names the first part that differs, by how much and on which ranks.

        Raises
        ------
        UsageError
            If the name is not valid, or a rank has no such variable.
        """
        push_pull.check_names([name])
        return push_pull.diff(*self._session.ready(ranks), name)

    # Features

    @property
    def checkpoints(self) -> Checkpoints:
        """Saves and loads checkpoints of the ranks' variables."""
        return self._checkpoints

    @property
    def debugger(self) -> Debugger:
        """Debugs the cells of the ranks, for a client of the Debug Adapter Protocol."""
        return self._session.debugger

    @property
    def introspection(self) -> Introspection:
        """Completes and documents code for the ranks, also while they run cells."""
        return self._introspection

    @property
    def reloading(self) -> Reloading:
        """Reloads edited modules on the ranks."""
        return self._reloading

    @property
    def scripts(self) -> Scripts:
        """Runs scripts on the ranks, and exports the cells that ran as a script."""
        return self._scripts

    @property
    def staging(self) -> Staging:
        """Copies data sets to the nodes' local disks."""
        return self._staging

    @property
    def telemetry(self) -> Telemetry:
        """The measurements that ranks and nodes report over time."""
        return self._session.telemetry

    @property
    def metrics(self) -> MetricsTable:
        """Values that cells logged with ``log_metrics``."""
        return self.telemetry.metrics

    # State

    @property
    def config(self) -> ClusterConfig:
        """The configuration; :meth:`change` changes it."""
        return self._session.config

    @property
    def name(self) -> str:
        """The name that distinguishes it from other clusters."""
        return self.config.name

    @property
    def cluster_id(self) -> str:
        """The unique id of the cluster."""
        return self._session.launch.folders.cluster_id

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._session.launch.table)

    @property
    def table(self) -> tuple[RankEntry, ...]:
        """The identity and the state of each rank."""
        return tuple(self._session.launch.table)

    @property
    def start_report(self) -> StartReport:
        """When and how fast the ranks were started, and with which network and devices."""
        return self._session.start_report

    @property
    def job(self) -> str:
        """The Slurm job that the ranks run in and its end time, as text; empty where there is none."""
        watch = self._session.job_watch
        return "" if watch is None else watch.text

    @property
    def log_folder(self) -> str:
        """The folder with one log per rank."""
        return str(self._session.launch.folders.run)

    @property
    def idle_s(self) -> float:
        """Seconds since a rank was last used, as far as this process observed."""
        return self._session.idle_s

    @property
    def hang(self) -> list[str]:
        """Which ranks wait for which, once that takes longer than it should; else empty."""
        return [] if self.closed else self._session.supervisor.stacks.hang()

    def where(self, timeout_s: float = 1.0) -> list[str]:
        """Describe what each rank is doing now, also while a cell runs; ranks that do the same share a line."""
        dead = [entry.info.rank for entry in self.table if entry.state == RankState.DEAD]
        lines = self._session.supervisor.stacks.where(timeout_s)
        return [*lines, f"{label_ranks(dead)}: dead"] if dead else lines

    def take_notes(self) -> list[str]:
        """Return messages on what happened since the last cell, e.g. that ranks recovered; each message only once."""
        return self._session.supervisor.take_notes()

    @property
    def closed(self) -> bool:
        """Whether it was shut down."""
        return self._session.is_closed

    def check_open(self) -> None:
        """Raise a ClusterClosedError with the reason if the cluster has ended."""
        self._session.launch.check_open()

    def __repr__(self) -> str:
        """Return the cluster's name, the number of ranks and their hosts."""
        hosts = ", ".join(dict.fromkeys(entry.info.host for entry in self.table))
        state = "closed" if self.closed else f"{label_ranks(range(self.world_size))} on {hosts}"
        return f"<Cluster {self.name!r}: {state}>"

    # Control

    def change(self, **rules: float | str) -> None:
        """Change ``grace_s``, ``hang_after_s`` or ``on_rank_death`` of a running cluster.

        Raises
        ------
        UsageError
            If a value is invalid, or another field of the configuration is named.
        ClusterClosedError
            If the cluster has ended.
        """
        self._session.change(**rules)

    def send_comm(self, rank: int, content: dict[str, Any], buffers: list[Any]) -> None:
        """Forward a front end's widget message to a rank."""
        engine = self._session.launch.table[rank].engine
        link = self._session.launch.open_link
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
        return self._lifecycle.replace(ranks)

    def reset(self, *, on_start: Callable[[str], None] | None = None) -> list[str]:
        """End all ranks and start as many new ones; all variables are lost.

        Parameters
        ----------
        on_start
            As of :class:`Cluster`.

        Returns
        -------
        list of str
            Messages that no cell has shown yet, and on ranks that were killed because they took too long to end.

        Raises
        ------
        LaunchError
            If hosts can't be used any more; the cluster then stays as it is. Also if new ranks can't be started; the
            cluster is then closed.
        ClusterClosedError
            If the cluster was shut down or left.
        """
        return self._lifecycle.reset(on_start)

    def shutdown(self) -> list[str]:
        """End every process of this cluster; a second call ends nothing.

        Returns
        -------
        list of str
            Messages on ranks that were killed because they took too long to end.
        """
        self._lifecycle.shutdown()
        return self._session.launch.killed
