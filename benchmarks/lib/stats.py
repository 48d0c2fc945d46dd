"""Summarize repeated measurements.

Covers: medians, percentiles, the record of one measure.
Does not cover: how results are shown (table, compare.report).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile, which is always one of the values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The values of one measure for one tool, with the baseline of the same run."""

    measure: str
    tool: str
    ranks: int
    unit: str  # "s", "MB" or "%"
    values: tuple[float, ...] = ()
    baseline: tuple[float, ...] = ()
    baseline_name: str = ""
    note: str = ""
    problem: str = ""  # why there is no value, or what is wrong with it

    @property
    def median(self) -> float | None:
        return median(self.values) if self.values else None

    @property
    def p95(self) -> float | None:
        return percentile(self.values, 95) if self.values else None

    @property
    def baseline_median(self) -> float | None:
        return median(self.baseline) if self.baseline else None

    @property
    def ratio(self) -> float | None:
        value, baseline = self.median, self.baseline_median
        return value / baseline if value is not None and baseline else None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)
