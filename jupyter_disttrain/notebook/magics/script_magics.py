"""Define the magics that run a script on the ranks and export cells as a script.

Does not cover: running cells (``cell_magics``), the script's text (``features.export``).
"""

from __future__ import annotations

from IPython.core.magic import line_magic, magics_class, no_var_expand

from ...config.rank_selection import parse_ranks
from ..views.status_text import exported_text
from .arguments import documented, parse
from .clusters import ClusterUsingMagics


@magics_class
class RankScriptMagics(ClusterUsingMagics):
    """The magics for scripts; IPython itself has ``ScriptMagics``."""

    @documented
    @no_var_expand
    @line_magic
    def dist_run(self, line: str) -> None:
        """Run a script, or with -m a module, on every rank as torchrun would."""
        args = parse("dist_run", line)
        cluster = self.clusters.require(args)
        chosen = parse_ranks(args.ranks, cluster.world_size)
        if args.watch and self.clusters.views.has_page:
            self.clusters.views.show(cluster)
        run = cluster.scripts.run(
            args.target,
            args.arguments,
            chosen,
            is_module=args.is_module,
            how=args.how,
            block=not args.noblock,
            timeout_s=args.timeout,
            listener=None if args.noblock else self.clusters.screen(cluster, chosen, below_view=args.watch),
            origin=self.clusters.origin,
        )
        if args.noblock:
            self.clusters.wait_later(cluster, run, None)

    @documented
    @line_magic
    def dist_export(self, line: str) -> None:
        """Write the cells that ran on the ranks as one script, with a file that launches it."""
        args = parse("dist_export", line)
        exported = self.clusters.require(args).scripts.export(args.path, args.launch, every_run=args.all)
        print(exported_text(exported))  # noqa: T201  (a magic's output)
