"""Define the magics.

Covers: parsing a line, calling :class:`~jupyter_disttrain.Cluster`.
Does not cover: options (``arguments``), their defaults (``settings``), drawing (``notebook.output.renderer``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.magic import cell_magic, line_cell_magic, line_magic, magics_class, no_var_expand

from ...client import CellRun, Cluster
from ...client.cells.variables import check_names
from ...config.cluster import parse_roles
from ...config.rank_selection import parse_ranks
from ...errors import UsageError
from ...protocol.ranks import label_ranks
from ..output.cell_places import watch_cells
from ..output.comms import CommRelay
from ..output.displays import sink_for
from ..output.renderer import Screen
from ..output.terminal_renderer import TerminalScreen
from ..views.status_line import StatusLine
from ..views.status_text import attached_text, kept_text, started_text, status_text
from ..views.views import Views
from .arguments import documented, hosts_of, parse, parse_gpus
from .data_magics import FileMagics
from .input_transformers import Transformers, check_magics
from .script_magics import origin_of
from .slurm_arguments import slurm_of

if TYPE_CHECKING:
    import argparse

    from IPython.core.interactiveshell import InteractiveShell


@magics_class
class DistributedMagics(FileMagics):
    """Distributed training from a notebook; ``%config DistributedMagics`` shows and sets the defaults."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell, **kwargs: Any) -> None:
        super().__init__(shell=shell, **kwargs)
        self.transformers = Transformers(shell)
        self.views = Views(shell)
        watch_cells(shell)
        self._last = ""
        self._relays: dict[str, CommRelay] = {}  # by cluster: a widget of one cell may be changed by another
        self._waiting: dict[str, list[tuple[CellRun, str | None]]] = {}  # by cluster: with the name for the values

    # Clusters

    @documented
    @line_magic
    def dist_init(self, line: str) -> None:
        """Start the ranks of this notebook: by default one per GPU, or two without GPUs.

        In Python they are ``cluster`` from then on, unless the notebook has a variable of that name. With
        ``--launcher slurm``, other long options of sbatch are passed on.
        """
        args = parse("dist_init", line)
        name = args.name or "default"
        running = self._clusters.get(name)
        if running is not None and not running.closed:
            raise UsageError(
                f"the cluster {name!r} ({label_ranks(range(running.world_size))}) is running; "
                "use it, restart it with %dist_reset, end it with %dist_shutdown, "
                "or start another beside it with --name NAME"
            )
        launcher = args.launcher or self.launcher
        with StatusLine(self.shell) as line_shown:
            cluster = Cluster(
                n=self.num_ranks or None if args.num_ranks is None else args.num_ranks,
                launcher=launcher,
                slurm=slurm_of(args, launcher, args.unknown),
                tell=line_shown.wait,
                on_start=line_shown.show,
                backend=args.backend or self.backend,
                gpus=parse_gpus(args.gpus),
                share_gpus=args.share_gpus,
                **hosts_of(args),
                interface=args.interface or self.interface or None,
                ssh=args.ssh or self.ssh,
                forward=tuple(args.forward or ()),
                address=args.address or self.address or None,
                port=args.port or 0,
                timeout_s=self.timeout if args.timeout is None else args.timeout,
                start_timeout_s=self.start_timeout if args.start_timeout is None else args.start_timeout,
                grace_s=self.grace if args.grace is None else args.grace,
                hang_after_s=self.hang_after if args.hang_after is None else args.hang_after,
                on_rank_death=args.on_rank_death or self.on_rank_death,
                tf_roles=parse_roles(args.tf_config),
                keep=args.keep or self.keep,
                sample_s=self.sample,
                idle_timeout_s=self.idle_timeout if args.idle_timeout is None else args.idle_timeout,
                name=name,
            )
            self._add(cluster)
            line_shown.end("\n".join([started_text(cluster), *kept_text()]))

    def _add(self, cluster: Cluster) -> None:
        if cluster.name in self._clusters:
            self._forget(self._clusters[cluster.name])  # it was closed
        self._clusters[cluster.name] = cluster
        self._last = cluster.name
        if isinstance(self.shell.user_ns.get("cluster"), (Cluster, type(None))):  # not a variable of the user's own
            self.shell.user_ns["cluster"] = cluster

    @documented
    @line_magic
    def dist_attach(self, line: str) -> None:
        """Attach to ranks that outlived their kernel (``--keep``), or to those of a batch job.

        Their variables are kept; what they have printed meanwhile is shown.
        """
        args = parse("dist_attach", line)
        for here in self._clusters.values():
            if not here.closed and args.cluster in (here.name, here.cluster_id):
                raise UsageError(f"the cluster {here.name!r} is in this notebook already; %dist_status shows it")
        cluster = Cluster.attach(args.cluster, ssh=args.ssh or self.ssh, unless=self._has)
        self._add(cluster)
        print(started_text(cluster) if cluster.start_report.is_first else attached_text(cluster))  # noqa: T201
        self._waiting[cluster.name] = [(run, None) for run in cluster.missed]
        if not args.noblock:
            self._wait_for_cells(cluster)

    def _has(self, name: str) -> None:
        """Refuse a cluster with the name of an open one."""
        if name in self._clusters and not self._clusters[name].closed:
            raise UsageError(
                f"another cluster {name!r} is in this notebook; end it first with %dist_shutdown, or leave it to "
                "itself with %dist_detach"
            )

    @documented
    @line_magic
    def dist_detach(self, line: str) -> None:
        """Leave a cluster running, with its cells; ``%dist_attach`` brings it back.

        This is possible for ranks that were started with ``--keep``, and for those of a batch job.
        """
        cluster = self._require(parse("dist_detach", line))
        cluster.detach()
        self._forget(cluster)
        where = cluster.config.job_file or cluster.cluster_id
        ranks = label_ranks(range(cluster.config.n or 0)) if cluster.config.n else "its ranks"
        print(f"{ranks} go on without this notebook; %dist_attach {where} brings them back")  # noqa: T201

    @documented
    @line_magic
    def dist_reset(self, line: str) -> None:
        """Start new processes for all ranks, or only for those named; their variables are lost."""
        args = parse("dist_reset", line)
        cluster = self._require(args)
        if args.ranks is not None:
            ranks = parse_ranks(args.ranks, cluster.world_size)
            print("\n".join(cluster.replace(ranks)))  # noqa: T201
            return
        with StatusLine(self.shell) as line_shown:
            try:
                self._finish_saves(cluster)
                line_shown.show(f"ending {label_ranks(range(cluster.world_size))}")
                killed = cluster.reset(on_start=line_shown.show)
            finally:
                if cluster.closed:
                    self._forget(cluster)
            self._waiting.pop(cluster.name, None)
            self._close_relay(cluster)
            line_shown.end("\n".join([*killed, started_text(cluster)]))

    @documented
    @line_magic
    def dist_shutdown(self, line: str) -> None:
        """End the cluster and everything it started."""
        args = parse("dist_shutdown", line)
        several = len(self._clusters) > 1
        for cluster in list(self._clusters.values()) if args.all else [self._require(args)]:
            killed = self._end(cluster)
            ended = f"{f'{cluster.name}: ' if several else ''}{label_ranks(range(cluster.world_size))} ended"
            print("\n".join([*killed, ended]))  # noqa: T201

    def _forget(self, cluster: Cluster) -> None:
        self._clusters.pop(cluster.name, None)
        self._waiting.pop(cluster.name, None)
        self._close_relay(cluster)
        self._last = next(reversed(self._clusters), "")
        if not self._clusters:
            self.transformers.everywhere = False

    def _close_relay(self, cluster: Cluster) -> None:
        relay = self._relays.pop(cluster.name, None)
        if relay is not None:
            relay.close()

    def shutdown_all(self) -> None:
        """Shut down every cluster of this notebook."""
        for cluster in list(self._clusters.values()):
            self._end(cluster)

    def _end(self, cluster: Cluster) -> list[str]:
        """Shut down a cluster; return messages on ranks that were killed."""
        try:
            self._finish_saves(cluster)
        finally:  # an interrupt ends the wait, not the shutdown
            self._forget(cluster)
            killed = cluster.shutdown()
        return killed

    def _require(self, args: argparse.Namespace) -> Cluster:
        """Return the cluster that was named, or the one used last."""
        name = args.name or self._last
        cluster = self._clusters.get(name)
        if cluster is None and args.name:
            there = ", ".join(self._clusters) or "none"
            raise UsageError(
                f"no cluster is named {args.name!r} (there: {there}); start it with %dist_init --name {args.name}"
            )
        if cluster is None:
            kept = "".join(f"; {words}" for words in kept_text())
            raise UsageError(f"no cluster is running; start one with %dist_init, e.g. %dist_init -n 2{kept}")
        self._last = name
        if cluster.closed:
            cluster.check_open()
        return cluster

    # Cells

    @documented
    @no_var_expand
    @cell_magic
    def distributed(self, line: str, cell: str) -> None:
        """Run the cell on every rank, or on those named, and show what each rank prints."""
        args = parse("distributed", line)
        self._run("%%distributed", line, cell, args, args.ranks)

    @documented
    @no_var_expand
    @cell_magic
    def rank(self, line: str, cell: str) -> None:
        """Run the cell on some ranks: ``%%rank 0``, ``%%rank [0,2]`` or ``%%rank[0-2]``."""
        args = parse("rank", line)
        self._run("%%rank", line, cell, args, ",".join(args.ranks).replace(",,", ","))

    def _run(self, magic: str, line: str, cell: str, args: argparse.Namespace, ranks: str) -> None:
        cluster = self._require(args)
        check_magics(cell, is_bare=args.bare)
        if args.out is not None:
            check_names([args.out])
        chosen = parse_ranks(ranks, cluster.world_size)
        if args.watch and self.views.has_page:
            self.views.show(cluster)
        self._sync_before_cell(cluster, chosen)
        run = cluster.run(
            # As a comment, so that line 3 of the cell is line 3 on the ranks, which run the cell without it.
            cell if args.bare else f"#{magic} {line}".rstrip() + f"\n{cell}",
            chosen,
            values=args.out is not None,
            block=not args.noblock,  # in one call, so that no interrupt falls between sending and waiting
            timeout_s=args.timeout,
            listener=None if args.noblock else self._screen(cluster, chosen, below_view=args.watch),
            origin=origin_of(self.shell),
        )
        if args.noblock:
            self._waits_for(cluster, run, args.out)
            return
        self._keep(run, args.out)

    def _waits_for(self, cluster: Cluster, run: CellRun, out: str | None) -> None:
        """Have %dist_wait show the cell's output."""
        self._waiting.setdefault(cluster.name, []).append((run, out))
        ranks = label_ranks(run.ranks)
        print(f"running on {ranks}; %dist_status tells how far, %dist_wait shows what came of it")  # noqa: T201

    def _keep(self, run: CellRun, out: str | None) -> None:
        """Keep a cell's values, if they were requested."""
        if out is not None:
            self.shell.user_ns[out] = run.results

    def _screen(self, cluster: Cluster, ranks: tuple[int, ...], *, below_view: bool = False) -> Screen:
        relay = self._relays.setdefault(cluster.name, CommRelay(cluster.send_comm))
        return (Screen if hasattr(self.shell, "kernel") else TerminalScreen)(
            sink_for(self.shell),
            ranks,
            cluster.world_size,
            cluster.log_folder,
            max_lines=self.max_output_lines,
            max_bytes=self.max_output_bytes,
            progress_after_s=self.progress_after,
            forward_comm=relay.forward,
            below_view=below_view,
        )

    @documented
    @line_magic
    def dist_wait(self, line: str) -> None:
        """Wait for the cells that were started with ``--noblock``, or that still run after stop, and show their output.

        While it waits, stop interrupts them.
        """
        cluster = self._require(parse("dist_wait", line))
        known = [run for run, _ in self._waiting.setdefault(cluster.name, [])]
        self._waiting[cluster.name] += [(run, None) for run in cluster.running_cells if run not in known]
        if not self._waiting[cluster.name]:
            raise UsageError("no cell runs in the background; start one with %%distributed --noblock")
        self._wait_for_cells(cluster)

    @documented
    @line_magic
    def dist_interrupt(self, line: str) -> None:
        """Interrupt ranks that still run a cell after ``--noblock``, or after stop has returned control.

        The second time it releases the ranks from whatever they wait for.
        """
        args = parse("dist_interrupt", line)
        cluster = self._require(args)
        lines = cluster.interrupt_and_wait(args.ranks)
        if any(run.done for run, _ in self._waiting.get(cluster.name, [])):
            lines.append("%dist_wait shows what came of it")
        print("\n".join(lines))  # noqa: T201

    def _wait_for_cells(self, cluster: Cluster) -> None:
        """Show the output of the background cells that are not waited for yet."""
        waiting = self._waiting.get(cluster.name, [])
        while waiting:
            run, out = waiting[0]
            run.listen(self._screen(cluster, run.ranks))
            try:
                self._keep(run.wait(), out)
            finally:
                if run.done:  # else the wait was interrupted, and can be resumed
                    waiting.pop(0)

    @documented
    @line_magic
    def dist_mode(self, line: str) -> None:
        """Run every following cell on the ranks, except those that begin with ``%%local``; or no longer."""
        args = parse("dist_mode", line)
        if args.enable:
            cluster = self._require_any()
            self.transformers.everywhere = True
            ranks = label_ranks(range(cluster.world_size))
            print(f"every cell now runs on {ranks}, but those that begin with %%local; %dist_mode -d ends it")  # noqa: T201
        elif args.disable:
            self.transformers.everywhere = False
            print("cells run in the notebook again")  # noqa: T201
        else:
            print(f"cells run {'on the ranks' if self.transformers.everywhere else 'in the notebook'}")  # noqa: T201

    def _require_any(self) -> Cluster:
        return self._require(parse("dist_status", ""))

    # The rest

    @documented
    @line_cell_magic
    def sync(self, line: str, cell: str | None = None) -> None:  # noqa: ARG002  (users write %%sync too)
        """Wait until all ranks have reached a barrier."""
        cluster = self._require(parse("sync", line))
        seconds = cluster.sync()
        print(f"{label_ranks(range(cluster.world_size))} met after {seconds * 1000:.1f} ms")  # noqa: T201

    @documented
    @line_magic
    def dist_status(self, line: str) -> None:
        """Show nodes, ranks and metrics: live where the front end has widgets, else as a text table."""
        args = parse("dist_status", line)
        there = [cluster for cluster in self._clusters.values() if not cluster.closed]
        chosen = there if there and not args.name else [self._require(args)]
        if args.text or not self.views.has_page:
            print("\n\n".join(status_text(cluster) for cluster in chosen))  # noqa: T201
        else:
            for cluster in chosen:
                self.views.show(cluster)
        if notes := [note for cluster in chosen for note in cluster.take_notes()]:
            print("\n".join(notes))  # noqa: T201

    @documented
    @line_magic
    def dist_where(self, line: str) -> None:
        """Show what each rank is doing now: the collective in which it waits, and the line.

        A kernel that waits for a cell answers afterwards: use it with ``--noblock``, or look at the side panel.
        """
        print("\n".join(self._require(parse("dist_where", line)).where()))  # noqa: T201

    @documented
    @line_magic
    def dist_copy(self, line: str) -> None:
        """Copy variables from one rank to others."""
        args = parse("dist_copy", line)
        self._require(args).copy(args.names, args.source, args.ranks)

    @documented
    @line_magic
    def dist_diff(self, line: str) -> None:
        """Show where ranks differ: the first parameter of a model that does, by how much and on which ranks."""
        args = parse("dist_diff", line)
        cluster = self._require(args)
        for name in args.names:
            print(cluster.diff(name, args.ranks))  # noqa: T201

    @documented
    @line_magic
    def dist_push(self, line: str) -> None:
        """Set variables of the notebook on the ranks."""
        args = parse("dist_push", line)
        cluster = self._require(args)
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
        cluster = self._require(args)
        ranks = parse_ranks(args.ranks, cluster.world_size)
        values = cluster.pull(args.names, ranks)
        for name in args.names:
            by_rank = {rank: named[name] for rank, named in values.items()}
            self.shell.user_ns[name] = by_rank[ranks[0]] if len(ranks) == 1 else by_rank
