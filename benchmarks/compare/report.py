"""Write the results of a comparison as Markdown tables and as JSON.

Covers: the header, the table with targets, the table of all tools, problems and notes.
Does not cover: the measurements (measures), the targets (targets).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks.lib.table import bullets, format_amount, markdown_table, page
from benchmarks.lib.tools import DISTTRAIN

from .targets import ROWS, Target, verdict

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.lib.stats import Measurement

    from .plan import Plan


def _limits(target: Target | None, unit: str) -> tuple[str, str]:
    """Return the limit and the stretch limit of a target."""
    if target is None:
        return "-", "-"
    limits = (target.limit, target.stretch)
    limit, stretch = (f"{value:g}x" if target.is_ratio else format_amount(value, unit) for value in limits)
    return limit, stretch


def _ordered(measurements: Sequence[Measurement]) -> list[Measurement]:
    order = list(ROWS)
    return sorted(measurements, key=lambda each: (order.index(each.measure), each.ranks))


def _baseline(measurement: Measurement | None) -> str:
    if measurement is None or not measurement.baseline:
        return "-"
    return f"{format_amount(measurement.baseline_median, measurement.unit)} ({measurement.baseline_name})"


def _targets_table(measurements: Sequence[Measurement]) -> list[str]:
    rows = []
    for each in _ordered(measurements):
        row = ROWS[each.measure]
        rows.append(
            [
                row.title,
                str(each.ranks),
                _baseline(each),
                format_amount(each.median, each.unit),
                format_amount(each.p95, each.unit) if len(each.values) > 1 else "-",
                "-" if each.ratio is None else f"{each.ratio:.2f}x",
                *_limits(row.target(each.ranks), each.unit),
                verdict(each),
            ]
        )
    head = ("measure", "N", "baseline", "median", "p95", "ratio", "target", "stretch target", "met")
    return markdown_table(head, rows)


def _tools_table(measurements: Sequence[Measurement], peers: Sequence[str]) -> list[str]:
    by_row = {(each.measure, each.ranks, each.tool): each for each in measurements}
    rows = []
    for measure, ranks in dict.fromkeys((each.measure, each.ranks) for each in _ordered(measurements)):
        found = [by_row.get((measure, ranks, name)) for name in (DISTTRAIN, *peers)]
        cells = [
            "-" if each is None else format_amount(each.median, each.unit) + ("*" if each.problem else "")
            for each in found
        ]
        baseline = _baseline(next((each for each in found if each is not None and each.baseline), None))
        rows.append([ROWS[measure].title, str(ranks), *cells, baseline])
    return markdown_table(("measure", "N", DISTTRAIN, *peers, "baseline"), rows)


def _notes(measurements: Sequence[Measurement]) -> list[str]:
    """List problems and notes; the same text for several numbers of ranks is one line."""
    by_text: dict[tuple[str, str, str], list[int]] = {}
    for each in _ordered(measurements):
        for text in filter(None, (each.problem and f"**{each.problem}**", each.note)):
            by_text.setdefault((each.tool, ROWS[each.measure].title, text), []).append(each.ranks)
    return bullets(
        f"{tool}, {title}, N={', '.join(map(str, ranks))}: {text}" for (tool, title, text), ranks in by_text.items()
    )


def write(
    path: Path, plan: Plan, facts: Sequence[str], measurements: Sequence[Measurement], missing: dict[str, str]
) -> str:
    """Write Markdown to ``path`` and JSON beside it; return the Markdown."""
    peers = list(dict.fromkeys(each.tool for each in measurements if each.tool != DISTTRAIN))
    repetitions = (
        f"repetitions: {plan.starts} starts, {plan.passes} passes ({plan.many_passes} with {plan.many_ranks} ranks), "
        f"{plan.first_lines} first lines, {plan.floods} floods, {plan.transfers} transfers, {plan.loops} loops "
        f"({plan.peer_loops} for a peer), alternating with the baseline"
    )
    threads = ", ".join(f"{plan.environment(n)['OMP_NUM_THREADS']} at N={n}" for n in plan.ranks)
    same = f"OMP_NUM_THREADS of every tool and of torchrun: {threads}"
    lines = ["## Compared with the baselines", ""]
    lines += _targets_table([each for each in measurements if each.tool == DISTTRAIN])
    if peers or missing:
        lines += ["", "## Compared with other tools (medians; * see notes)", "", *_tools_table(measurements, peers)]
        lines += ["", *bullets(f"{name} is not included: {reason}" for name, reason in missing.items())]
    lines += ["", "## Notes", "", *_notes(measurements), ""]
    text = page("Comparison", (*facts, repetitions, same), lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    raw = {"facts": list(facts), "measurements": [each.as_dict() for each in measurements], "missing": missing}
    path.with_suffix(".json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
    return text
