"""Format the cluster as text for ``%dist_init`` and ``%dist_status``.

Covers: a table of ranks with the last metrics of each, a line per node.
Does not cover: sampling the metrics (``features.telemetry.client``).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ...client.registry.cluster_file import running
from ...errors import ClusterClosedError
from ...features.telemetry.snapshot import snapshot
from ...features.telemetry.warnings import duration
from ...protocol.ranks import counted, label_ranks, size_text
from ...protocol.states import RankState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...client import Cluster
    from ...features.export.export import Exported
    from ...protocol.messages import NodeVitals

WARNED_PART = 0.5  # share of the idle timeout: with less time left, the status shows a warning
MIB, GIB = 2**20, 2**30
MOST_METRICS = 8  # metrics in a status text


def started_text(cluster: Cluster) -> str:
    """Describe the started ranks, failures of the user's IPython profile, and notes on the start."""
    ready = _where(cluster, f"{label_ranks(range(cluster.world_size))} ready in {cluster.start_report.seconds:.1f} s")
    troubles: dict[str, list[int]] = {}
    for entry in cluster.table:
        for text in entry.troubles:
            troubles.setdefault(text, []).append(entry.info.rank)
    failed = [f"{label_ranks(ranks)}, in your IPython profile: {text}" for text, ranks in troubles.items()]
    return "\n".join(filter(None, [*failed, ready, *cluster.start_report.notes]))


def running_text(cluster: Cluster) -> str:
    """Describe ranks that run already with the options that they are to have."""
    ranks = label_ranks(range(cluster.world_size))
    return _where(cluster, f"{ranks} run already, with their variables (%dist_reset starts new ones)")


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


def status_text(cluster: Cluster) -> str:
    """Return a table of the ranks, and a line per node."""
    table = cluster.table
    if not table:
        return f"{cluster.name}: its ranks are being restarted"
    found = snapshot(cluster.telemetry, [(entry.info, entry.state) for entry in table])
    rows = [
        rank_columns(rank) | {"cell": "" if entry.cell is None else str(entry.cell)}
        for rank, entry in zip(found["ranks"], table, strict=True)
    ]
    launcher = cluster.config.job or cluster.config.launcher
    running = {entry.info.rank for entry in table if entry.state is RankState.RUNNING}
    progress = cluster.telemetry.remarks.of_progress(running)
    lines: list[str] = [cluster.job, _why_lost(cluster), _warning(cluster), *_align(rows)]
    lines += [_node(node) for node in cluster.telemetry.nodes]
    lines += [progress, *found["remarks"], _metrics(cluster)]
    title = f"{cluster.name}: {label_ranks(range(len(table)))} · {launcher} · {table[0].info.backend}"
    return "\n".join([title, *(f"  {line}" for line in lines if line)])


def _why_lost(cluster: Cluster) -> str:
    try:
        cluster.check_open()
    except ClusterClosedError as error:
        return str(error)
    return ""


def _metrics(cluster: Cluster) -> str:
    """Return the last values of the metrics logged last."""
    if not cluster.telemetry.metrics_arrived:
        return ""
    last = [f"{found.name} {found.mean[-1]:.4g}" for found in cluster.metrics.gather_last(MOST_METRICS)]
    return f"logged last, mean over ranks: {', '.join(last)}"


def _warning(cluster: Cluster) -> str:
    """Warn before an unused cluster ends."""
    limit = cluster.config.idle_timeout_s
    left = limit - cluster.idle_s
    if not limit or left > limit * WARNED_PART:
        return ""
    unused, ends_in = duration(cluster.idle_s), duration(max(left, 0))
    return f"not used for {unused}: it ends in {ends_in} (--idle-timeout) unless it is used"


def rank_columns(rank: dict[str, Any]) -> dict[str, str]:
    """Return a rank of a ``snapshot`` as texts by the title of their column; empty where nothing is known."""
    gpu = rank.get("gpu", {})

    def show(pattern: str, value: float | str | None) -> str:
        return "" if value is None else pattern.format(value)

    return {
        "rank": str(rank["rank"]),
        "state": rank["text"],
        "cell": show("[{}]", rank.get("cell")),
        "line": show("{}", rank.get("line")),
        "steps/s": show("{:.3g}", rank.get("steps_per_s")),
        "waiting": f"{100 * rank['waiting']:.0f} %" if "waiting" in rank else "",
        "host": rank["host"],
        "local": str(rank["local_rank"]),
        "device": rank["device"],
        "pid": str(rank["pid"]),
        "CPU": show("{:.0f} %", rank.get("cpu_percent")),
        "memory": f"{rank['memory_bytes'] / MIB:.0f} MiB" if "memory_bytes" in rank else "",
        "GPU use": show("{} %", gpu.get("percent")),
        "GPU memory": f"{gpu['memory_used_bytes'] / GIB:.1f} of {gpu['memory_total_bytes'] / GIB:.0f} GiB"
        if "memory_used_bytes" in gpu
        else "",
        "GPU temperature": show("{} °C", gpu.get("celsius")),
        "GPU power": show("{:.0f} W", gpu.get("watts")),
        "GPU slowed by": gpu.get("limited_by", ""),
        "ECC errors": show("{}", gpu.get("ecc_errors") or None),
        "other processes on GPU": show("{}", gpu.get("others") or None),
    }


def _node(node: NodeVitals) -> str:
    parts = [
        f"{node.cores} cores {node.cpu_percent:.0f} % busy, load {node.load:.1f}",
        f"memory {node.memory_used_bytes / GIB:.1f} of {node.memory_total_bytes / GIB:.0f} GiB",
        f"disk {node.disk_free_bytes / GIB:.0f} GiB free",
        f"network {size_text(node.received_bytes_per_s)}/s in, {size_text(node.sent_bytes_per_s)}/s out",
    ]
    if node.infiniband_received_bytes_per_s or node.infiniband_sent_bytes_per_s:
        parts.append(
            f"InfiniBand {size_text(node.infiniband_received_bytes_per_s)}/s in, "
            f"{size_text(node.infiniband_sent_bytes_per_s)}/s out"
        )
    return f"{node.host}: {' · '.join(parts)}"


def _align(rows: Sequence[dict[str, str]]) -> list[str]:
    """Align the columns, with titles, and leave out empty ones."""
    kept = [[title, *(row[title] or "-" for row in rows)] for title in rows[0] if any(row[title] for row in rows)]
    widths = [max(map(len, column)) for column in kept]
    padded = [[cell.ljust(width) for cell in column] for column, width in zip(kept, widths, strict=True)]
    return ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]
