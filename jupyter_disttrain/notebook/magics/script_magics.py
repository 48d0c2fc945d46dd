"""Define the magics for scripts and checkpoints.

Covers: running a script on the ranks, exporting cells as a script; saving and loading variables of the ranks.
Does not cover: the other magics (``cluster_magics``).
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from typing import TYPE_CHECKING

from IPython.core.magic import line_magic, no_var_expand

from ...client.cells.history import Origin
from ...config.rank_selection import parse_ranks
from ...errors import DisttrainError
from ..views.status_text import exported_text
from .arguments import documented, parse
from .settings import Settings

if TYPE_CHECKING:
    import argparse

    from IPython.core.interactiveshell import InteractiveShell

    from ...client import CellRun, Cluster
    from ..output.renderer import Screen
    from ..views.views import Views


class ScriptMagics(Settings):
    """The part of the magics that is about scripts and checkpoints."""

    shell: InteractiveShell
    views: Views

    @abstractmethod
    def _require(self, args: argparse.Namespace) -> Cluster:
        """Return the cluster that was named, or the one used last."""

    @abstractmethod
    def _screen(self, cluster: Cluster, ranks: tuple[int, ...], *, below_view: bool = False) -> Screen:
        """Return the listener that shows a cell."""

    @abstractmethod
    def _waits_for(self, cluster: Cluster, run: CellRun, out: str | None) -> None:
        """Have %dist_wait show the cell's output."""

    @documented
    @no_var_expand
    @line_magic
    def dist_run(self, line: str) -> None:
        """Run a script, or with -m a module, on every rank as torchrun would."""
        args = parse("dist_run", line)
        cluster = self._require(args)
        chosen = parse_ranks(args.ranks, cluster.world_size)
        if args.watch and self.views.has_page:
            self.views.show(cluster)
        run = cluster.scripts.run(
            args.target,
            args.arguments,
            chosen,
            is_module=args.is_module,
            how=args.how,
            block=not args.noblock,
            timeout_s=args.timeout,
            listener=None if args.noblock else self._screen(cluster, chosen, below_view=args.watch),
            origin=origin_of(self.shell),
        )
        if args.noblock:
            self._waits_for(cluster, run, None)

    @documented
    @line_magic
    def dist_save(self, line: str) -> None:
        """Save models, optimizers and other variables of all ranks as the next version of a checkpoint."""
        args = parse("dist_save", line)
        cluster = self._require(args)
        screen, origin = self._screen(cluster, tuple(range(cluster.world_size))), origin_of(self.shell)
        cluster.checkpoints.save(
            args.path, args.names, beside=args.beside, keep=args.keep, listener=screen, origin=origin
        )

    @documented
    @line_magic
    def dist_load(self, line: str) -> None:
        """Load variables on all ranks from a checkpoint, also one of another number of ranks."""
        args = parse("dist_load", line)
        cluster = self._require(args)
        screen, origin = self._screen(cluster, tuple(range(cluster.world_size))), origin_of(self.shell)
        cluster.checkpoints.load(args.path, args.names, trust_owner=args.trust_owner, listener=screen, origin=origin)

    def _finish_saves(self, cluster: Cluster) -> None:
        """Wait for checkpoints that are written while cells run; errors are printed, so that the ranks can be ended."""
        try:
            told = cluster.checkpoints.finish(listener=self._screen(cluster, tuple(range(cluster.world_size))))
        except DisttrainError as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            told = str(error)
        if told:
            sys.stderr.write(f"{told}\n")

    @documented
    @line_magic
    def dist_export(self, line: str) -> None:
        """Write the cells that ran on the ranks as one script, with a file that launches it."""
        args = parse("dist_export", line)
        exported = self._require(args).scripts.export(args.path, args.launch, every_run=args.all)
        print(exported_text(exported))  # noqa: T201  (a magic's output)


def _prompt(shell: InteractiveShell) -> int:
    """Return the number of the current cell; IPython's own counter is ahead of it since 9.0."""
    history = shell.history_manager
    return shell.execution_count if history is None else max(1, len(history.input_hist_parsed) - 1)


def origin_of(shell: InteractiveShell) -> Origin:
    """Return the position of the current cell in the notebook."""
    parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
    cell_id = parent.get("metadata", {}).get("cellId") or ""
    return Origin(execution_count=_prompt(shell), cell_id=str(cell_id))
