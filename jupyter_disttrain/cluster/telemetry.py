"""What the ranks tell of themselves over time.

Covers: the values of ``log_metrics``, by rank.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from ..messages import Metrics

ROWS = 1_000_000  # kept; the oldest go first, or a session of days would fill the notebook's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One value that one rank logged."""

    rank: int
    time_s: float  # seconds since the epoch, on the rank
    step: int | None
    name: str
    value: float


class MetricsTable:
    """The last million values that were logged, in the order of arrival."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: deque[Metric] = deque(maxlen=ROWS)
        self.dropped = 0  # samples that came faster than a rank could send them

    def add(self, rank: int, content: dict[str, Any]) -> None:
        """Take a rank's message."""
        record = Metrics.from_content(content)
        rows = [
            # JSON has no NaN and no infinity, so they arrive as text.
            Metric(rank=rank, time_s=time_s, step=step, name=name, value=float(value))
            for time_s, step, values in record.samples
            for name, value in values.items()
        ]
        with self._lock:
            self._rows += rows
            self.dropped += record.dropped

    def rows(self, name: str | None = None) -> list[Metric]:
        """Return the values of one metric, or of all."""
        with self._lock:
            return [row for row in self._rows if name is None or row.name == name]
