"""Measure how soon a printed line is visible, and how long many lines take."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from benchmarks.lib.kernel import KernelError
from benchmarks.lib.outputs import check_lines

if TYPE_CHECKING:
    from benchmarks.compare.plan import Plan
    from benchmarks.lib.session import Session
    from benchmarks.lib.stats import Measurement

_FLOOD_LIMIT_S = 90.0
_WORK_S = 0.5  # how long a cell still runs after it has printed its line


def first_line(session: Session, plan: Plan) -> list[Measurement]:
    """Print one line in a cell that keeps running; the line must be visible before the cell ends."""
    values, baseline, late = [], [], 0
    for _ in range(plan.first_lines):
        marker = uuid.uuid4().hex
        code = f'import time\nprint(f"{marker} from {{rank}}")\ntime.sleep({_WORK_S})'
        seen_s = session.on_all_ranks(code).seconds_until(marker)
        late += seen_s is None or seen_s > _WORK_S
        if seen_s is not None:
            values.append(seen_s)
        if session.tool.has_local_cells():
            baseline.append(_local_line(session))
    problem = f"{late} of {plan.first_lines} lines not visible while the cell ran" if late else ""
    return [session.measurement("first_line", values, baseline=baseline, baseline_name="local cell", problem=problem)]


def _local_line(session: Session) -> float:
    marker = uuid.uuid4().hex
    code = f'import time\nprint("{marker}")\ntime.sleep({_WORK_S})'
    seen_s = session.local(code).seconds_until(marker)
    if seen_s is None:
        raise KernelError("the output of a local cell is incomplete")
    return seen_s


def flood(session: Session, plan: Plan) -> list[Measurement]:
    """Print many lines on every rank and check each of them in the cell's output."""
    count = plan.lines_per_rank
    values, baseline, problems = [], [], []
    for _ in range(plan.floods):
        code = f'for i in range({count}):\n    print(f"rank {{rank}} line {{i}}")'
        record = session.on_all_ranks(code, timeout_s=_FLOOD_LIMIT_S)
        values.append(record.seconds)
        problems.append(check_lines(record.text, session.ranks, count).problem)
        if session.tool.has_local_cells():
            total = count * session.ranks
            baseline.append(session.local(f'for i in range({total}):\n    print(f"rank 0 line {{i}}")').seconds)
    wrong = [problem for problem in problems if problem]
    return [
        session.measurement(
            "lines",
            values,
            baseline=baseline,
            baseline_name="as many lines from a local cell",
            problem=f"in {len(wrong)} of {len(problems)} runs: {wrong[0]}" if wrong else "",
        )
    ]
