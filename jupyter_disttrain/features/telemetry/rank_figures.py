"""Keep the figures of one rank, and compute its speed.

Covers: the last ten minutes of figures; steps and samples per second, the fractions of time spent waiting.
Does not cover: measuring (``features.telemetry.rank.sampler``), the figures of all ranks (``client``), comparing ranks
(``warnings``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...protocol.time_limits import RATE_SECONDS

if TYPE_CHECKING:
    from ...protocol.messages import RankVitals

KEPT = 600  # figures kept per rank: ten minutes at one a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Speed of a rank between two of its figures; None where there is nothing to count."""

    seconds: float  # between the two figures
    steps: int
    steps_per_s: float | None
    samples_per_s: float | None
    waiting: float | None  # fraction of the time spent waiting for other ranks, 0 to 1
    waiting_for_data: float | None  # fraction of the time spent waiting for data, 0 to 1
    checks: int  # number of observations behind ``waiting``


def rates_between(earlier: RankVitals, later: RankVitals) -> Rates | None:
    """Return a rank's speed between two figures; None if they have the same time, or are of two processes."""
    seconds = later.beat_s - earlier.beat_s
    steps, samples = later.steps - earlier.steps, later.samples - earlier.samples
    checks = later.checks - earlier.checks
    if seconds <= 0 or min(steps, samples, checks) < 0:
        return None
    waited_for_data = later.data_wait_s - earlier.data_wait_s
    return Rates(
        seconds=seconds,
        steps=steps,
        steps_per_s=steps / seconds if steps else None,
        samples_per_s=samples / seconds if samples else None,
        waiting=(later.waits - earlier.waits) / checks if checks else None,
        waiting_for_data=min(1.0, waited_for_data / seconds) if samples else None,
        checks=later.seen - earlier.seen,
    )


@dataclass(slots=True)
class RankFigures:
    """The latest figures of one rank, and its history."""

    vitals: RankVitals
    arrived: float  # arrival time, by ``time.monotonic`` of this process
    history: deque[RankVitals] = field(default_factory=lambda: deque(maxlen=KEPT))

    def rates(self, seconds: float = RATE_SECONDS) -> Rates | None:
        """Return the speed in the last seconds of the running cell; None if no cell runs."""
        if not self.history or self.vitals.cell is None:
            return None
        last = earlier = self.vitals
        for each in reversed(tuple(self.history)):
            if each.cell != last.cell or last.beat_s - earlier.beat_s >= seconds:
                break
            earlier = each
        return rates_between(earlier, last)
