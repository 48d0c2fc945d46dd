"""Define the magics for files: scripts, checkpoints, data sets, edited modules.

Covers: parsing a line, a line that shows the progress of a copy, reloading edited modules before each cell.
Does not cover: the features themselves (``features.scripts``, ``features.export``, ``features.checkpoints``,
``features.staging``, ``features.reloading``).
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from IPython.core.magic import magics_class

from ...config.rank_selection import parse_ranks
from ...errors import CodeError, UsageError
from ...features.export.template import LAUNCHES
from ..views.status_line import StatusLine
from ..views.status_text import exported_text
from .arguments import NAME, NOBLOCK, TIMEOUT, WATCH, Option, magic, option, ranks_option
from .clusters import ClusterUsingMagics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...client import Cluster
    from ...features.reloading.client import Synced
    from .clusters import Clusters


def _how(name: str, how: str, text: str) -> Option:
    """Return an option that selects how %dist_run starts its processes."""
    return option(name, dest="how", action="store_const", const=how, default="auto", help=text)


@magics_class
class FileMagics(ClusterUsingMagics):
    """The magics for files."""

    @magic(
        option("-m", dest="is_module", action="store_true", help="run a module in place of a script"),
        ranks_option(),
        TIMEOUT,
        _how("--per-node", "node", "use one process per node, for programs that start their own, e.g. with mp.spawn"),
        _how("--mpi", "mpi", "run it under an mpiexec of its own (default for scripts that import mpi4py or Horovod)"),
        _how("--no-mpi", "fresh", "run it without mpiexec, though it imports mpi4py or Horovod somewhere"),
        _how(
            "--in-session",
            "session",
            "run it with the variables of cells, in the ranks' own processes, as %%run -i does",
        ),
        WATCH,
        NOBLOCK,
        NAME,
        option(
            "target", metavar="SCRIPT", help="its path, relative to the notebook's folder; after -m a module's name"
        ),
        option("arguments", nargs=argparse.REMAINDER, help="the script's arguments; $LOCAL_RANK etc. are each rank's"),
        expands=False,
        usage="%%dist_run [options] SCRIPT [ARGUMENTS]\n       %%dist_run [options] -m MODULE [ARGUMENTS]",
    )
    def dist_run(self, args: argparse.Namespace) -> None:
        """Run a script, or with -m a module, on every rank as torchrun would, in new processes."""
        cluster = self.clusters.require(args.name)
        chosen = parse_ranks(args.ranks, cluster.world_size)
        run = cluster.scripts.run(
            args.target,
            args.arguments,
            chosen,
            is_module=args.is_module,
            how=args.how,
            **self.clusters.run_options(cluster, chosen, args),
        )
        if args.noblock:
            self.clusters.wait_later(cluster, run, None)

    @magic(
        option("path", metavar="SCRIPT", help="the file to write, e.g. train.py; its launch file is written beside it"),
        *(
            option(
                f"--{launch}",
                dest="launch",
                action="store_const",
                const=launch,
                default="torchrun",
                help=f"write a launch file for {launch}" + (" (default)" if launch == "torchrun" else ""),
            )
            for launch in LAUNCHES
        ),
        option("--all", action="store_true", help="write every run of a cell (default: its last run only)"),
        NAME,
    )
    def dist_export(self, args: argparse.Namespace) -> None:
        """Write the cells that ran on the ranks as one script, with a file that launches it."""
        exported = self.clusters.require(args.name).scripts.export(args.path, args.launch, every_run=args.all)
        print(exported_text(exported))  # noqa: T201  (a magic's output)

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
