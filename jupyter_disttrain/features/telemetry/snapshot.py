"""Convert the state of a cluster to JSON and bytes for a front end.

Covers: what the widget and the side panel draw: ranks, nodes, remarks; the figures and metrics that are new to each.
Does not cover: sending (``notebook.views.widget``, ``server``), drawing (``labextension/src/view``).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ...protocol.metric_blocks import NO_STEP
from ...protocol.states import RankState
from .rank_figures import rates_between

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from ...protocol.messages import RankVitals
    from ...protocol.ranks import RankInfo
    from .client import Telemetry
    from .rank_figures import RankFigures

MOST_NAMES = 2**16  # that a 16-bit column can distinguish; a page draws some twenty
LARGEST_PACKET = 20_000  # values per packet; the rest follows in the next
LARGEST_HISTORY = 500_000  # values in the first packet: 10 MB
HISTORY = 1500  # points of one metric on one rank that a front end receives when it opens


def seconds_until_tick(period_s: float) -> float:
    """Return the time until the wall clock's next multiple of a period.

    The widget and the server send at these times, from different processes, so that both show the same.
    """
    return period_s - time.time() % period_s


def snapshot(telemetry: Telemetry, ranks: Sequence[tuple[RankInfo, RankState]]) -> dict[str, Any]:
    """Return the ranks, the nodes and remarks; ``ranks``: of each its state as known to the cluster, too."""
    figures = telemetry.ranks
    running = {info.rank for info, known in ranks if known is RankState.RUNNING}
    return {
        "ranks": [_rank(telemetry, info, known, figures.get(info.rank)) for info, known in ranks],
        "nodes": [node.to_content() for node in telemetry.nodes],
        "remarks": telemetry.remarks.of_running(running),
    }


def _rank(telemetry: Telemetry, info: RankInfo, known: RankState, figures: RankFigures | None) -> dict[str, Any]:
    state, text = telemetry.state(info.rank, known)
    found = _fields(info, "rank", "host", "local_rank", "device", "pid") | {"state": state, "text": text}
    if figures is None:
        return found
    vitals = figures.vitals
    found |= _fields(vitals, "cpu_percent", "memory_bytes", "steps", "uses", "gpu")
    # The cluster learns of a cell's end before the next figures arrive.
    if vitals.cell is not None and known is not RankState.IDLE:
        found |= {"cell": vitals.execution_count} | _fields(vitals, "line", "call")
        found |= _fields(vitals, "done", "total", "left_s") if vitals.total else {}
        found |= _fields(figures.rates(), "steps_per_s", "samples_per_s", "waiting", "waiting_for_data")
    return {name: value for name, value in found.items() if value is not None}


def _fields(record: object, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name, None) for name in names}


class Feed:
    """Return to one front end what is new to it of a cluster's figures and metrics; at first, what is kept of them."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._mark = 0  # in the metrics
        self._until_s: dict[int, float] = {}  # by rank, the time of its last figures

    def devices(self) -> dict[str, list[list[float | None]]]:
        """Return each rank's new figures: time, CPU %, memory, GPU %, GPU memory, steps/s.

        Times are seconds since the epoch by the rank's clock.
        """
        found = {}
        for rank, figures in self._telemetry.ranks.items():
            history = tuple(figures.history)
            until_s = self._until_s.get(rank, 0.0)
            points = [
                _point(before, vitals)
                for before, vitals in zip(history[:1] + history, history, strict=False)
                if vitals.time_s > until_s
            ]
            if points:
                found[str(rank)] = points
                self._until_s[rank] = history[-1].time_s
        return found

    def metrics(self) -> tuple[dict[str, Any], bytes] | None:
        """Pack the new values; None if there are none.

        Returns
        -------
        tuple
            A header with ``count``, ``names`` and whether this is the ``first`` packet, which has a thinned history.
            And the columns one after the other, each of ``count`` numbers in the machine's byte order: steps as
            Float64, NaN without one, values as Float32, cells as Int32, names and ranks as Uint16.
        """
        if not self._telemetry.metrics_arrived:
            return None
        import numpy as np  # noqa: PLC0415  (without metrics a notebook doesn't need it)

        is_first = not self._mark
        self._mark, rows = self._telemetry.metrics.since(self._mark)
        if is_first:
            rows = _thin(rows)
        elif len(rows) > LARGEST_PACKET:
            self._mark -= len(rows) - LARGEST_PACKET
            rows = rows[:LARGEST_PACKET]
        rows = rows[rows["name"] < MOST_NAMES]
        if not len(rows):
            return None
        numbers, name_at = np.unique(rows["name"], return_inverse=True)
        with np.errstate(over="ignore"):  # values too large for Float32 become infinity, which the page draws
            values = rows["value"].astype("f4")
        columns = (
            np.where(rows["step"] == NO_STEP, np.nan, rows["step"]),
            values,
            rows["cell"],
            name_at.astype("u2"),
            rows["rank"].astype("u2"),
        )
        names = self._telemetry.metrics.names
        header = {"count": len(rows), "names": [names[number] for number in numbers], "first": is_first}
        return header, b"".join(column.tobytes() for column in columns)


def _point(before: RankVitals, vitals: RankVitals) -> list[float | None]:
    gpu = vitals.gpu or {}
    rates = rates_between(before, vitals)
    return [
        vitals.time_s,
        vitals.cpu_percent,
        vitals.memory_bytes,
        gpu.get("percent"),
        gpu.get("memory_used_bytes"),
        None if rates is None else rates.steps_per_s,
    ]


def _thin(rows: np.ndarray) -> np.ndarray:
    """Keep each metric's last cell, and of that some ``HISTORY`` points per rank, at the same steps on all ranks."""
    import numpy as np  # noqa: PLC0415

    by_name = np.argsort(rows["name"], kind="stable")
    bounds = np.flatnonzero(np.diff(rows["name"][by_name])) + 1
    kept = []
    for of_name in np.split(by_name, bounds) if len(rows) else ():
        at = of_name[rows["cell"][of_name] == rows["cell"][of_name].max()]
        if len(at) <= HISTORY:
            kept.append(at)
            continue
        steps, step_at = np.unique(rows["step"][at], return_inverse=True)
        at = at[step_at % max(1, len(steps) // HISTORY) == 0]
        for rank in np.unique(rows["rank"][at]):  # it may have logged several values in one step
            of_rank = at[rows["rank"][at] == rank]
            kept += [of_rank[:: max(1, len(of_rank) // HISTORY)], of_rank[-1:]]
    return rows[np.unique(np.concatenate(kept))][-LARGEST_HISTORY:] if kept else rows
