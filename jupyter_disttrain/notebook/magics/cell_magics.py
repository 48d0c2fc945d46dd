"""Define the magics that run cells on ranks, wait for them and interrupt them.

Does not cover: scripts (``script_magics``), showing the output of a cell (``notebook.output.renderer``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic import cell_magic, line_cell_magic, line_magic, magics_class, no_var_expand

from ...client.cells.variables import check_names
from ...config.rank_selection import parse_ranks
from ...errors import UsageError
from ...protocol.ranks import label_ranks
from .arguments import documented, parse
from .clusters import ClusterUsingMagics
from .data_magics import sync_before_cell
from .input_transformers import check_magics

if TYPE_CHECKING:
    import argparse


@magics_class
class CellMagics(ClusterUsingMagics):
    """The magics for cells."""

    @documented
    @no_var_expand
    @cell_magic
    def distributed(self, line: str, cell: str) -> None:
        """Run the cell on every rank, or on those named, and show what each rank prints."""
        args = parse("distributed", line)
        self._run("%%distributed", line, cell, args, args.ranks)

    @documented
    @no_var_expand
    @cell_magic
    def rank(self, line: str, cell: str) -> None:
        """Run the cell on some ranks: ``%%rank 0``, ``%%rank [0,2]`` or ``%%rank[0-2]``."""
        args = parse("rank", line)
        self._run("%%rank", line, cell, args, ",".join(args.ranks).replace(",,", ","))

    def _run(self, magic: str, line: str, cell: str, args: argparse.Namespace, ranks: str) -> None:
        cluster = self.clusters.require(args)
        check_magics(cell, is_bare=args.bare)
        if args.out is not None:
            check_names([args.out])
        chosen = parse_ranks(ranks, cluster.world_size)
        if args.watch and self.clusters.views.has_page:
            self.clusters.views.show(cluster)
        sync_before_cell(self.clusters, cluster, chosen)
        run = cluster.run(
            # As a comment, so that line 3 of the cell is line 3 on the ranks, which run the cell without it.
            cell if args.bare else f"#{magic} {line}".rstrip() + f"\n{cell}",
            chosen,
            values=args.out is not None,
            block=not args.noblock,  # in one call, so that no interrupt falls between sending and waiting
            timeout_s=args.timeout,
            listener=None if args.noblock else self.clusters.screen(cluster, chosen, below_view=args.watch),
            origin=self.clusters.origin,
        )
        if args.noblock:
            self.clusters.wait_later(cluster, run, args.out)
            return
        self.clusters.keep_values(run, args.out)

    @documented
    @line_magic
    def dist_wait(self, line: str) -> None:
        """Wait for the cells that were started with ``--noblock``, or that still run after stop, and show their output.

        While it waits, stop interrupts them.
        """
        cluster = self.clusters.require(parse("dist_wait", line))
        known = [run for run, _ in self.clusters.waiting.setdefault(cluster.name, [])]
        self.clusters.waiting[cluster.name] += [(run, None) for run in cluster.running_cells if run not in known]
        if not self.clusters.waiting[cluster.name]:
            raise UsageError("no cell runs in the background; start one with %%distributed --noblock")
        self.clusters.show_waiting(cluster)

    @documented
    @line_magic
    def dist_interrupt(self, line: str) -> None:
        """Interrupt ranks that still run a cell after ``--noblock``, or after stop has returned control.

        The second time it releases the ranks from whatever they wait for.
        """
        args = parse("dist_interrupt", line)
        cluster = self.clusters.require(args)
        lines = cluster.interrupt_and_wait(args.ranks)
        if any(run.done for run, _ in self.clusters.waiting.get(cluster.name, [])):
            lines.append("%dist_wait shows the result")
        print("\n".join(lines))  # noqa: T201

    @documented
    @line_magic
    def dist_where(self, line: str) -> None:
        """Show what each rank is doing now: the collective in which it waits, and the line.

        A kernel that waits for a cell runs this only afterwards: use it with ``--noblock``, or see the side panel.
        """
        print("\n".join(self.clusters.require(parse("dist_where", line)).where()))  # noqa: T201

    @documented
    @line_magic
    def dist_mode(self, line: str) -> None:
        """Run every following cell on the ranks, except those that begin with ``%%local``; or no longer."""
        args = parse("dist_mode", line)
        if args.enable:
            cluster = self.clusters.require(parse("dist_status", ""))
            self.clusters.transformers.everywhere = True
            ranks = label_ranks(range(cluster.world_size))
            print(f"every cell now runs on {ranks}, except those that begin with %%local; %dist_mode -d turns this off")  # noqa: T201
        elif args.disable:
            self.clusters.transformers.everywhere = False
            print("cells run in the notebook again")  # noqa: T201
        else:
            print(f"cells run {'on the ranks' if self.clusters.transformers.everywhere else 'in the notebook'}")  # noqa: T201

    @documented
    @line_cell_magic
    def sync(self, line: str, cell: str | None = None) -> None:  # noqa: ARG002  (users write %%sync too)
        """Wait until all ranks have reached a barrier."""
        cluster = self.clusters.require(parse("sync", line))
        seconds = cluster.sync()
        print(f"{label_ranks(range(cluster.world_size))} reached the barrier after {seconds * 1000:.1f} ms")  # noqa: T201
