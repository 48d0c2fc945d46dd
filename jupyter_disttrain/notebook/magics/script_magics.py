"""Define the magics that run scripts and export cells as one.

Does not cover: running and exporting (``features.scripts``, ``features.export``).
"""

from __future__ import annotations

import argparse

from IPython.core.magic import magics_class

from ...config.rank_selection import parse_ranks
from ...features.export.template import LAUNCHES
from ..views.status_text import exported_text
from .arguments import NAME, NOBLOCK, TIMEOUT, WATCH, Option, magic, option, ranks_option
from .clusters import ClusterUsingMagics


def _how(name: str, how: str, text: str) -> Option:
    """Return an option that selects how %dist_run starts its processes."""
    return option(name, dest="how", action="store_const", const=how, default="auto", help=text)


@magics_class
class RankScriptMagics(ClusterUsingMagics):
    """The magics for scripts; IPython has a class ``ScriptMagics``, and registers magics by the names of classes."""

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
