"""Define the magics that run cells on ranks, wait for them and interrupt them, and those that move variables.

Does not cover: scripts (``script_magics``), showing the output of a cell (``notebook.output.renderer``), how values
travel (``client.cells.push_pull``).
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from IPython.core.magic import cell_magic, line_cell_magic, magics_class

from ...client.cells.push_pull import check_names
from ...config.rank_selection import parse_ranks
from ...errors import UsageError
from ...protocol.ranks import label_ranks
from .arguments import NAME, NOBLOCK, TIMEOUT, VARIABLES, WATCH, magic, one_of, option, ranks_of, ranks_option
from .clusters import ClusterUsingMagics
from .file_magics import sync_before_cell
from .input_transformers import check_magics

_OF_A_CELL = (
    TIMEOUT,
    option("-o", "--out", metavar="NAME", help="store each rank's last value in the notebook, as a dict by rank"),
    WATCH,
    NOBLOCK,
    option("--pdb", action="store_true", help="start a debugger in the frame of an error, on each rank that has one"),
    option("--bare", action="store_true", help=argparse.SUPPRESS),  # %dist_mode added the magic's line to the cell
    NAME,
)


def code_for_ranks(name: str, args: argparse.Namespace, cell: str) -> str:
    """Return what ranks run for a cell: its magic's line is a comment, so that line 3 of the cell is line 3 there."""
    return cell if args.bare else f"#%%{name} {args.line}".rstrip() + f"\n{cell}"


@magics_class
class CellMagics(ClusterUsingMagics):
    """The magics for cells and variables."""

    @magic(ranks_option(), *_OF_A_CELL, kind=cell_magic, expands=False)
    def distributed(self, args: argparse.Namespace, cell: str) -> None:
        """Run the cell on every rank, or on those named, and show what each rank prints."""
        self._run("distributed", args, cell)

    @magic(option("ranks", nargs="+", help="ranks, e.g. 0, [0,2] or 0-3"), *_OF_A_CELL, kind=cell_magic, expands=False)
    def rank(self, args: argparse.Namespace, cell: str) -> None:
        """Run the cell on some ranks: ``%%rank 0``, ``%%rank [0,2]`` or ``%%rank[0-2]``."""
        self._run("rank", args, cell)

    def _run(self, name: str, args: argparse.Namespace, cell: str) -> None:
        cluster = self.clusters.require(args.name)
        check_magics(cell, is_bare=args.bare)
        if args.out is not None:
            check_names([args.out])
        chosen = parse_ranks(ranks_of(args), cluster.world_size)
        options = self.clusters.run_options(cluster, chosen, args)
        sync_before_cell(self.clusters, cluster, chosen)
        code = code_for_ranks(name, args, cell)
        run = cluster.run(code, chosen, values=args.out is not None, stop_at_error=args.pdb, **options)
        if args.noblock:
            self.clusters.wait_later(cluster, run, args.out)
        else:
            self.clusters.keep_values(run, args.out)

    @magic(NAME)
    def dist_wait(self, args: argparse.Namespace) -> None:
        """Wait for the cells that were started with ``--noblock``, or that still run after stop, and show their output.

        While it waits, stop interrupts them.
        """
        cluster = self.clusters.require(args.name)
        known = [run for run, _ in self.clusters.waiting.setdefault(cluster.name, [])]
        self.clusters.waiting[cluster.name] += [(run, None) for run in cluster.running_cells if run not in known]
        if not self.clusters.waiting[cluster.name]:
            raise UsageError("no cell runs in the background; start one with %%distributed --noblock")
        self.clusters.show_waiting(cluster)

    @magic(NAME, ranks_option())
    def dist_interrupt(self, args: argparse.Namespace) -> None:
        """Interrupt ranks that still run a cell after ``--noblock``, or after stop has returned control.

        The second time it releases the ranks from whatever they wait for.
        """
        cluster = self.clusters.require(args.name)
        lines = cluster.interrupt_and_wait(args.ranks)
        if any(run.done for run, _ in self.clusters.waiting.get(cluster.name, [])):
            lines.append("%dist_wait shows the result")
        print("\n".join(lines))  # noqa: T201

    @magic(ranks_option("0"), NAME)
    def dist_debug(self, args: argparse.Namespace) -> None:
        """Start a debugger in the frame of the last cell's error, on one rank after the other.

        The frames are kept until the next cell starts, or until the process group is formed again because ranks had
        waited in it: ``%%distributed --pdb`` stops in the frame at once, while the other ranks wait.
        """
        cluster = self.clusters.require(args.name)
        chosen = parse_ranks(args.ranks, cluster.world_size)
        cluster.run(
            "%debug",
            chosen,
            values=False,
            listener=self.clusters.screen(cluster, chosen),
            origin=replace(self.clusters.origin, is_cell=False),
        )

    @magic(NAME)
    def dist_where(self, args: argparse.Namespace) -> None:
        """Show what each rank is doing now: the collective in which it waits, and the line.

        A kernel that waits for a cell runs this only afterwards: use it with ``--noblock``, or see the side panel.
        """
        print("\n".join(self.clusters.require(args.name).where()))  # noqa: T201

    @magic(
        one_of(
            option("-e", "--enable", action="store_true", help="every following cell runs on all ranks"),
            option("-d", "--disable", action="store_true", help="cells run in the notebook again"),
        )
    )
    def dist_mode(self, args: argparse.Namespace) -> None:
        """Run every following cell on the ranks, except those that begin with ``%%local``; or no longer."""
        transformers = self.clusters.transformers
        if args.enable:
            ranks = label_ranks(range(self.clusters.require(None).world_size))
            transformers.everywhere = True
            text = f"every cell now runs on {ranks}, except those that begin with %%local; %dist_mode -d turns this off"
        elif args.disable:
            transformers.everywhere = False
            text = "cells run in the notebook again"
        else:
            text = f"cells run {'on the ranks' if transformers.everywhere else 'in the notebook'}"
        print(text)  # noqa: T201

    @magic(NAME, kind=line_cell_magic)
    def sync(self, args: argparse.Namespace, cell: str | None = None) -> None:  # noqa: ARG002  (users write %%sync too)
        """Wait until all ranks have reached a barrier."""
        cluster = self.clusters.require(args.name)
        seconds = cluster.sync()
        print(f"{label_ranks(range(cluster.world_size))} reached the barrier after {seconds * 1000:.1f} ms")  # noqa: T201

    @magic(ranks_option(), VARIABLES, NAME)
    def dist_push(self, args: argparse.Namespace) -> None:
        """Set variables of the notebook on the ranks."""
        cluster = self.clusters.require(args.name)
        check_names(args.names)
        missing = [name for name in args.names if name not in self.shell.user_ns]
        if missing:
            raise UsageError(f"the notebook has no variable {', '.join(map(repr, missing))}; set it in a cell first")
        cluster.push({name: self.shell.user_ns[name] for name in args.names}, args.ranks)

    @magic(ranks_option("0"), VARIABLES, NAME)
    def dist_pull(self, args: argparse.Namespace) -> None:
        """Copy variables to the notebook: from one rank as they are, from several as a dict by rank."""
        cluster = self.clusters.require(args.name)
        ranks = parse_ranks(args.ranks, cluster.world_size)
        values = cluster.pull(args.names, ranks)
        for name in args.names:
            by_rank = {rank: named[name] for rank, named in values.items()}
            self.shell.user_ns[name] = by_rank[ranks[0]] if len(ranks) == 1 else by_rank

    @magic(
        option("--from", dest="source", type=int, default=0, metavar="RANK", help="the source (default: 0)"),
        option("--to", dest="ranks", default="all", metavar="RANKS", help="the targets (default: all others)"),
        VARIABLES,
        NAME,
    )
    def dist_copy(self, args: argparse.Namespace) -> None:
        """Copy variables from one rank to others."""
        self.clusters.require(args.name).copy(args.names, args.source, args.ranks)

    @magic(
        ranks_option(),
        option("patterns", nargs="*", metavar="PATTERN", help="only variables with such a name, e.g. loss*"),
        option("--by-size", action="store_true", help="sort by the size of tensors, the largest first"),
        NAME,
    )
    def dist_whos(self, args: argparse.Namespace) -> None:
        """Show the variables of the ranks: type, shape, data type, device, sharding, size, and where ranks differ.

        Nothing is evaluated, so it also shows ranks that run a cell.
        """
        table = self.clusters.require(args.name).introspection.variables(args.ranks)
        print(table.select(args.patterns, by_size=args.by_size))  # noqa: T201

    @magic(
        ranks_option(),
        option("names", nargs="+", metavar="NAME", help="models, optimizers, tensors or other variables"),
        NAME,
    )
    def dist_diff(self, args: argparse.Namespace) -> None:
        """Show where ranks differ: the first parameter of a model that does, by how much and on which ranks."""
        cluster = self.clusters.require(args.name)
        for name in args.names:
            print(cluster.diff(name, args.ranks))  # noqa: T201
