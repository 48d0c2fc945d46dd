"""Measure an empty cell on all ranks, with an empty local cell as the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.lib.session import Session

if TYPE_CHECKING:
    from benchmarks.compare.plan import Plan
    from benchmarks.lib.stats import Measurement
    from benchmarks.lib.tools import Tool

_WARM_UP = 3


def _pass_cells(session: Session, measure: str, repetitions: int, *, note: str = "") -> Measurement:
    """Run ``pass`` alternately on all ranks and in the notebook's process."""
    on_ranks, local = [], []
    for turn in range(repetitions + _WARM_UP):
        distributed_s = session.on_all_ranks("pass").seconds
        local_s = session.local("pass").seconds if session.tool.has_local_cells() else None
        if turn >= _WARM_UP:
            on_ranks.append(distributed_s)
            if local_s is not None:
                local.append(local_s)
    return session.measurement(measure, on_ranks, baseline=local, baseline_name="local cell", note=note)


def passes(session: Session, plan: Plan) -> list[Measurement]:
    """Measure ``pass`` on the ranks of a session."""
    return [_pass_cells(session, "pass", plan.passes)]


def many_ranks(tool: Tool, plan: Plan) -> list[Measurement]:
    """Measure ``pass`` on many ranks without torch."""
    with Session(tool, plan.many_ranks, plan.environment(plan.many_ranks), torch=False) as session:
        note = f"{plan.many_ranks} ranks started in {session.start_s:.1f} s"
        return [_pass_cells(session, "many_ranks", plan.many_passes, note=note)]
