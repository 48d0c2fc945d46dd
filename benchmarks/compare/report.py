"""Write the figures as Markdown tables and as raw JSON.

Covers: the header, our table with aims, the peers' table, what went wrong.
Does not cover: the figures themselves.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from .targets import ROWS, Aim, verdict

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.lib.stats import Figures

    from .plan import Plan

OURS = "jupyter_disttrain"


def amount(value: float | None, unit: str) -> str:
    """Write a figure with three digits and a unit that suits it."""
    if value is None:
        return "-"
    if unit == "s" and abs(value) < 1:
        value, unit = value * 1000, "ms"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f} {unit}"


def _aim(aim: Aim | None, which: str, unit: str) -> str:
    if aim is None:
        return "-"
    value = getattr(aim, which)
    return f"{value:g}x" if aim.ratio else amount(value, unit)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def _ordered(figures: Sequence[Figures]) -> list[Figures]:
    order = list(ROWS)
    return sorted(figures, key=lambda f: (order.index(f.measure), f.ranks))


def _our_table(figures: Sequence[Figures]) -> list[str]:
    head = ("measure", "N", "yardstick", "median", "p95", "ratio", "reach", "dream", "met")
    rows = []
    for f in _ordered(figures):
        aim = ROWS[f.measure].aim(f.ranks)
        beside = f"{amount(f.yardstick_median, f.unit)} ({f.yardstick_name})" if f.yardstick else "-"
        ratio = "-" if f.ratio is None else f"{f.ratio:.2f}x"
        aims = (_aim(aim, "reach", f.unit), _aim(aim, "dream", f.unit))
        measured = (amount(f.median, f.unit), amount(f.p95, f.unit) if len(f.values) > 1 else "-")
        rows.append([ROWS[f.measure].title, str(f.ranks), beside, *measured, ratio, *aims, verdict(f)])
    return _table(head, rows)


def _peers_table(figures: Sequence[Figures], peers: Sequence[str]) -> list[str]:
    medians = {(f.measure, f.ranks, f.arm): f for f in figures}
    rows = []
    for measure, ranks in dict.fromkeys((f.measure, f.ranks) for f in _ordered(figures)):
        found = [medians.get((measure, ranks, name)) for name in (OURS, *peers)]
        cells = ["-" if f is None else amount(f.median, f.unit) + ("*" if f.problem else "") for f in found]
        beside = next((f for f in found if f is not None and f.yardstick), None)
        cells.append(
            "-" if beside is None else f"{amount(beside.yardstick_median, beside.unit)} ({beside.yardstick_name})"
        )
        rows.append([ROWS[measure].title, str(ranks), *cells])
    return _table(("measure", "N", OURS, *peers, "yardstick"), rows)


def _remarks(figures: Sequence[Figures]) -> list[str]:
    """List what is wrong with a figure, or explains it; the same words about several N are said once."""
    said: dict[tuple[str, str, str], list[int]] = {}
    for f in _ordered(figures):
        for text in filter(None, (f.problem and f"**{f.problem}**", f.note)):
            said.setdefault((f.arm, ROWS[f.measure].title, text), []).append(f.ranks)
    return [f"- {arm}, {title}, N={', '.join(map(str, ranks))}: {text}" for (arm, title, text), ranks in said.items()]


def write(path: Path, plan: Plan, facts: Sequence[str], figures: Sequence[Figures], missing: dict[str, str]) -> str:
    """Write the Markdown to ``path`` and the raw figures beside it; return the Markdown."""
    peers = list(dict.fromkeys(f.arm for f in figures if f.arm != OURS))
    repeated = (
        f"repetitions: {plan.starts} starts, {plan.passes} passes ({plan.many_passes} with {plan.many_ranks} ranks), "
        f"{plan.first_lines} first lines, {plan.floods} floods, {plan.transfers} transfers, {plan.loops} loops "
        f"({plan.peer_loops} for a peer); each in turns with its yardstick"
    )
    threads = ", ".join(f"{plan.environment(n)['OMP_NUM_THREADS']} at N={n}" for n in plan.ranks)
    alike = f"OMP_NUM_THREADS, the same for every contender and torchrun: {threads}"
    lines = ["# Figures", "", *(f"- {fact}" for fact in (*facts, repeated, alike)), "", "## Beside the yardsticks", ""]
    lines += _our_table([f for f in figures if f.arm == OURS])
    if peers or missing:
        lines += ["", "## Beside the peers (medians; * see remarks)", "", *_peers_table(figures, peers), ""]
        lines += [f"- {name} was left out: {why}" for name, why in missing.items()]
    lines += ["", "## Remarks", "", *_remarks(figures), ""]
    text = "\n".join(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    raw = {"facts": list(facts), "figures": [f.as_dict() for f in figures], "missing": missing}
    path.with_suffix(".json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
    return text
