"""Format the cluster as text for ``%dist_init`` and ``%dist_status``.

Covers: a table of ranks with the last metrics of each, a line per node.
Does not cover: sampling the metrics (``features.telemetry.client``).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...client.registry.cluster_file import running
from ...features.telemetry.warnings import duration
from ...protocol.ranks import counted, label_ranks
from ...protocol.states import RankState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...client import Cluster
    from ...client.startup.rank_table import RankEntry
    from ...features.export.export import Exported
    from ...features.telemetry.rank_figures import RankFigures
    from ...protocol.messages import NodeVitals

WARNED_PART = 0.5  # share of the idle timeout: with less time left, the status shows a warning
MIB, GIB = 2**20, 2**30
HEAD = (
    *("rank", "state", "cell", "line", "steps/s", "waiting", "host", "local", "device", "pid", "CPU", "memory"),
    *("GPU use", "GPU memory", "GPU temperature", "GPU power", "GPU slowed by", "ECC errors", "other processes on GPU"),
)


def started_text(cluster: Cluster) -> str:
    """Describe the started ranks, failures of the user's IPython profile, and why ranks use no accelerator."""
    ready = _where(cluster, f"{label_ranks(range(cluster.world_size))} ready in {cluster.start_report.seconds:.1f} s")
    troubles: dict[str, list[int]] = {}
    for entry in cluster.table:
        for text in entry.troubles:
            troubles.setdefault(text, []).append(entry.info.rank)
    failed = [f"{label_ranks(ranks)}, in your IPython profile: {text}" for text, ranks in troubles.items()]
    return "\n".join(filter(None, [*failed, ready, cluster.start_report.note_of_devices]))


def attached_text(cluster: Cluster) -> str:
    """Describe the attached cluster, and the cells that ran without a client."""
    lines = [_where(cluster, f"{label_ranks(range(cluster.world_size))} attached, with their variables")]
    for run in cluster.missed:
        began = time.strftime("%H:%M:%S", time.localtime(run.started_s))
        state = "has ended" if run.done else f"still runs on {label_ranks(run.running_now)}"
        lines.append(f"the cell that was sent at {began} to {label_ranks(run.ranks)} {state}; its output:")
    return "\n".join(lines)


def exported_text(exported: Exported) -> str:
    """List the files that were written, and notes for the user."""
    files = [exported.script.name, *([exported.values.name] if exported.values else []), exported.launch.name]
    where = f" in {exported.script.parent}" if str(exported.script.parent) != "." else ""
    return "\n".join([f"wrote {', '.join(files)}{where}; run it with {exported.command}", *exported.notes])


def kept_text() -> list[str]:
    """Return reminders of clusters that an earlier notebook left running."""
    free = [cluster for cluster in running() if cluster.config["keep"] and not cluster.is_held]
    return [
        f"the kept cluster {cluster.name!r} still runs with {counted(len(cluster.table), 'rank')}: "
        f"%dist_attach {cluster.cluster_id} attaches to it"
        for cluster in free
    ]


def _where(cluster: Cluster, what: str) -> str:
    """Append the location: in one line on one host, else with a line per host."""
    first = cluster.table[0].info
    hosts = list(dict.fromkeys(entry.info.host for entry in cluster.table))
    places = [_place(cluster, host) for host in hosts]
    if len(hosts) == 1:
        return f"{what} · {hosts[0]} · {places[0]} · {first.backend}"
    lines = (f"  {host}: {place}" for host, place in zip(hosts, places, strict=True))
    network = cluster.start_report.network
    return "\n".join([f"{what} · {first.backend}", *lines, *([f"  {network}"] if network else [])])


def _place(cluster: Cluster, host: str) -> str:
    """Return the devices that the ranks of a host use."""
    members = [entry.info for entry in cluster.table if entry.info.host == host]
    devices = ", ".join(dict.fromkeys(info.device for info in members))
    return (
        devices if len(members) == cluster.world_size else f"{label_ranks(info.rank for info in members)} on {devices}"
    )


MOST_METRICS = 8  # metrics in a status text


def status_text(cluster: Cluster) -> str:
    """Return a table of the ranks, and a line per node."""
    if not cluster.table:
        return f"{cluster.name}: its ranks are being restarted"
    figures = cluster.telemetry.ranks
    rows: list[tuple[str, ...]] = [HEAD]
    rows += [_row(cluster, entry, figures.get(entry.info.rank)) for entry in cluster.table]
    backend = cluster.table[0].info.backend
    launcher = cluster.config.job or cluster.config.launcher
    title = f"{cluster.name}: {label_ranks(range(cluster.world_size))} · {launcher} · {backend}"
    nodes = [_node(node) for node in cluster.telemetry.nodes]
    busy = {entry.info.rank for entry in cluster.table if entry.state == RankState.RUNNING}
    remarks = cluster.telemetry.remarks
    remark_lines = [text for text in (remarks.of_progress(busy), *remarks.of_running(busy)) if text]
    return "\n".join(
        [
            title,
            *_job(cluster),
            *([f"  {cluster.lost_because}"] if cluster.lost_because else []),
            *_warning(cluster),
            *_align(rows),
            *nodes,
            *(f"  {text}" for text in remark_lines + _metrics(cluster)),
        ]
    )


def _metrics(cluster: Cluster) -> list[str]:
    """Return the last values of the metrics logged last."""
    if not cluster.telemetry.has_metrics:
        return []
    last = [f"{found.name} {found.mean[-1]:.4g}" for found in cluster.metrics.gather_last(MOST_METRICS)]
    return [f"logged last, mean over ranks: {', '.join(last)}"] if last else []


def _job(cluster: Cluster) -> list[str]:
    """Describe the Slurm job, and its end."""
    return [f"  {cluster.job}"] if cluster.job else []


def _warning(cluster: Cluster) -> list[str]:
    """Warn before an unused cluster ends."""
    limit = cluster.config.idle_timeout_s
    left = limit - cluster.idle_s
    if not limit or left > limit * WARNED_PART:
        return []
    unused, ends_in = duration(cluster.idle_s), duration(max(left, 0))
    return [f"  not used for {unused}: it ends in {ends_in} (--idle-timeout) unless it is used"]


def _row(cluster: Cluster, entry: RankEntry, figures: RankFigures | None) -> tuple[str, ...]:
    info = entry.info
    vitals = figures.vitals if figures else None
    rates = figures.rates() if figures else None
    gpu = (vitals.gpu if vitals else None) or {}
    line = vitals.line if vitals and entry.state == RankState.RUNNING else None
    return (
        str(info.rank),
        cluster.telemetry.state(info.rank, entry.state)[1],
        "-" if entry.cell is None else str(entry.cell),
        "-" if line is None else str(line),
        "-" if rates is None or rates.steps_per_s is None else f"{rates.steps_per_s:.3g}",
        "-"
        if rates is None or rates.waiting is None or entry.state != RankState.RUNNING
        else f"{100 * rates.waiting:.0f} %",
        info.host,
        str(info.local_rank),
        info.device,
        str(info.pid),
        "-" if vitals is None else f"{vitals.cpu_percent:.0f} %",
        "-" if vitals is None else f"{vitals.memory_bytes / MIB:.0f} MiB",
        f"{gpu['percent']} %" if "percent" in gpu else "-",
        f"{gpu['memory_used_bytes'] / GIB:.1f} of {gpu['memory_total_bytes'] / GIB:.0f} GiB"
        if "memory_used_bytes" in gpu
        else "-",
        f"{gpu['celsius']} °C" if "celsius" in gpu else "-",
        f"{gpu['watts']:.0f} W" if "watts" in gpu else "-",
        gpu.get("limited_by", "-"),
        str(gpu["ecc_errors"]) if gpu.get("ecc_errors") else "-",
        str(gpu["others"]) if gpu.get("others") else "-",
    )


def _node(node: NodeVitals) -> str:
    parts = [
        f"{node.cores} cores {node.cpu_percent:.0f} % busy, load {node.load:.1f}",
        f"memory {node.memory_used_bytes / GIB:.1f} of {node.memory_total_bytes / GIB:.0f} GiB",
        f"disk {node.disk_free_bytes / GIB:.0f} GiB free",
        f"network {_rate(node.received_bytes_per_s)} in, {_rate(node.sent_bytes_per_s)} out",
    ]
    if node.infiniband_received_bytes_per_s or node.infiniband_sent_bytes_per_s:
        parts.append(
            f"InfiniBand {_rate(node.infiniband_received_bytes_per_s)} in, "
            f"{_rate(node.infiniband_sent_bytes_per_s)} out"
        )
    return f"  {node.host}: {' · '.join(parts)}"


def _rate(bytes_per_s: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.1f} {unit}/s"
    return f"{bytes_per_s:.0f} B/s"


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align the columns and leave out empty ones."""
    kept = [column for column in zip(*rows, strict=True) if any(cell != "-" for cell in column[1:])]
    widths = [max(map(len, column)) for column in kept]
    lines = zip(*kept, strict=True)
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    ]
