"""Sum up repeated measurements.

Covers: medians, percentiles, the record of one measure.
Does not cover: how they are shown (``table``).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


def percentile(values: tuple[float, ...], percent: float) -> float:
    """Return the nearest-rank percentile, which is always one of the values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One contender's figures for one measure, with the yardstick of the same run."""

    measure: str
    arm: str
    ranks: int
    unit: str  # "s" or "MB"
    values: tuple[float, ...] = ()
    yardstick: tuple[float, ...] = ()
    yardstick_name: str = ""
    note: str = ""
    problem: str = ""  # why there is no figure, or what is wrong with it

    @property
    def median(self) -> float | None:
        return median(self.values) if self.values else None

    @property
    def p95(self) -> float | None:
        return percentile(self.values, 95) if self.values else None

    @property
    def yardstick_median(self) -> float | None:
        return median(self.yardstick) if self.yardstick else None

    @property
    def ratio(self) -> float | None:
        ours, theirs = self.median, self.yardstick_median
        return ours / theirs if ours is not None and theirs else None

    def as_dict(self) -> dict[str, Any]:
        """Return the raw figures as JSON takes them."""
        return asdict(self)
