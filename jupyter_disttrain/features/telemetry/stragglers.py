"""Find the rank that keeps the others waiting.

Covers: comparing ranks by the time that each takes by itself.
Does not cover: measuring (``features.telemetry.rank.sampler``), rates (``rank_figures``).

Ranks that train together have equal speed, because each waits for the slowest. They differ in the time they do not
wait: a rank's own time per step is its time per step less the fraction in which it was observed waiting for others.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ...protocol.ranks import label_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .rank_figures import Rates

SLOWER = 1.25  # own time relative to the others' median from which a rank is reported
WAITED = 0.1  # least fraction of the others' time that has to be lost
WAITS_ALL_THE_TIME = 0.95
FEWEST_CHECKS = 50  # fewest observations for a fraction of the time: it is then known to some 0.07


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is slower than the others by its own time."""

    rank: int
    others: tuple[int, ...]
    own_s: float | None  # seconds per step; None where no steps are counted
    others_own_s: float | None  # the median over the others
    own: float  # the fraction of its time in which it did not wait for others
    others_own: float
    waiting_for_data: float | None  # fraction of its time

    def __str__(self) -> str:
        """Return the comparison with figures, as a sentence."""
        others = label_ranks(self.others)
        if self.own_s is None or self.others_own_s is None:
            what = f"works {self.own:.0%} of the time by itself, {others} {self.others_own:.0%}"
        else:
            what = f"takes {self.own_s:.3g} s a step by itself, {others} {self.others_own_s:.3g} s"
        data = f"; {self.waiting_for_data:.0%} of its time it waits for data" if self.waiting_for_data else ""
        return f"rank {self.rank} is slower than the others: it {what}, and they wait for it{data}"


def find_straggler(rates: Mapping[int, Rates]) -> Straggler | None:
    """Return the rank that keeps the others waiting; None if none does, or too little is known.

    Parameters
    ----------
    rates
        By rank, over the same seconds.
    """
    own = {
        rank: 1 - each.waiting
        for rank, each in rates.items()
        if each.waiting is not None and each.checks >= FEWEST_CHECKS
    }
    if len(own) < 2 or len(own) < len(rates):  # noqa: PLR2004
        return None
    rank = max(own, key=lambda each: own[each])
    others = tuple(sorted(own.keys() - {rank}))
    others_own = median(own[each] for each in others)
    if own[rank] < SLOWER * others_own or 1 - others_own < WAITED or own[rank] - others_own < WAITED:
        return None
    has_steps = all(rates[each].steps for each in own)
    if not has_steps and max(rates[each].waiting or 0.0 for each in others) > WAITS_ALL_THE_TIME:
        return None  # they may wait forever, which is reported as a hang
    by_data = rates[rank].waiting_for_data
    others_by_data = median(rates[each].waiting_for_data or 0.0 for each in others)
    return Straggler(
        rank=rank,
        others=others,
        own_s=own[rank] * rates[rank].seconds / rates[rank].steps if has_steps else None,
        others_own_s=median(own[each] * rates[each].seconds / rates[each].steps for each in others)
        if has_steps
        else None,
        own=own[rank],
        others_own=others_own,
        waiting_for_data=by_data if by_data is not None and by_data > others_by_data + WAITED else None,
    )
