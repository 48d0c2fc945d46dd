"""Summarize a campaign as Markdown."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from benchmarks.lib.stats import percentile
from benchmarks.lib.table import bullets, markdown_table

from .campaign import FAULTS
from .round import GRACE_S

if TYPE_CHECKING:
    from .campaign import Campaign

TITLE = "Fault campaign"
GRACE_FACT = f"the times of raise and sys.exit include {GRACE_S:g} s of grace"


def summary(campaign: Campaign, seed: int) -> list[str]:
    """Return the totals, a table by fault, and every problem."""
    rounds = campaign.rounds
    lost = [each for each in rounds if each.lost]
    damaged = [each for each in rounds if each.damaged]
    unreported = sum(not each.damage_reported for each in damaged)
    times = [each.recovery_s for each in rounds if each.recovery_s is not None]
    recovery = f"{median(times):.2f} s (median), {percentile(times, 95):.2f} s (p95)" if times else "-"
    totals = f"{len(rounds)} rounds, {len(lost)} sessions lost, {sum(each.dropped for each in rounds)} cells dropped"
    counts = {
        "surviving ranks that lost their variables": sum(each.forgotten for each in rounds),
        "damaged ranks without a message": unreported,
        "damaged ranks with a message": len(damaged) - unreported,
        "calls that returned before the ranks ended": sum(each.returned_early for each in rounds),
        "cells that ended before their fault": sum(each.missed for each in rounds),
    }
    lines = [f"Seed {seed}: {totals}, recovered after {recovery}", ""]
    lines += [*bullets(f"{name}: {count}" for name, count in counts.items()), "", *_table_by_fault(campaign), ""]
    lines += bullets(f"lost: {each.fault} in {each.cell}: {each.lost}" for each in lost)
    lines += bullets(
        f"damaged{' (reported)' * each.damage_reported}: {each.fault} in {each.cell}: {each.damaged}"
        for each in damaged
    )
    leaks = bullets(f"leak: {leak}" for leak in campaign.leaks)
    return [*lines, *(leaks or ["- no process, thread or descriptor was left"])]


def _table_by_fault(campaign: Campaign) -> list[str]:
    rows = []
    for fault in FAULTS:
        rounds = [each for each in campaign.rounds if each.fault == fault]
        times = [each.recovery_s for each in rounds if each.recovery_s is not None]
        reported = [each.reported_s for each in rounds if each.reported_s is not None]
        if times:
            statistics = (median(times), percentile(times, 95), max(times))
            delay = f"{median(reported) * 1000:.0f} ms" if reported else "-"
            rows.append([fault, str(len(times)), *(f"{value:.2f} s" for value in statistics), delay])
    return markdown_table(("fault", "rounds", "median", "p95", "longest", "reported after (median)"), rows)
