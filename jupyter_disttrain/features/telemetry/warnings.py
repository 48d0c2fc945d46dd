"""Report problems with metrics and speed to the user while a cell runs.

Covers: a metric that became NaN, a rank that keeps the others waiting, the progress of a loop.
Does not cover: hangs (``client.recovery.hang_detection``), drawing (``notebook.output.renderer``).
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...protocol.ranks import label_ranks
from ...protocol.time_limits import STRAGGLER_SECONDS
from .stragglers import find_straggler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Set as AbstractSet

    from ...protocol.messages import RankVitals
    from ...protocol.metric_blocks import Sample, Samples
    from .rank_figures import RankFigures

MINUTE, HOUR = 60.0, 3600.0


class _Last(NamedTuple):
    """The last value of a metric on a rank that was not NaN."""

    cell: int | None
    step: int | None
    value: float


@dataclass(frozen=True, slots=True)
class _Nan:
    """A metric that a cell has logged as NaN."""

    name: str
    steps: dict[int, int | None]  # by rank: the first step at which it was NaN
    before: _Last | None  # last value before, on the rank that reported NaN first

    def __str__(self) -> str:
        """Return the remark for the user."""
        step = next(iter(self.steps.values()))
        at = "" if step is None else f" at step {step}"
        was = "" if self.before is None else f"; before that it was {self.before.value:.4g}"
        if self.before is not None and self.before.step is not None:
            was += f" (step {self.before.step})"
        return f"{self.name} is NaN on {label_ranks(self.steps)}{at}{was}"


class Remarks:
    """Watch the metrics and figures that ranks report.

    Parameters
    ----------
    figures
        Returns the current figures of each rank.
    """

    def __init__(self, figures: Callable[[], Mapping[int, RankFigures]]) -> None:
        self._figures = figures
        self._lock = threading.Lock()
        self._last: dict[tuple[int, str], _Last] = {}  # by rank and metric: the last value that was not NaN
        self.of_job: Callable[[], list[str]] = list  # returns remarks on the Slurm job that the ranks run in
        self._nan: dict[int | None, dict[str, _Nan]] = {}  # by cell and metric

    def take(self, rank: int, samples: Samples) -> None:
        """Check the values that a rank has logged."""
        with self._lock:
            for block in samples.blocks:
                matrix = block.matrix
                rows = block.rows() if np.isnan(matrix[:, 2:]).any() else _last_row(block.names, matrix)
                for _time_s, step, values in rows:
                    self._check(rank, samples.cell, step, values)
            for cell in list(self._nan)[:-10]:
                del self._nan[cell]  # old cells are not queried any more

    def _check(self, rank: int, cell: int | None, step: int | None, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if not math.isnan(value):
                self._last[rank, name] = _Last(cell, step, value)
                continue
            found = self._nan.setdefault(cell, {})
            if name not in found:
                last = self._last.get((rank, name))
                found[name] = _Nan(name, {}, last if last is not None and last.cell == cell else None)
            found[name].steps.setdefault(rank, step)

    def of_values(self, cell: int) -> list[str]:
        """Return remarks on a cell's metrics."""
        with self._lock:
            return [str(found) for found in self._nan.get(cell, {}).values()]

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
        found = find_straggler(rates) if rates.keys() == running else None
        return [] if found is None else [str(found)]

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


def _last_row(names: tuple[str, ...], matrix: np.ndarray) -> list[Sample]:
    """Return the last sample of a block in a list, which is empty if the block is."""
    return [
        (time_s, None if math.isnan(step) else int(step), dict(zip(names, values, strict=True)))
        for time_s, step, *values in matrix[-1:].tolist()
    ]


def duration(seconds: float) -> str:
    """Format a duration for the user."""
    if seconds < 2 * MINUTE:
        return f"{seconds:.0f} s"
    return f"{seconds / MINUTE:.0f} min" if seconds < 2 * HOUR else f"{seconds / HOUR:.1f} h"
