"""Define the magics for files: data sets and edited modules.

Covers: copying a data set to the nodes, with a line that shows the progress; copying edited modules to the ranks, also
before each cell.
Does not cover: the copies themselves (``features.staging``, ``features.reloading``).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from IPython.core.magic import line_magic, magics_class

from ...errors import CodeError, UsageError
from ..views.status_line import StatusLine
from .arguments import documented, parse
from .clusters import ClusterUsingMagics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...client import Cluster
    from ...features.reloading.client import Synced
    from .clusters import Clusters


@magics_class
class FileMagics(ClusterUsingMagics):
    """The magics for files."""

    @documented
    @line_magic
    def dist_stage(self, line: str) -> None:
        """Copy a data set to each node's own disk: read once, checked by hash; existing files are kept."""
        args = parse("dist_stage", line)
        with StatusLine(self.shell) as line_shown:
            staged = self.clusters.require(args).staging.stage(
                args.source,
                args.to,
                name=args.into,
                verify=args.verify,
                on_progress=lambda progress: line_shown.show(str(progress)),
                origin=self.clusters.origin,
            )
            line_shown.end(str(staged))

    @documented
    @line_magic
    def dist_sync_code(self, line: str) -> None:
        """Reload edited modules on the ranks, and copy them to nodes that do not see the notebook's folder."""
        args = parse("dist_sync_code", line)
        if args.auto is not None:
            self.clusters.settings.auto_sync = args.auto == "on"
            when = "before every cell" if args.auto == "on" else "only by %dist_sync_code"
            print(f"edited modules are reloaded on the ranks {when}")  # noqa: T201
            return
        print(_sync(self.clusters, self.clusters.require(args), args.paths))  # noqa: T201


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
