"""Define the magics that start, show and end clusters.

Covers: parsing a line, calling :class:`~jupyter_disttrain.Cluster`.
Does not cover: options (``arguments``), their defaults (``settings``), the clusters of the notebook (``clusters``).
"""

from __future__ import annotations

from IPython.core.magic import line_magic, magics_class

from ...client import Cluster
from ...config.cluster import parse_roles
from ...config.rank_selection import parse_ranks
from ...errors import UsageError
from ...protocol.ranks import label_ranks
from ..views.status_line import StatusLine
from ..views.status_text import attached_text, kept_text, started_text, status_text
from .arguments import documented, hosts_of, parse, parse_gpus
from .clusters import ClusterUsingMagics
from .slurm_arguments import slurm_of


@magics_class
class ClusterMagics(ClusterUsingMagics):
    """The magics for clusters."""

    @documented
    @line_magic
    def dist_init(self, line: str) -> None:
        """Start the ranks of this notebook: by default one per GPU, or two without GPUs.

        In Python they are ``cluster`` from then on, unless the notebook has a variable of that name. With
        ``--launcher slurm``, other long options of sbatch are passed on.
        """
        args, settings = parse("dist_init", line), self.clusters.settings
        name = args.name or "default"
        running = self.clusters.open.get(name)
        if running is not None and not running.closed:
            raise UsageError(
                f"the cluster {name!r} ({label_ranks(range(running.world_size))}) is running; "
                "use it, restart it with %dist_reset, end it with %dist_shutdown, "
                "or start another beside it with --name NAME"
            )
        launcher = args.launcher or settings.launcher
        with StatusLine(self.shell) as line_shown:
            cluster = Cluster(
                n=settings.num_ranks or None if args.num_ranks is None else args.num_ranks,
                launcher=launcher,
                slurm=slurm_of(args, launcher, args.unknown),
                report=line_shown.wait,
                on_start=line_shown.show,
                backend=args.backend or settings.backend,
                gpus=parse_gpus(args.gpus),
                share_gpus=args.share_gpus,
                **hosts_of(args),
                interface=args.interface or settings.interface or None,
                ssh=args.ssh or settings.ssh,
                forward=tuple(args.forward or ()),
                address=args.address or settings.address or None,
                port=args.port or 0,
                timeout_s=settings.timeout if args.timeout is None else args.timeout,
                start_timeout_s=settings.start_timeout if args.start_timeout is None else args.start_timeout,
                grace_s=settings.grace if args.grace is None else args.grace,
                hang_after_s=settings.hang_after if args.hang_after is None else args.hang_after,
                on_rank_death=args.on_rank_death or settings.on_rank_death,
                tf_roles=parse_roles(args.tf_config),
                keep=args.keep or settings.keep,
                sample_s=settings.sample,
                idle_timeout_s=settings.idle_timeout if args.idle_timeout is None else args.idle_timeout,
                name=name,
            )
            self.clusters.add(cluster)
            line_shown.end("\n".join([started_text(cluster), *kept_text()]))

    @documented
    @line_magic
    def dist_status(self, line: str) -> None:
        """Show nodes, ranks and metrics: live where the front end has widgets, else as a text table."""
        args = parse("dist_status", line)
        there = [cluster for cluster in self.clusters.open.values() if not cluster.closed]
        chosen = there if there and not args.name else [self.clusters.require(args)]
        notes = [note for cluster in chosen for note in cluster.take_notes()]  # first: the table is as new as they are
        if args.text or not self.clusters.views.has_page:
            print("\n\n".join(status_text(cluster) for cluster in chosen))  # noqa: T201
        else:
            for cluster in chosen:
                self.clusters.views.show(cluster)
        if notes:
            print("\n".join(notes))  # noqa: T201

    @documented
    @line_magic
    def dist_attach(self, line: str) -> None:
        """Attach to ranks that outlived their kernel (``--keep``), or to those of a batch job.

        Their variables are kept; what they have printed meanwhile is shown.
        """
        args = parse("dist_attach", line)
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

    @documented
    @line_magic
    def dist_detach(self, line: str) -> None:
        """Detach from a cluster and leave it and its cells running; ``%dist_attach`` attaches to it again.

        This is possible for ranks that were started with ``--keep``, and for those of a batch job.
        """
        cluster = self.clusters.require(parse("dist_detach", line))
        cluster.detach()
        self.clusters.forget(cluster)
        where = cluster.config.job_file or cluster.cluster_id
        ranks = label_ranks(range(cluster.config.n or 0)) if cluster.config.n else "its ranks"
        print(f"{ranks} continue without this notebook; %dist_attach {where} attaches to them again")  # noqa: T201

    @documented
    @line_magic
    def dist_reset(self, line: str) -> None:
        """Start new processes for all ranks, or only for those named; their variables are lost."""
        args = parse("dist_reset", line)
        cluster = self.clusters.require(args)
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
            self.clusters.waiting.pop(cluster.name, None)
            self.clusters.close_relay(cluster)
            line_shown.end("\n".join([*killed, started_text(cluster)]))

    @documented
    @line_magic
    def dist_shutdown(self, line: str) -> None:
        """End the cluster and everything it started."""
        args = parse("dist_shutdown", line)
        several = len(self.clusters.open) > 1
        for cluster in list(self.clusters.open.values()) if args.all else [self.clusters.require(args)]:
            killed = self.clusters.end(cluster)
            ended = f"{f'{cluster.name}: ' if several else ''}{label_ranks(range(cluster.world_size))} ended"
            print("\n".join([*killed, ended]))  # noqa: T201
