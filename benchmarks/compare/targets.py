"""What is aimed at: the rows of the table with their reach and dream.

Covers: names of the rows, aims by number of ranks, whether a figure meets its aim.
Does not cover: measuring, drawing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.lib.stats import Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """Upper limits: a ratio to the yardstick, or an amount in the row's own unit."""

    reach: float
    dream: float
    ratio: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table, with its aim for each number of ranks (0: for all)."""

    title: str
    aims: dict[int, Aim] = field(default_factory=dict)

    def aim(self, ranks: int) -> Aim | None:
        return self.aims.get(ranks, self.aims.get(0))


def _ratio(reach: float, dream: float) -> Aim:
    return Aim(reach=reach, dream=dream, ratio=True)


ROWS: dict[str, Row] = {
    "start": Row("`%dist_init` until the first all_reduce is done", {0: _ratio(1.3, 1.0)}),
    "load": Row("`%load_ext`, before that"),
    "pass": Row("`pass` on all ranks, to idle", {2: _ratio(2.5, 2.0), 4: _ratio(4.0, 3.0)}),
    "many_ranks": Row("`pass` on ranks without torch", {64: Aim(reach=0.120, dream=0.060)}),
    "first_line": Row("first printed line, seen at the client", {0: Aim(reach=0.060, dream=0.020)}),
    "lines": Row("10,000 lines a rank, all there and labelled", {4: Aim(reach=0.4, dream=0.2)}),
    "pull": Row("100 MB tensor, rank 0 to notebook", {0: Aim(reach=0.25, dream=0.1)}),
    "push": Row("100 MB array, notebook to all ranks", {4: Aim(reach=0.5, dream=0.2)}),
    "loop_mlp": Row("DDP loop, MLP, 200 steps", {0: _ratio(1.02, 1.0)}),
    "loop_cnn": Row("DDP loop, CNN, 200 steps", {0: _ratio(1.02, 1.0)}),
    "rank_memory": Row("memory of an idle rank, PSS", {0: _ratio(1.15, 1.05)}),
    "rank_private": Row("memory of an idle rank, pages of its own"),
    "helpers": Row("processes beside the ranks, PSS together"),
    "idle_cpu": Row("idle session, processor time of all its processes"),
    "notebook": Row("notebook process, more than before", {0: Aim(reach=60, dream=40)}),
}


def verdict(figures: Figures) -> str:
    """Say which aim a row's median meets: ``dream``, ``reach``, ``no``, or a dash where none is set."""
    aim = ROWS[figures.measure].aim(figures.ranks)
    if aim is None:
        return "-"
    value = figures.ratio if aim.ratio else figures.median
    if value is None or figures.problem or (figures.measure == "notebook" and "not imported" not in figures.note):
        return "no"
    return "dream" if value <= aim.dream else "reach" if value <= aim.reach else "no"
