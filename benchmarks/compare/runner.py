"""Run the measures in order and keep going when a contender fails.

Covers: the order, sessions that are shared by several measures, time limits for each arm.
Does not cover: the command line, the tables.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import psutil

from benchmarks.lib.kernel import KernelProblem
from benchmarks.lib.session import Session
from benchmarks.lib.stats import Figures

from .measures import IN_SESSION
from .measures.cells import many_ranks
from .measures.memory import weigh
from .measures.start import starts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from benchmarks.lib.tools import Arm

    from .plan import Plan

_ROW = {"transfer": "pull", "loop": "loop_mlp", "memory": "rank_memory"}  # where a measure's failure is shown
# What may go wrong with a contender or a yardstick; anything else is a mistake in here and ends the run.
FAILURES = (KernelProblem, RuntimeError, OSError, psutil.Error)


def run(plan: Plan, arms: Sequence[Arm], only: Iterable[str]) -> list[Figures]:
    """Run the chosen measures with every arm, and return all figures."""
    chosen = set(only)
    figures: list[Figures] = []
    for ranks in plan.ranks:
        if "start" in chosen:
            figures += _tell(
                "start", ranks, partial(_guarded, "start", arms, partial(starts, arms, ranks, plan), ranks)
            )
        if "memory" in chosen:
            figures += _tell(
                "memory", ranks, partial(_guarded, "memory", arms, partial(weigh, arms, ranks, plan), ranks)
            )
        for arm in arms:
            figures += _shared_session(arm, ranks, plan, [name for name in IN_SESSION if name in chosen])
    if "many_ranks" in chosen:
        for arm in arms:
            if arm.has_ranks_without_torch():
                guarded = partial(_guarded, "many_ranks", [arm], partial(many_ranks, arm, plan), plan.many_ranks)
                figures += _tell("many_ranks", plan.many_ranks, guarded)
    return figures


def _tell(measure: str, ranks: int, work: Callable[[], list[Figures]]) -> list[Figures]:
    begun = time.monotonic()
    print(f"{measure}, N={ranks} ...", flush=True)
    figures = work()
    for f in figures:
        shown = "nothing" if f.median is None else f"{f.median:.4g} {f.unit}"
        beside = "" if f.ratio is None else f", {f.ratio:.2f}x {f.yardstick_name}"
        print(f"    {f.arm} {f.measure}: {shown}{beside} {f.problem}".rstrip(), flush=True)
    print(f"    took {time.monotonic() - begun:.0f} s", flush=True)
    return figures


def _guarded(measure: str, arms: Sequence[Arm], work: Callable[[], list[Figures]], ranks: int) -> list[Figures]:
    """Do the work, or say for each of the arms why it could not be done."""
    try:
        return work()
    except FAILURES as problem:
        return [_failed(measure, arm, ranks, str(problem)) for arm in arms]


def _failed(measure: str, arm: Arm, ranks: int, problem: str) -> Figures:
    return Figures(measure=_ROW.get(measure, measure), arm=arm.name, ranks=ranks, unit="s", problem=problem)


def _open(arm: Arm, ranks: int, plan: Plan, *, tries: int = 2) -> Session:
    """Bring a session up; some contenders don't come up every time."""
    try:
        return Session(arm, ranks, plan.environment(ranks)).__enter__()
    except KernelProblem:
        if tries == 1:
            raise
        return _open(arm, ranks, plan, tries=tries - 1)


def _shared_session(arm: Arm, ranks: int, plan: Plan, names: Sequence[str]) -> list[Figures]:
    """Ask one session for several measures; a failure costs that measure and a new session."""
    figures: list[Figures] = []
    deadline = time.monotonic() + arm.budget_s
    session: Session | None = None
    try:
        for name in names:
            if time.monotonic() > deadline:
                figures.append(_failed(name, arm, ranks, f"left out: its {arm.budget_s:.0f} s were spent"))
                continue
            try:
                session = session or _open(arm, ranks, plan)
                figures += _tell(name, ranks, partial(IN_SESSION[name], session, plan))
            except FAILURES as problem:
                print(f"    {arm.name} {name}: {problem}", flush=True)
                figures.append(_failed(name, arm, ranks, str(problem)))
                if session is not None:
                    session.end()
                    session = None
    finally:
        if session is not None:
            session.__exit__(None, None, None)
    return figures
