"""Print a table of the user's clusters for ``jupyter disttrain list``.

Covers: the table, the same as JSON.
Does not cover: finding clusters (``cluster_file``), what their ranks do (``observer``).
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from . import cluster_file
from .observer import what_ranks_do

if TYPE_CHECKING:
    from typing import TextIO

    from .cluster_file import ClusterFile

NONE = "you have no running cluster on this machine; %dist_init in a notebook starts one\n"


def write(out: TextIO, *, as_json: bool = False) -> None:
    """Write the running clusters, as a table or as JSON."""
    rows = [_row(cluster) for cluster in cluster_file.running()]
    if as_json:
        json.dump(rows, out, indent=1)
        out.write("\n")
    elif not rows:
        out.write(NONE)
    else:
        _write_table(out, rows)


def _row(cluster: ClusterFile) -> dict[str, Any]:
    return {
        "name": cluster.name,
        "id": cluster.cluster_id,
        "ranks": len(cluster.table),
        "launcher": cluster.launcher,
        "started_s": cluster.started_s,
        "doing": what_ranks_do(cluster),
        "kept": cluster.config["keep"],
        "held_by": cluster.holder if cluster.is_held else None,
        "notebook": cluster.notebook,
        "logs": cluster.run,
    }


def _write_table(out: TextIO, rows: list[dict[str, Any]]) -> None:
    head = ("NAME", "RANKS", "LAUNCHER", "STARTED", "DOING", "HELD BY", "ID")
    lines = [head, *(_line(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        out.write(f"{text.rstrip()}\n")
    free = [row["name"] for row in rows if row["kept"] and row["held_by"] is None]
    if free:
        out.write(
            f"\nin a notebook, %dist_attach {free[0]} attaches to it; here, jupyter disttrain stop {free[0]} ends it\n"
        )


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["started_s"]))
    return (
        row["name"],
        str(row["ranks"]),
        row["launcher"],
        started,
        row["doing"],
        row["held_by"] or "no process",
        row["id"],
    )
