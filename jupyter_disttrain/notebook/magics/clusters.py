"""Hold the clusters of one notebook, which its magics share.

Covers: the open clusters by name, the one used last, their views, the screens of their cells, cells in the background.
Does not cover: the magics (``cluster_magics``, ``cell_magics`` and others), drawing (``notebook.output.renderer``).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics

from ...client import Cluster
from ...client.cells.history import Origin
from ...client.startup.prewarm import Prewarmed
from ...config.cluster import ClusterConfig
from ...errors import DisttrainError, UsageError
from ...protocol.ranks import label_ranks
from ..output.comms import CommRelay
from ..output.displays import NotebookSink
from ..output.renderer import Screen
from ..views.status_text import kept_text
from ..views.views import Views
from .input_transformers import Transformers

if TYPE_CHECKING:
    import argparse

    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.utils.bunch import Bunch

    from ...client import CellRun
    from .settings import DistributedMagics

# Settings that a running cluster can change, by their names in ClusterConfig; the rest is fixed when ranks start.
_CHANGEABLE = {"grace": "grace_s", "hang_after": "hang_after_s", "on_rank_death": "on_rank_death"}
_FIXED = (
    *("launcher", "backend", "num_ranks", "address", "timeout", "start_timeout", "idle_timeout", "keep", "sample"),
    *("warm", "preload"),
)


class Clusters:
    """The clusters of one notebook."""

    def __init__(self, shell: InteractiveShell, settings: DistributedMagics) -> None:
        self.settings = settings
        self.transformers = Transformers(shell)
        self.views = Views(shell)
        self.open: dict[str, Cluster] = {}  # by name
        self.waiting: dict[str, list[tuple[CellRun, str | None]]] = {}  # by cluster: with the name for the values
        self._shell = shell
        self._last = ""  # the name of the cluster that was used last
        self._relays: dict[str, CommRelay] = {}  # by cluster: a widget of one cell may be changed by another
        self._prewarmed: Prewarmed | None = None
        settings.observe(self._on_change, names=[*_CHANGEABLE, *_FIXED])
        settings.observe(lambda _change: self._prewarm(), names=["prewarm"])
        self._prewarm()

    def close(self) -> None:
        """Shut down every cluster and stop showing them."""
        for cluster in list(self.open.values()):
            self.end(cluster)
        self._let_warm_process_end()
        self.views.close()

    def _prewarm(self) -> None:
        """Start the warm process that the next ranks will use, if the user wants it before them."""
        self._let_warm_process_end()
        settings = self.settings
        if not settings.prewarm or not settings.warm or settings.launcher not in ("mpi", "local"):
            return
        n, preload = settings.num_ranks or None, tuple(settings.preload)
        try:
            self._prewarmed = Prewarmed(
                ClusterConfig(n=n, launcher=settings.launcher, backend=settings.backend, preload=preload)
            )
        except (UsageError, OSError) as error:  # %dist_init may have options with which it can start
            sys.stderr.write(f"no warm process was started before the ranks: {error}\n")

    def _let_warm_process_end(self) -> None:
        if self._prewarmed is not None:
            self._prewarmed.close()
            self._prewarmed = None

    @property
    def origin(self) -> Origin:
        """The position of the current cell in the notebook."""
        shell = self._shell
        parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
        cell_id = parent.get("metadata", {}).get("cellId") or ""
        history = shell.history_manager
        # IPython's own counter is ahead of the number of the current cell since 9.0.
        count = shell.execution_count if history is None else max(1, len(history.input_hist_parsed) - 1)
        return Origin(execution_count=count, cell_id=str(cell_id))

    def _on_change(self, change: Bunch) -> None:
        running = [cluster for cluster in self.open.values() if not cluster.closed]
        if change.name in _CHANGEABLE:
            for cluster in running:
                cluster.change(**{_CHANGEABLE[change.name]: change.new})
        elif running:
            names = ", ".join(repr(cluster.name) for cluster in running)
            text = f"{change.name} can't change while ranks run: {names} keeps its value, the next %dist_init uses this"
            print(text)  # noqa: T201

    # Open clusters

    def add(self, cluster: Cluster) -> None:
        """Add a cluster that was started or attached to; the next magics use it."""
        if cluster.name in self.open:
            self.forget(self.open[cluster.name])  # it was closed
        self.open[cluster.name] = cluster
        self._last = cluster.name
        if isinstance(self._shell.user_ns.get("cluster"), (Cluster, type(None))):  # not a variable of the user's own
            self._shell.user_ns["cluster"] = cluster

    def check_free(self, name: str) -> None:
        """Refuse a cluster with the name of an open one."""
        if name in self.open and not self.open[name].closed:
            raise UsageError(
                f"this notebook already has another cluster {name!r}; end it first with %dist_shutdown, or detach from "
                "it with %dist_detach"
            )

    def current(self, name: str | None) -> Cluster | None:
        """Return the cluster that a cell would use; None if there is none that runs."""
        cluster = self.open.get(name or self._last)
        return None if cluster is None or cluster.closed else cluster

    def require(self, name: str | None) -> Cluster:
        """Return the cluster of this name, or the one used last."""
        cluster = self.open.get(name or self._last)
        if cluster is None and name:
            there = ", ".join(self.open) or "none"
            raise UsageError(f"no cluster is named {name!r} (running: {there}); start it with %dist_init --name {name}")
        if cluster is None:
            kept = "".join(f"; {text}" for text in kept_text())
            raise UsageError(f"no cluster is running; start one with %dist_init, e.g. %dist_init -n 2{kept}")
        self._last = cluster.name
        if cluster.closed:
            cluster.check_open()
        return cluster

    def forget(self, cluster: Cluster) -> None:
        """Remove a cluster that has ended or was detached."""
        self.open.pop(cluster.name, None)
        self.forget_cells(cluster)
        self._last = next(reversed(self.open), "")
        if not self.open:
            self.transformers.everywhere = False

    def forget_cells(self, cluster: Cluster) -> None:
        """Remove the cells and the widgets of ranks that have ended."""
        self.waiting.pop(cluster.name, None)
        self._relays.pop(cluster.name, None)

    def end(self, cluster: Cluster) -> list[str]:
        """Shut down a cluster once its checkpoints are written; return messages on ranks that were killed."""
        try:
            self.finish_saves(cluster)
        finally:  # an interrupt ends the wait, not the shutdown
            self.forget(cluster)
            killed = cluster.shutdown()
        return killed

    def finish_saves(self, cluster: Cluster) -> None:
        """Wait for checkpoints that are written while cells run; errors are printed, so that the ranks can be ended."""
        try:
            message = cluster.checkpoints.finish(listener=self.screen(cluster))
        except DisttrainError as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            message = str(error)
        if message:
            sys.stderr.write(f"{message}\n")

    # Cells

    def screen(self, cluster: Cluster, ranks: tuple[int, ...] | None = None, *, below_view: bool = False) -> Screen:
        """Return a listener that shows what ranks print, by default all, below the current cell."""
        relay = self._relays.setdefault(cluster.name, CommRelay(cluster.send_comm))
        options: dict[str, Any] = {
            "ranks": range(cluster.world_size) if ranks is None else ranks,
            "world_size": cluster.world_size,
            "log_folder": cluster.log_folder,
            "max_lines": self.settings.max_output_lines,
            "max_bytes": self.settings.max_output_bytes,
            "progress_after_s": self.settings.progress_after,
            "forward_comm": relay.forward,
            "below_view": below_view,
        }
        if hasattr(self._shell, "kernel"):
            return Screen(NotebookSink(self._shell), **options)
        from ..output.terminal_renderer import TerminalScreen  # noqa: PLC0415  (imports prompt_toolkit)

        return TerminalScreen(**options)

    def run_options(self, cluster: Cluster, ranks: tuple[int, ...], args: argparse.Namespace) -> dict[str, Any]:
        """Return options of :meth:`Cluster.run` for a magic with ``--watch``, ``--timeout`` and ``--noblock``."""
        is_shown = args.watch and not self.views.missing
        if is_shown:
            self.views.show(cluster)
        elif args.watch:
            sys.stderr.write(f"{self.views.missing}; %dist_status shows the ranks and their metrics as text\n")
        return {
            "block": not args.noblock,  # in one call, so that no interrupt falls between sending and waiting
            "timeout_s": args.timeout,
            "listener": None if args.noblock else self.screen(cluster, ranks, below_view=is_shown),
            "origin": self.origin,
        }

    def wait_later(self, cluster: Cluster, run: CellRun, out: str | None) -> None:
        """Have %dist_wait show the cell's output."""
        self.waiting.setdefault(cluster.name, []).append((run, out))
        ranks = label_ranks(run.ranks)
        print(f"running on {ranks}; %dist_status shows the progress, %dist_wait shows the result")  # noqa: T201

    def keep_values(self, run: CellRun, out: str | None) -> None:
        """Keep a cell's values, if they were requested."""
        if out is not None:
            self._shell.user_ns[out] = run.results

    def show_waiting(self, cluster: Cluster) -> None:
        """Show the output of the background cells that are not waited for yet."""
        waiting = self.waiting.get(cluster.name, [])
        while waiting:
            run, out = waiting[0]
            run.listener = self.screen(cluster, run.ranks)
            try:
                self.keep_values(run.wait(), out)
            finally:
                if run.done:  # else the wait was interrupted, and can be resumed
                    waiting.pop(0)


class ClusterUsingMagics(Magics):
    """Base class of the magics of one subject, each of which uses the clusters of its notebook."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell, clusters: Clusters) -> None:
        super().__init__(shell=shell)
        self.clusters = clusters
