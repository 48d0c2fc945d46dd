"""From %dist_init to the first all_reduce, and from torchrun to its first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.compare import torchrun
from benchmarks.lib.kernel import KernelProblem
from benchmarks.lib.session import Session
from benchmarks.lib.stats import Figures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.compare.plan import Plan
    from benchmarks.lib.tools import Arm

_GIVE_UP_AFTER = 2  # starts that failed, each after minutes perhaps


def starts(arms: Sequence[Arm], ranks: int, plan: Plan) -> list[Figures]:
    """Start torchrun and every arm in turns, each time from nothing."""
    environment = plan.environment(ranks)
    torchrun_s: list[float] = []
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    loads: dict[str, list[float]] = {arm.name: [] for arm in arms}
    problems: dict[str, list[str]] = {arm.name: [] for arm in arms}
    for _ in range(plan.starts):
        torchrun_s.append(torchrun.seconds_to_first_all_reduce(ranks, environment))
        for arm in arms:
            if len(problems[arm.name]) < _GIVE_UP_AFTER:
                problems[arm.name] += _one_start(arm, ranks, environment, (seconds[arm.name], loads[arm.name]))
    figures = []
    for arm in arms:
        failed = problems[arm.name]
        common = Figures(
            measure="load",
            arm=arm.name,
            ranks=ranks,
            unit="s",
            values=tuple(loads[arm.name]),
            problem=f"{len(failed)} starts failed: {failed[-1]}" if failed else "",
        )
        start = replace(
            common,
            measure="start",
            values=tuple(seconds[arm.name]),
            yardstick=tuple(torchrun_s),
            yardstick_name="torchrun",
            note="the kernel's own start is included" if arm.start_includes_kernel else "",
        )
        figures += [start, common] if arm.load_cells() else [start]
    return figures


def _one_start(arm: Arm, ranks: int, environment: dict[str, str], into: tuple[list[float], list[float]]) -> list[str]:
    """Add the seconds of one start and of the loading before it; return why there are none, if so."""
    try:
        with Session(arm, ranks, environment) as session:
            into[0].append(session.start_s)
            into[1].append(session.load_s)
    except KernelProblem as problem:
        return [str(problem)]
    return []
