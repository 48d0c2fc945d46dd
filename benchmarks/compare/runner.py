"""Run the measures in order and continue when a tool fails.

Covers: the order, sessions shared by several measures, time limits of each tool.
Does not cover: the command line (__main__), the tables (report).
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import psutil

from benchmarks.lib.kernel import KernelError
from benchmarks.lib.session import Session
from benchmarks.lib.stats import Measurement
from benchmarks.lib.tools import DISTTRAIN

from .measures import IN_SESSION
from .measures.cells import many_ranks
from .measures.memory import idle_memory
from .measures.start import starts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from benchmarks.lib.tools import Tool

    from .plan import Plan

_ROW = {
    "transfer": "pull",
    "loop": "loop_mlp",
    "again": "reset",
    "memory": "rank_memory",
}  # the row that shows a measure's failure
# Failures of a tool or a baseline; any other exception is an error of this benchmark and ends the run.
FAILURES = (KernelError, RuntimeError, OSError, psutil.Error)


def run(plan: Plan, tools: Sequence[Tool], only: Iterable[str]) -> list[Measurement]:
    """Run the chosen measures with every tool, and return all results."""
    chosen = set(only)
    measurements: list[Measurement] = []
    for ranks in plan.ranks:
        if "start" in chosen:
            measurements += _report_failures("start", tools, ranks, partial(starts, tools, ranks, plan))
        if "memory" in chosen:
            measurements += _report_failures("memory", tools, ranks, partial(idle_memory, tools, ranks, plan))
        for tool in tools:
            measurements += _shared_session(tool, ranks, plan, [name for name in IN_SESSION if name in chosen])
    ours = [tool for tool in tools if tool.name == DISTTRAIN]
    for ranks in plan.start_ranks if ours and "start" in chosen else ():
        measurements += _report_failures("start", ours, ranks, partial(starts, ours, ranks, plan))
    if "many_ranks" in chosen:
        for tool in tools:
            if tool.has_torchless_ranks():
                work = partial(many_ranks, tool, plan)
                measurements += _report_failures("many_ranks", [tool], plan.many_ranks, work)
    return measurements


def _print_results(measure: str, ranks: int, work: Callable[[], list[Measurement]]) -> list[Measurement]:
    """Do the work and print what it measured."""
    begun = time.monotonic()
    print(f"{measure}, N={ranks} ...", flush=True)
    measurements = work()
    for each in measurements:
        value = "no value" if each.median is None else f"{each.median:.4g} {each.unit}"
        ratio = "" if each.ratio is None else f", {each.ratio:.2f}x {each.baseline_name}"
        print(f"    {each.tool} {each.measure}: {value}{ratio} {each.problem}".rstrip(), flush=True)
    print(f"    took {time.monotonic() - begun:.0f} s", flush=True)
    return measurements


def _report_failures(
    measure: str, tools: Sequence[Tool], ranks: int, work: Callable[[], list[Measurement]]
) -> list[Measurement]:
    """Do the work; if it fails, return the failure as the result of each tool."""

    def guarded() -> list[Measurement]:
        try:
            return work()
        except FAILURES as error:
            return [_failed(measure, tool, ranks, str(error)) for tool in tools]

    return _print_results(measure, ranks, guarded)


def _failed(measure: str, tool: Tool, ranks: int, problem: str) -> Measurement:
    return Measurement(measure=_ROW.get(measure, measure), tool=tool.name, ranks=ranks, unit="s", problem=problem)


def _start_session(tool: Tool, ranks: int, plan: Plan, *, attempts: int = 2) -> Session:
    """Start a session; some tools do not start every time."""
    try:
        return Session(tool, ranks, plan.environment(ranks)).__enter__()
    except KernelError:
        if attempts == 1:
            raise
        return _start_session(tool, ranks, plan, attempts=attempts - 1)


def _shared_session(tool: Tool, ranks: int, plan: Plan, names: Sequence[str]) -> list[Measurement]:
    """Run several measures in one session; a measure that fails is skipped, and the next gets a new session."""
    measurements: list[Measurement] = []
    deadline = time.monotonic() + tool.budget_s
    session: Session | None = None
    try:
        for name in names:
            if time.monotonic() > deadline:
                measurements.append(_failed(name, tool, ranks, f"skipped: time limit of {tool.budget_s:.0f} s reached"))
                continue
            try:
                session = session or _start_session(tool, ranks, plan)
                measurements += _print_results(name, ranks, partial(IN_SESSION[name], session, plan))
            except FAILURES as error:
                print(f"    {tool.name} {name}: {error}", flush=True)
                measurements.append(_failed(name, tool, ranks, str(error)))
                if session is not None:
                    session.end()
                    session = None
    finally:
        if session is not None:
            session.__exit__(None, None, None)
    return measurements
