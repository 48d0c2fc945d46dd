"""Define the magics for files: checkpoints, data sets, edited modules.

Covers: parsing a line, a line that shows the progress of a copy, reloading edited modules before each cell.
Does not cover: the features themselves (``features.checkpoints``, ``features.staging``, ``features.reloading``),
scripts (``script_magics``).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from IPython.core.magic import magics_class

from ...errors import CodeError, UsageError
from ..views.status_line import StatusLine
from .arguments import NAME, magic, option
from .clusters import ClusterUsingMagics

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from ...client import Cluster
    from ...features.reloading.client import Synced
    from .clusters import Clusters


@magics_class
class FileMagics(ClusterUsingMagics):
    """The magics for files."""

    @magic(
        option("path", metavar="FOLDER", help="the checkpoint folder, shared by all hosts"),
        option("names", nargs="+", metavar="NAME", help="models, optimizers, schedulers and other variables"),
        option("--async", dest="beside", action="store_true", help="write while the next cells run"),
        option("--keep", type=int, metavar="N", help="keep only the last N versions (default: all)"),
        NAME,
    )
    def dist_save(self, args: argparse.Namespace) -> None:
        """Save models, optimizers and other variables of all ranks as the next version of a checkpoint."""
        cluster = self.clusters.require(args.name)
        screen, origin = self.clusters.screen(cluster), self.clusters.origin
        cluster.checkpoints.save(
            args.path, args.names, beside=args.beside, keep=args.keep, listener=screen, origin=origin
        )

    @magic(
        option(
            "path", metavar="FOLDER", help="the checkpoint folder, for its latest version; or the folder of one version"
        ),
        option("names", nargs="*", default=[], metavar="NAME", help="variables (default: all saved ones)"),
        option("--trust-owner", action="store_true", help="load another user's checkpoint, which can run any code"),
        NAME,
    )
    def dist_load(self, args: argparse.Namespace) -> None:
        """Load variables on all ranks from a checkpoint, also one of another number of ranks."""
        cluster = self.clusters.require(args.name)
        screen, origin = self.clusters.screen(cluster), self.clusters.origin
        cluster.checkpoints.load(args.path, args.names, trust_owner=args.trust_owner, listener=screen, origin=origin)

    @magic(
        option("source", metavar="PATH", help="a file or folder, or an address such as s3://bucket/folder"),
        option(
            "--to", metavar="DIR", help="the parent folder of the copy on each node (default: on the node's local disk)"
        ),
        option("--as", dest="into", metavar="NAME", help="a variable to set to the path on each rank"),
        option("--verify", action="store_true", help="compare hashes with the source, in place of sizes and times"),
        NAME,
    )
    def dist_stage(self, args: argparse.Namespace) -> None:
        """Copy a data set to each node's own disk: read once, checked by hash; existing files are kept."""
        with StatusLine(self.shell) as line_shown:
            staged = self.clusters.require(args.name).staging.stage(
                args.source,
                args.to,
                name=args.into,
                verify=args.verify,
                on_progress=lambda progress: line_shown.show(str(progress)),
                origin=self.clusters.origin,
            )
            line_shown.end(str(staged))

    @magic(
        option(
            "paths", nargs="*", metavar="PATH", help="files and folders to copy too (default: what ranks have imported)"
        ),
        option("--auto", choices=("on", "off"), help="reload before every cell that runs on ranks, or stop doing so"),
        NAME,
    )
    def dist_sync_code(self, args: argparse.Namespace) -> None:
        """Reload edited modules on the ranks, and copy them to nodes that do not see the notebook's folder."""
        if args.auto is not None:
            self.clusters.settings.auto_sync = args.auto == "on"
            when = "before every cell" if args.auto == "on" else "only by %dist_sync_code"
            print(f"edited modules are reloaded on the ranks {when}")  # noqa: T201
            return
        print(_sync(self.clusters, self.clusters.require(args.name), args.paths))  # noqa: T201


def sync_before_cell(clusters: Clusters, cluster: Cluster, ranks: Sequence[int]) -> None:
    """Reload edited modules, if enabled; print what can't be reloaded, and run the cell with the old code then.

    Only on the cell's ranks: others may be dead, or run another cell. An interrupt and a death end the cell too.
    """
    if not clusters.settings.auto_sync:
        return
    try:
        synced = _sync(clusters, cluster, ranks=ranks)
    except (CodeError, UsageError) as error:  # UsageError: e.g. a node that can't take a file
        sys.stderr.write(f"{error}\n")
        return
    if synced.reloaded:
        print(synced)  # noqa: T201


def _sync(
    clusters: Clusters, cluster: Cluster, paths: Sequence[str] = (), ranks: Sequence[int] | None = None
) -> Synced:
    """Reload edited modules, and show what they print meanwhile."""
    chosen = tuple(range(cluster.world_size)) if ranks is None else tuple(ranks)
    screen = clusters.screen(cluster, chosen, below_view=True)
    return cluster.reloading.sync(paths, chosen, listener=screen, origin=clusters.origin)
