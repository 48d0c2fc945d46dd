"""What a person should be told of metrics and speed while a cell runs.

Covers: a metric that became NaN, a rank that keeps the others waiting.
Does not cover: hangs (``hang``), drawing (``notebook.screen``).
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

from .stragglers import find_straggler

if TYPE_CHECKING:
    from ..messages import Metrics
    from .telemetry import Telemetry

STRAGGLER_SECONDS = 15.0  # over which ranks are compared


class Remarks:
    """Watch what ranks tell."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._lock = threading.Lock()
        self._last: dict[tuple[int, str], tuple[int | None, float]] = {}  # by rank and metric: the last number
        self._nan: dict[int | None, dict[str, str]] = {}  # by cell and metric: what is said of it

    def take(self, rank: int, record: Metrics) -> None:
        """Look at the values that a rank has logged."""
        with self._lock:
            for _time_s, step, values in record.samples:
                for name, value in values.items():
                    number = float(value)
                    if not math.isnan(number):
                        self._last[rank, name] = step, number
                        continue
                    said = self._nan.setdefault(record.cell, {})
                    if name not in said:
                        said[name] = _say_nan(rank, name, step, self._last.get((rank, name)))
            for cell in list(self._nan)[:-10]:
                del self._nan[cell]  # nobody asks for cells of long ago

    def of_values(self, cell: int) -> list[str]:
        """Return what is to be said of a cell's metrics."""
        with self._lock:
            return list(self._nan.get(cell, {}).values())

    def of_running(self, running: set[int]) -> list[str]:
        """Return what is to be said of the cells that ranks run now."""
        ranks = self._telemetry.ranks
        cells = {ranks[rank].vitals.cell for rank in running if rank in ranks} - {None}
        values = [words for cell in sorted(filter(None, cells)) for words in self.of_values(cell)]
        return values + (self.of_speed(running) if running else [])

    def of_speed(self, running: set[int]) -> list[str]:
        """Return what is to be said of the ranks that run a cell."""
        rates = {
            rank: rates
            for rank, figures in self._telemetry.ranks.items()
            if rank in running and (rates := figures.rates(STRAGGLER_SECONDS)) is not None
        }
        found = find_straggler(rates) if rates.keys() == running else None
        return [] if found is None else [str(found)]


def _say_nan(rank: int, name: str, step: int | None, before: tuple[int | None, float] | None) -> str:
    at = "" if step is None else f" at step {step}"
    was = "" if before is None else f"; before that it was {before[1]:.4g}"
    if before is not None and before[0] is not None:
        was += f" (step {before[0]})"
    return f"{name} is NaN on rank {rank}{at}{was}"
