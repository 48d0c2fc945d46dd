"""The cluster in text: what ``%dist_init`` and ``%dist_status`` print.

Covers: one line per rank, grouped by host.
Does not cover: live figures.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import psutil

from ..cluster.devices import gpu_figures
from ..cluster.registry import running
from ..ranks import label_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..cluster import Cluster
    from ..cluster.rank_table import RankEntry

WARNED_PART = 0.5  # of the idle time-out, before whose end the status warns
MINUTE = 60.0


def started_text(cluster: Cluster) -> str:
    """Say what was started."""
    return _where(cluster, f"{label_ranks(range(cluster.world_size))} ready in {cluster.start_seconds:.1f} s")


def attached_text(cluster: Cluster) -> str:
    """Say what was brought back, and what became of the cells that nobody watched."""
    lines = [_where(cluster, f"{label_ranks(range(cluster.world_size))} are back with their variables")]
    for run in cluster.missed:
        began = time.strftime("%H:%M:%S", time.localtime(run.started_s))
        state = "has ended" if run.done else f"still runs on {label_ranks(run.running_now)}"
        lines.append(f"the cell that was sent at {began} to {label_ranks(run.ranks)} {state}; what it said:")
    return "\n".join(lines)


def kept_text() -> list[str]:
    """Remind of clusters that an earlier notebook left running."""
    free = [cluster for cluster in running() if cluster.config["keep"] and not cluster.is_held]
    return [
        f"{cluster.name!r}, which was kept, still runs with {len(cluster.table)} ranks: "
        f"%dist_attach {cluster.cluster_id} brings it back"
        for cluster in free
    ]


def _where(cluster: Cluster, what: str) -> str:
    """Say where it is: in one line on one host, else with a line per host."""
    first = cluster.table[0].info
    hosts = list(dict.fromkeys(entry.info.host for entry in cluster.table))
    places = [_place(cluster, host) for host in hosts]
    if len(hosts) == 1:
        return f"{what} · {hosts[0]} · {places[0]} · {first.backend}"
    lines = (f"  {host}: {place}" for host, place in zip(hosts, places, strict=True))
    return "\n".join([f"{what} · {first.backend}", *lines])


def _place(cluster: Cluster, host: str) -> str:
    """Return which devices the ranks of a host use."""
    members = [entry.info for entry in cluster.table if entry.info.host == host]
    devices = ", ".join(dict.fromkeys(info.device for info in members))
    return (
        devices if len(members) == cluster.world_size else f"{label_ranks(info.rank for info in members)} on {devices}"
    )


def status_text(cluster: Cluster) -> str:
    """Return a table of the ranks."""
    rows: list[tuple[str, ...]] = [
        ("rank", "state", "cell", "host", "local", "device", "pid", "CPU memory", "GPU memory", "GPU use")
    ]
    gpus = gpu_figures([entry.info.device for entry in cluster.table])
    rows += [_row(entry, gpus.get(entry.info.device)) for entry in cluster.table]
    backend = cluster.table[0].info.backend
    title = f"{cluster.name}: {label_ranks(range(cluster.world_size))} · {cluster.config.launcher} · {backend}"
    return "\n".join([title, *_warning(cluster), *_align(rows)])


def _warning(cluster: Cluster) -> list[str]:
    """Warn before a cluster ends that nobody uses."""
    limit = cluster.config.idle_timeout_s
    left = limit - cluster.idle_s
    if not limit or left > limit * WARNED_PART:
        return []
    return [
        f"  not used for {_time(cluster.idle_s)}: it ends in {_time(max(left, 0))} (--idle-timeout), unless it is used"
    ]


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 2 * MINUTE else f"{seconds / MINUTE:.0f} min"


def _row(entry: RankEntry, gpu: tuple[int, int, int] | None) -> tuple[str, ...]:
    info = entry.info
    used = f"{gpu[0] / 2**30:.1f} of {gpu[1] / 2**30:.0f} GiB" if gpu else "-"
    cell = "-" if entry.cell is None else str(entry.cell)
    memory = _memory(entry)
    use = f"{gpu[2]} %" if gpu else "-"
    return (
        str(info.rank),
        entry.state,
        cell,
        info.host,
        str(info.local_rank),
        info.device,
        str(info.pid),
        memory,
        used,
        use,
    )


def _memory(entry: RankEntry) -> str:
    if entry.state == "dead" or entry.info.host != socket.gethostname():
        return "-"
    try:
        return f"{psutil.Process(entry.info.pid).memory_info().rss / 2**20:.0f} MiB"
    except psutil.NoSuchProcess:
        return "-"  # it ended this moment


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align the columns and leave out those in which nothing stands."""
    kept = [column for column in zip(*rows, strict=True) if any(cell != "-" for cell in column[1:])]
    widths = [max(map(len, column)) for column in kept]
    lines = zip(*kept, strict=True)
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    ]
