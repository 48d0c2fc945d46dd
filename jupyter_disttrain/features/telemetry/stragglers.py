"""Find the rank that keeps the others waiting.

Covers: comparing ranks by the time that each takes by itself.
Does not cover: measuring (``features.telemetry.rank.sampler``), rates (``rank_figures``).

Ranks that train together have equal speed, because each waits for the slowest. They differ in the time they do not
wait: a rank's own time per step is its time per step less the fraction in which it was observed waiting for others.
"""

from __future__ import annotations

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


def find_straggler(rates: Mapping[int, Rates]) -> str:
    """Return a text on the rank that keeps the others waiting; empty if none does, or too little is known."""
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
