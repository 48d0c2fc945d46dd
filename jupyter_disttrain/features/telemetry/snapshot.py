"""Convert the state of a cluster to JSON and bytes for a front end.

Covers: what the widget and the side panel draw: ranks, nodes, remarks; the metrics that are new since a mark.
Does not cover: sending (``notebook.views.widget``, ``server``), drawing (``labextension/src/view``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...protocol.states import RankState
from .rank_figures import rates_between

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...protocol.ranks import RankInfo
    from .client import Telemetry
    from .metrics_table import MetricsTable
    from .rank_figures import RankFigures

MOST_NAMES = 2**16  # that a 16-bit column can distinguish; a page draws some twenty
LARGEST_PACKET = 20_000  # values per packet; the rest follows in the next
LARGEST_HISTORY = 500_000  # values in the first packet: 10 MB
HISTORY = 1500  # points of one metric on one rank that a front end receives when it opens


def rank_snapshots(
    telemetry: Telemetry, infos: Sequence[RankInfo], known: Mapping[int, RankState]
) -> list[dict[str, Any]]:
    """Return a dict per rank.

    Parameters
    ----------
    telemetry
        The figures that ranks reported.
    infos
        The identities of the ranks.
    known
        Their states as recorded by the cluster: see ``Telemetry.state``.
    """
    figures = telemetry.ranks
    return [_rank(telemetry, info, known[info.rank], figures.get(info.rank)) for info in infos]


def _rank(telemetry: Telemetry, info: RankInfo, known: RankState, figures: RankFigures | None) -> dict[str, Any]:
    state, text = telemetry.state(info.rank, known)
    found: dict[str, Any] = {
        "rank": info.rank,
        "host": info.host,
        "local_rank": info.local_rank,
        "device": info.device,
        "pid": info.pid,
        "state": state,
        "text": text,
    }
    if figures is None:
        return found
    vitals = figures.vitals
    found |= {"cpu_percent": vitals.cpu_percent, "memory_bytes": vitals.memory_bytes, "steps": vitals.steps}
    if vitals.gpu is not None:
        found["gpu"] = vitals.gpu
    # The cluster learns of a cell's end before the next figures arrive.
    if vitals.cell is not None and known is not RankState.IDLE:
        found |= {"cell": vitals.execution_count, "line": vitals.line, "call": vitals.call}
        if vitals.total:
            found |= {"done": vitals.done, "total": vitals.total, "left_s": vitals.left_s}
    rates = figures.rates()
    if rates is not None and "cell" in found:
        found |= {
            "steps_per_s": rates.steps_per_s,
            "samples_per_s": rates.samples_per_s,
            "waiting": rates.waiting,
            "waiting_for_data": rates.waiting_for_data,
        }
    return {name: value for name, value in found.items() if value is not None}


def device_history(telemetry: Telemetry, since_s: Mapping[int, float]) -> dict[int, list[list[float | None]]]:
    """Return for each rank the figures reported after a time: time, CPU %, memory, GPU %, GPU memory, steps/s.

    Parameters
    ----------
    telemetry
        The figures that ranks reported.
    since_s
        By rank, the time of the last figure already received, by the rank's clock in seconds since the epoch.
    """
    found = {}
    for rank, figures in telemetry.ranks.items():
        history = figures.recent()
        if not history:
            continue
        points = []
        for before, vitals in zip([history[0], *history], history, strict=False):
            if vitals.time_s <= since_s.get(rank, 0.0):
                continue
            gpu = vitals.gpu or {}
            rates = rates_between(before, vitals)
            points.append(
                [
                    vitals.time_s,
                    vitals.cpu_percent,
                    vitals.memory_bytes,
                    gpu.get("percent"),
                    gpu.get("memory_used_bytes"),
                    None if rates is None else rates.steps_per_s,
                ]
            )
        if points:
            found[rank] = points
    return found


def metrics_packet(table: MetricsTable, mark: int) -> tuple[int, dict[str, Any], bytes]:
    """Pack the values that arrived after a mark; the first mark is 0 and returns a thinned history.

    Returns
    -------
    tuple
        The next mark; a header with ``count``, ``names`` and whether this is the ``first`` packet; and the columns one
        after the other, each of ``count`` numbers in the machine's byte order: steps as Float64, values as Float32,
        cells as Int32, names and ranks as Uint16. A value without a step has NaN as its step.
    """
    import numpy as np  # noqa: PLC0415  (already imported if there are metrics)

    from .metrics_table import NO_STEP  # noqa: PLC0415

    next_mark, rows = table.since(mark)
    if not mark:
        rows = _thin(rows)
    elif len(rows) > LARGEST_PACKET:
        next_mark -= len(rows) - LARGEST_PACKET
        rows = rows[:LARGEST_PACKET]
    rows = rows[rows["name"] < MOST_NAMES]
    numbers, name_at = np.unique(rows["name"], return_inverse=True)
    steps = rows["step"].astype(np.float64)
    steps[rows["step"] == NO_STEP] = np.nan
    with np.errstate(over="ignore"):  # values too large for Float32 become infinity, which the page draws
        values = rows["value"].astype(np.float32)
    columns = (
        steps,
        values,
        rows["cell"].astype(np.int32),
        name_at.astype(np.uint16),
        rows["rank"].astype(np.uint16),
    )
    names = table.names
    header = {"count": len(rows), "names": [names[number] for number in numbers], "first": not mark}
    return next_mark, header, b"".join(column.tobytes() for column in columns)


def _thin(rows: Any) -> Any:
    """Keep each metric's last cell, and of that some ``HISTORY`` points per rank, at the same steps on all ranks."""
    import numpy as np  # noqa: PLC0415

    _, name = np.unique(rows["name"], return_inverse=True)
    newest = np.full(name.max(initial=-1) + 1, -1)
    np.maximum.at(newest, name, rows["cell"])
    is_newest = rows["cell"] == newest[name]
    rows, name = rows[is_newest], name[is_newest]
    # First thin out whole steps, then values logged several times in one step.
    steps = np.lexsort((rows["step"], name))
    is_new = _differs(name[steps]) | _differs(rows["step"][steps])
    kept = np.empty(len(rows), bool)
    kept[steps] = _every(np.cumsum(is_new) - 1, _differs(name[steps]))
    rows, name = rows[kept], name[kept]
    series = np.lexsort((rows["rank"], name))
    is_first = _differs(name[series]) | _differs(rows["rank"][series])
    chosen = np.empty(len(rows), bool)
    chosen[series] = _every(np.arange(len(rows)), is_first) | np.roll(is_first, -1)  # keep the last one, too
    return rows[chosen][-LARGEST_HISTORY:]


def _differs(sorted_values: Any) -> Any:
    """Return where a value differs from the previous one."""
    import numpy as np  # noqa: PLC0415

    return np.concatenate(([True], sorted_values[1:] != sorted_values[:-1]))[: len(sorted_values)]


def _every(numbers: Any, is_first: Any) -> Any:
    """Choose some ``HISTORY`` of the numbers of each group; they ascend, and ``is_first`` marks where groups begin."""
    import numpy as np  # noqa: PLC0415

    if not len(numbers):
        return np.zeros(0, bool)
    group = np.cumsum(is_first) - 1
    begins = np.flatnonzero(is_first)
    ends = np.append(begins[1:], len(numbers)) - 1
    stride = np.maximum(1, (numbers[ends] - numbers[begins] + 1) // HISTORY)
    return (numbers - numbers[begins][group]) % stride[group] == 0
