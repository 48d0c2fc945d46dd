"""Define the magics that save and load checkpoints.

Does not cover: the checkpoints themselves (``features.checkpoints``).
"""

from __future__ import annotations

from IPython.core.magic import line_magic, magics_class

from .arguments import documented, parse
from .clusters import ClusterUsingMagics


@magics_class
class CheckpointMagics(ClusterUsingMagics):
    """The magics for checkpoints."""

    @documented
    @line_magic
    def dist_save(self, line: str) -> None:
        """Save models, optimizers and other variables of all ranks as the next version of a checkpoint."""
        args = parse("dist_save", line)
        cluster = self.clusters.require(args)
        screen, origin = self.clusters.screen(cluster, tuple(range(cluster.world_size))), self.clusters.origin
        cluster.checkpoints.save(
            args.path, args.names, beside=args.beside, keep=args.keep, listener=screen, origin=origin
        )

    @documented
    @line_magic
    def dist_load(self, line: str) -> None:
        """Load variables on all ranks from a checkpoint, also one of another number of ranks."""
        args = parse("dist_load", line)
        cluster = self.clusters.require(args)
        screen, origin = self.clusters.screen(cluster, tuple(range(cluster.world_size))), self.clusters.origin
        cluster.checkpoints.load(args.path, args.names, trust_owner=args.trust_owner, listener=screen, origin=origin)
