"""Report problems with metrics and speed to the user while a cell runs.

Covers: a metric that became NaN, a rank that keeps the others waiting, the progress of a loop.
Does not cover: hangs (``client.recovery.hang_explanation``), measuring (``features.telemetry.rank.sampler``).
"""

from __future__ import annotations

import threading
from statistics import median
from typing import TYPE_CHECKING

from ...protocol.metric_blocks import NO_STEP
from ...protocol.ranks import label_ranks
from ...protocol.time_limits import STRAGGLER_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Set as AbstractSet

    import numpy as np

    from ...protocol.messages import RankVitals
    from .metrics_table import MetricsTable
    from .rank_figures import RankFigures, Rates

MINUTE, HOUR = 60.0, 3600.0
SLOWER = 1.25  # own time relative to the others' median from which a rank is reported
WAITED = 0.1  # least fraction of the others' time that has to be lost
WAITS_ALL_THE_TIME = 0.95
KEPT_CELLS = 10  # last cells whose NaN is reported
FEWEST_CHECKS = 50  # fewest observations for a fraction of the time: it is then known to some 0.07


class Remarks:
    """Derive remarks from figures and metrics of ranks; ``metrics`` returns None until a value has arrived."""

    def __init__(
        self, figures: Callable[[], Mapping[int, RankFigures]], metrics: Callable[[], MetricsTable | None]
    ) -> None:
        self.of_job: Callable[[], list[str]] = list  # returns remarks on the Slurm job that the ranks run in
        self._figures = figures
        self._metrics = metrics
        self._lock = threading.Lock()
        self._mark = 0  # in the metrics: rows that were searched
        # By cell and metric: the ranks that have logged NaN, and the remark without them.
        self._nan: dict[int, dict[int, tuple[set[int], str]]] = {}

    def of_values(self, cell: int) -> list[str]:
        """Return remarks on a cell's metrics."""
        metrics = self._metrics()
        if metrics is None:
            return []
        with self._lock:
            self._mark, rows = metrics.since(self._mark)
            self._find_nan(metrics, rows)
            names = metrics.names
            found = self._nan.get(cell, {}).items()
            return [f"{names[name]} is NaN on {label_ranks(ranks)}{text}" for name, (ranks, text) in found]

    def _find_nan(self, metrics: MetricsTable, rows: np.ndarray) -> None:
        """Find the first NaN of each cell, name and rank."""
        import numpy as np  # noqa: PLC0415  (without metrics a notebook doesn't need it)

        rows = rows[np.isnan(rows["value"])]
        rows = rows[np.isin(rows["cell"], np.unique(rows["cell"])[-KEPT_CELLS:])]
        key = (rows["cell"].astype("i8") << 40) + (rows["name"].astype("i8") << 16) + rows["rank"]
        _, first = np.unique(key, return_index=True)
        for row in rows[np.sort(first)]:
            of_cell, name = self._nan.setdefault(int(row["cell"]), {}), int(row["name"])
            if name not in of_cell:
                of_cell[name] = set(), _nan_text(metrics, row)
            of_cell[name][0].add(int(row["rank"]))
        for cell in sorted(self._nan)[:-KEPT_CELLS]:
            del self._nan[cell]  # old cells are not queried any more

    def of_running(self, running: AbstractSet[int]) -> list[str]:
        """Return remarks on the cells that ranks run now."""
        ranks = self._figures()
        cells = {ranks[rank].vitals.cell for rank in running if rank in ranks} - {None}
        values = [text for cell in sorted(filter(None, cells)) for text in self.of_values(cell)]
        return self.of_job() + values + (self.of_speed(running) if running else [])

    @property
    def vitals(self) -> dict[int, RankVitals]:
        """The latest figures of each rank."""
        return {rank: figures.vitals for rank, figures in sorted(self._figures().items())}

    def of_speed(self, running: AbstractSet[int]) -> list[str]:
        """Return remarks on the speed of ranks that run a cell."""
        rates = {
            rank: rates
            for rank, figures in self._figures().items()
            if rank in running and (rates := figures.rates(STRAGGLER_SECONDS)) is not None
        }
        return list(filter(None, [find_straggler(rates)])) if rates.keys() == running else []

    def of_progress(self, running: AbstractSet[int], cell: int | None = None) -> str:
        """Return the progress of the loop that the ranks run, on the slowest of them; empty if it is unknown.

        Ranks may report different loops, e.g. where only rank 0 shows a progress bar: then the first rank's loop
        counts. ``cell``: the number of the cell, None for any.
        """
        loops = [figures.vitals for rank, figures in self._figures().items() if rank in running]
        loops = [each for each in loops if each.total and cell in (None, each.cell)]
        if not loops:
            return ""
        slowest = max(
            (each for each in loops if each.total == loops[0].total), key=lambda each: (each.left_s or 0.0, -each.done)
        )
        left = "" if slowest.left_s is None else f", {duration(slowest.left_s)} left in this loop"
        return f"{slowest.done:,} of {slowest.total:,}{left}"


def _nan_text(metrics: MetricsTable, row: np.void) -> str:
    """Return the step at which a rank logged NaN, and its last value before."""
    last = metrics.last_number_before(row)
    was = "" if last is None else f"; before that it was {last['value']:.4g}"
    if last is not None and last["step"] != NO_STEP:
        was += f" (step {last['step']})"
    return was if row["step"] == NO_STEP else f" at step {row['step']}{was}"


def duration(seconds: float) -> str:
    """Format a duration for the user."""
    if seconds < 2 * MINUTE:
        return f"{seconds:.0f} s"
    return f"{seconds / MINUTE:.0f} min" if seconds < 2 * HOUR else f"{seconds / HOUR:.1f} h"


def find_straggler(rates: Mapping[int, Rates]) -> str:
    """Return a text on the rank that keeps the others waiting; empty if none does, or too little is known.

    Ranks that train together have equal speed, because each waits for the slowest. They differ in the time they do not
    wait: a rank's own time per step is its time per step less the fraction in which it was observed waiting for others.
    """
    # The fraction of its time in which a rank did not wait for others.
    own = {
        rank: 1 - each.waiting
        for rank, each in rates.items()
        if each.waiting is not None and each.checks >= FEWEST_CHECKS
    }
    if len(own) < 2 or len(own) < len(rates):  # noqa: PLR2004
        return ""
    slow = max(own, key=lambda rank: own[rank])
    others = sorted(own.keys() - {slow})
    others_own = median(own[rank] for rank in others)
    if own[slow] < SLOWER * others_own or 1 - others_own < WAITED or own[slow] - others_own < WAITED:
        return ""
    if all(rates[rank].steps for rank in own):
        own_s = {rank: own[rank] * rates[rank].seconds / rates[rank].steps for rank in own}
        others_s = median(own_s[rank] for rank in others)
        what = f"takes {own_s[slow]:.3g} s a step by itself, {label_ranks(others)} {others_s:.3g} s"
    elif min(own[rank] for rank in others) < 1 - WAITS_ALL_THE_TIME:
        return ""  # they may wait forever, which is reported as a hang
    else:
        what = f"works {own[slow]:.0%} of the time by itself, {label_ranks(others)} {others_own:.0%}"
    by_data = rates[slow].waiting_for_data or 0.0
    others_by_data = median(rates[rank].waiting_for_data or 0.0 for rank in others)
    data = f"; {by_data:.0%} of its time it waits for data" if by_data > others_by_data + WAITED else ""
    return f"rank {slow} is slower than the others: it {what}, and they wait for it{data}"
