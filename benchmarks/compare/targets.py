"""Define the rows of the comparison and their targets.

Covers: titles of the rows, targets by number of ranks, whether a result meets its target.
Does not cover: measuring (measures), the tables (report).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.lib.stats import Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Upper limits, as a ratio to the baseline or in the unit of the row."""

    limit: float
    stretch: float  # the limit of the stretch target
    is_ratio: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table, with its target for each number of ranks (0: for all others)."""

    title: str
    targets: dict[int, Target] = field(default_factory=dict)

    def target(self, ranks: int) -> Target | None:
        return self.targets.get(ranks, self.targets.get(0))


def _ratio(limit: float, stretch: float) -> Target:
    return Target(limit=limit, stretch=stretch, is_ratio=True)


ROWS: dict[str, Row] = {
    "start": Row(
        "`%dist_init` until the first all_reduce is done",
        {2: _ratio(0.8, 0.6), 4: _ratio(0.6, 0.45), 8: _ratio(0.45, 0.3)},
    ),
    "reset": Row("`%dist_reset` until the first all_reduce is done", {0: _ratio(0.15, 0.1)}),
    "death": Row("kill -9 of a rank until the next all_reduce is done", {0: Target(limit=0.4, stretch=0.2)}),
    "script": Row("`%dist_run` of a script with one all_reduce", {0: _ratio(0.1, 0.05)}),
    "load": Row("`%load_ext`, before that"),
    "pass": Row("`pass` on all ranks, until idle", {2: _ratio(2.5, 2.0), 4: _ratio(4.0, 3.0)}),
    "many_ranks": Row("`pass` on ranks without torch", {64: Target(limit=0.120, stretch=0.060)}),
    "first_line": Row("first printed line is visible", {0: Target(limit=0.060, stretch=0.020)}),
    "lines": Row("10,000 lines per rank, complete and labelled", {4: Target(limit=0.4, stretch=0.2)}),
    "pull": Row("100 MB tensor, rank 0 to notebook", {0: Target(limit=0.25, stretch=0.1)}),
    "push": Row("100 MB array, notebook to all ranks", {4: Target(limit=0.5, stretch=0.2)}),
    "loop_mlp": Row("DDP loop, MLP, 200 steps", {0: _ratio(1.02, 1.0)}),
    "loop_cnn": Row("DDP loop, CNN, 200 steps", {0: _ratio(1.02, 1.0)}),
    "rank_memory": Row("memory of an idle rank, PSS", {0: _ratio(0.65, 0.5)}),
    "rank_private": Row("memory of an idle rank, private pages"),
    "helpers": Row("processes other than ranks, total PSS"),
    "idle_cpu": Row("idle session, processor time of all processes"),
    "notebook": Row("growth of the notebook's process", {0: Target(limit=60, stretch=40)}),
}


def verdict(measurement: Measurement) -> str:
    """Return the target that the median meets: ``stretch``, ``yes``, ``no``, or a dash if the row has no target."""
    target = ROWS[measurement.measure].target(measurement.ranks)
    if target is None:
        return "-"
    value = measurement.ratio if target.is_ratio else measurement.median
    imports_torch = measurement.measure == "notebook" and "not imported" not in measurement.note
    if value is None or measurement.problem or imports_torch or value > target.limit:
        return "no"
    return "stretch" if value <= target.stretch else "yes"
