"""Define the magics that move and compare variables.

Does not cover: how values travel (``client.cells.variables``).
"""

from __future__ import annotations

from IPython.core.magic import line_magic, magics_class

from ...client.cells.variables import check_names
from ...config.rank_selection import parse_ranks
from ...errors import UsageError
from .arguments import documented, parse
from .clusters import ClusterUsingMagics


@magics_class
class VariableMagics(ClusterUsingMagics):
    """The magics for variables."""

    @documented
    @line_magic
    def dist_push(self, line: str) -> None:
        """Set variables of the notebook on the ranks."""
        args = parse("dist_push", line)
        cluster = self.clusters.require(args)
        check_names(args.names)
        missing = [name for name in args.names if name not in self.shell.user_ns]
        if missing:
            raise UsageError(f"the notebook has no variable {', '.join(map(repr, missing))}; set it in a cell first")
        cluster.push({name: self.shell.user_ns[name] for name in args.names}, args.ranks)

    @documented
    @line_magic
    def dist_pull(self, line: str) -> None:
        """Copy variables to the notebook: from one rank as they are, from several as a dict by rank."""
        args = parse("dist_pull", line)
        cluster = self.clusters.require(args)
        ranks = parse_ranks(args.ranks, cluster.world_size)
        values = cluster.pull(args.names, ranks)
        for name in args.names:
            by_rank = {rank: named[name] for rank, named in values.items()}
            self.shell.user_ns[name] = by_rank[ranks[0]] if len(ranks) == 1 else by_rank

    @documented
    @line_magic
    def dist_copy(self, line: str) -> None:
        """Copy variables from one rank to others."""
        args = parse("dist_copy", line)
        self.clusters.require(args).copy(args.names, args.source, args.ranks)

    @documented
    @line_magic
    def dist_diff(self, line: str) -> None:
        """Show where ranks differ: the first parameter of a model that does, by how much and on which ranks."""
        args = parse("dist_diff", line)
        cluster = self.clusters.require(args)
        for name in args.names:
            print(cluster.diff(name, args.ranks))  # noqa: T201
