"""Define the magics that start, show and end clusters.

Covers: their options, calling :class:`~jupyter_disttrain.Cluster`.
Does not cover: defaults of the options (``settings``), the clusters of the notebook (``clusters``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.magic import magics_class

from ...client import Cluster
from ...config.cluster import BACKENDS, LAUNCHER_NAMES, ON_RANK_DEATH, ClusterConfig, parse_roles
from ...config.rank_selection import parse_ranks
from ...errors import UsageError
from ...protocol.ranks import label_ranks
from ..views.status_line import StatusLine
from ..views.status_text import attached_text, kept_text, running_text, started_text, status_text
from .arguments import NAME, SSH, hosts_of, magic, option, parse_gpus, ranks_option
from .clusters import ClusterUsingMagics
from .slurm_arguments import SLURM_OPTIONS, slurm_of

if TYPE_CHECKING:
    import argparse

_OF_INIT = (
    option("-n", "--num-ranks", type=int, help="the number of ranks (default: one per GPU, or 2 without GPUs)"),
    option("-g", "--gpus", help="the GPUs to use among the visible ones, e.g. 0,1 (default: all)"),
    option(
        "--share-gpus",
        action="store_true",
        help="allow more ranks than GPUs, over Gloo; use the variable device, LOCAL_RANK may not be a GPU",
    ),
    option(
        "--launcher",
        choices=LAUNCHER_NAMES,
        help="mpi: one MPI job; local: plain processes; ssh: hosts, without MPI; slurm: a Slurm job (default: mpi)",
    ),
    option("--hosts", help="hosts to reach by ssh, each with its number of ranks, e.g. node1:4,node2:4"),
    option("--hostfile", metavar="FILE", help="a hostfile of Open MPI or MPICH in place of --hosts"),
    option("--node-count", type=int, metavar="N", help="use the first N of these hosts (default: all)"),
    option(
        "--process-count-per-node", type=int, metavar="N", help="ranks per host (default: as named, or one per GPU)"
    ),
    option("--spare", metavar="HOSTS", help="hosts that replace a lost one (--launcher ssh)"),
    option("--interface", help="the hosts' network: an interface, or a network such as 10.1.0.0/16 (default: chosen)"),
    option(
        "--controller-ports",
        metavar="FIRST-LAST",
        help="8 ports of this machine that ranks on other hosts connect to (default: any)",
    ),
    SSH,
    option("-x", "--forward", action="append", metavar="NAME[=VALUE]", help="a variable to set on other hosts"),
    *SLURM_OPTIONS,
    option("--backend", choices=BACKENDS, help="process group backend; none: ranks without torch (default: auto)"),
    option("-a", "--address", help="MASTER_ADDR (default: chosen)"),
    option("--port", type=int, help="MASTER_PORT (default: a free one)"),
    option("--timeout", type=float, metavar="S", help="timeout of a collective, in seconds (default: 1800)"),
    option("--start-timeout", type=float, metavar="S", help="timeout of the start, in seconds (default: 120)"),
    option("--grace", type=float, metavar="S", help="seconds until ranks that wait for a failed one are released (3)"),
    option("--hang-after", type=float, metavar="S", help="seconds until a cell explains a hang (default: 30)"),
    option(
        "--on-rank-death", choices=ON_RANK_DEATH, help="replace the rank, reset all ranks or stop (default: replace)"
    ),
    option("--tf-config", metavar="ROLES", help="set TF_CONFIG for TensorFlow, e.g. worker=2 or chief=1,worker=2,ps=1"),
    option("--keep", action="store_true", help="keep the ranks running when the kernel ends"),
    option(
        "--idle-timeout", type=float, metavar="S", help="end the cluster after S seconds without use (default: never)"
    ),
    option("--name", default=None, help="the cluster's name, to have several side by side (default: default)"),
)


@magics_class
class ClusterMagics(ClusterUsingMagics):
    """The magics for clusters."""

    @magic(*_OF_INIT)
    def dist_init(self, args: argparse.Namespace) -> None:
        """Start the ranks of this notebook: by default one per GPU, or two without GPUs.

        In Python they are ``cluster`` from then on, unless the notebook has a variable of that name. With
        ``--launcher slurm``, other long options of sbatch are passed on.
        """
        settings = self.clusters.settings
        name = args.name or "default"
        launcher = args.launcher or settings.launcher
        options: dict[str, Any] = {
            "n": settings.num_ranks or None if args.num_ranks is None else args.num_ranks,
            "launcher": launcher,
            "slurm": slurm_of(args, launcher),
            "backend": args.backend or settings.backend,
            "gpus": parse_gpus(args.gpus),
            "share_gpus": args.share_gpus,
            **hosts_of(args),
            "interface": args.interface or settings.interface or None,
            "ssh": args.ssh or settings.ssh,
            "forward": tuple(args.forward or ()),
            "address": args.address or settings.address or None,
            "port": args.port or 0,
            "timeout_s": settings.timeout if args.timeout is None else args.timeout,
            "start_timeout_s": settings.start_timeout if args.start_timeout is None else args.start_timeout,
            "grace_s": settings.grace if args.grace is None else args.grace,
            "hang_after_s": settings.hang_after if args.hang_after is None else args.hang_after,
            "on_rank_death": args.on_rank_death or settings.on_rank_death,
            "tf_roles": parse_roles(args.tf_config),
            "keep": args.keep or settings.keep,
            "sample_s": settings.sample,
            "warm": settings.warm,
            "preload": tuple(settings.preload),
            "idle_timeout_s": settings.idle_timeout if args.idle_timeout is None else args.idle_timeout,
            "name": name,
        }
        running = self.clusters.open.get(name)
        if running is not None and not running.closed:
            if running.config != ClusterConfig(**options):
                raise UsageError(
                    f"the cluster {name!r} ({label_ranks(range(running.world_size))}) is running with other options; "
                    "end it with %dist_shutdown before this, or start another beside it with --name NAME"
                )
            print(running_text(self.clusters.require(name)))  # noqa: T201  (the user may run all cells again)
            return
        with StatusLine(self.shell) as line_shown:
            cluster = Cluster(report=line_shown.wait, on_start=line_shown.show, **options)
            self.clusters.add(cluster)
            line_shown.end("\n".join([started_text(cluster), *kept_text()]))

    @magic(NAME, option("--text", action="store_true", help="print a table, even where a live view is possible"))
    def dist_status(self, args: argparse.Namespace) -> None:
        """Show nodes, ranks and metrics: live where the front end has widgets, else as a text table."""
        there = [cluster for cluster in self.clusters.open.values() if not cluster.closed]
        chosen = there if there and not args.name else [self.clusters.require(args.name)]
        notes = [note for cluster in chosen for note in cluster.take_notes()]  # first: the table is as new as they are
        if args.text or self.clusters.views.missing:
            print("\n\n".join(status_text(cluster) for cluster in chosen))  # noqa: T201
        else:
            for cluster in chosen:
                self.clusters.views.show(cluster)
        if notes:
            print("\n".join(notes))  # noqa: T201

    @magic(
        option(
            "cluster",
            nargs="?",
            metavar="CLUSTER|FILE|HOST:FILE",
            help="a name or id from `jupyter disttrain list` (default: the only one); or the FILE of a batch job whose "
            "ranks run `python -m jupyter_disttrain.rank --join FILE`; or HOST:FILE, to connect through ssh",
        ),
        SSH,
        option("--noblock", action="store_true", help="do not wait for a cell that still runs; %%dist_wait shows it"),
    )
    def dist_attach(self, args: argparse.Namespace) -> None:
        """Attach to ranks that outlived their kernel (``--keep``), or to those of a batch job.

        Their variables are kept; what they have printed meanwhile is shown.
        """
        for here in self.clusters.open.values():
            if not here.closed and args.cluster in (here.name, here.cluster_id):
                raise UsageError(
                    f"the cluster {here.name!r} is already attached to this notebook; %dist_status shows it"
                )
        ssh = args.ssh or self.clusters.settings.ssh
        cluster = Cluster.attach(args.cluster, ssh=ssh, unless=self.clusters.check_free)
        self.clusters.add(cluster)
        print(started_text(cluster) if cluster.start_report.is_first else attached_text(cluster))  # noqa: T201
        self.clusters.waiting[cluster.name] = [(run, None) for run in cluster.missed]
        if not args.noblock:
            self.clusters.show_waiting(cluster)

    @magic(NAME)
    def dist_detach(self, args: argparse.Namespace) -> None:
        """Detach from a cluster and leave it and its cells running; ``%dist_attach`` attaches to it again.

        This is possible for ranks that were started with ``--keep``, and for those of a batch job.
        """
        cluster = self.clusters.require(args.name)
        cluster.detach()
        self.clusters.forget(cluster)
        where = cluster.config.job_file or cluster.cluster_id
        ranks = label_ranks(range(cluster.config.n or 0)) if cluster.config.n else "its ranks"
        print(f"{ranks} continue without this notebook; %dist_attach {where} attaches to them again")  # noqa: T201

    @magic(NAME, ranks_option(None, "replace only these, e.g. 1 or 0,2-3"))
    def dist_reset(self, args: argparse.Namespace) -> None:
        """Start new processes for all ranks, or only for those named; their variables are lost."""
        cluster = self.clusters.require(args.name)
        if args.ranks is not None:
            ranks = parse_ranks(args.ranks, cluster.world_size)
            print("\n".join(cluster.replace(ranks)))  # noqa: T201
            return
        with StatusLine(self.shell) as line_shown:
            try:
                self.clusters.finish_saves(cluster)
                line_shown.show(f"ending {label_ranks(range(cluster.world_size))}")
                killed = cluster.reset(on_start=line_shown.show)
            finally:
                if cluster.closed:
                    self.clusters.forget(cluster)
            self.clusters.forget_cells(cluster)
            line_shown.end("\n".join([*killed, started_text(cluster)]))

    @magic(NAME, option("--all", action="store_true", help="end all clusters of this notebook"))
    def dist_shutdown(self, args: argparse.Namespace) -> None:
        """End the cluster and everything it started."""
        several = len(self.clusters.open) > 1
        for cluster in list(self.clusters.open.values()) if args.all else [self.clusters.require(args.name)]:
            killed = self.clusters.end(cluster)
            ended = f"{f'{cluster.name}: ' if several else ''}{label_ranks(range(cluster.world_size))} ended"
            print("\n".join([*killed, ended]))  # noqa: T201
