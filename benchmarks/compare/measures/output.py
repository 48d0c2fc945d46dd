"""How soon the first printed line is seen, and how long many lines take."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from benchmarks.lib.kernel import KernelProblem
from benchmarks.lib.outputs import check_lines
from benchmarks.lib.stats import Figures

if TYPE_CHECKING:
    from benchmarks.compare.plan import Plan
    from benchmarks.lib.kernel import CellRecord
    from benchmarks.lib.session import Session

_FLOOD_WITHIN_S = 90.0


def first_line(session: Session, plan: Plan) -> list[Figures]:
    """Print one line and go on working: the line must be seen while the cell runs."""
    values, yardstick, late = [], [], 0
    for _ in range(plan.first_lines):
        word = uuid.uuid4().hex
        record = session.on_all_ranks(f'import time\nprint(f"{word} from {{rank}}")\ntime.sleep(0.5)')
        seen_s = record.seconds_until(word)
        late += seen_s is None or seen_s > 0.5
        if seen_s is not None:
            values.append(seen_s)
        if session.arm.has_local_cells():
            yardstick.append(_local_line(session))
    return [
        Figures(
            measure="first_line",
            arm=session.arm.name,
            ranks=session.ranks,
            unit="s",
            values=tuple(values),
            yardstick=tuple(yardstick),
            yardstick_name="local cell",
            problem=f"{late} of {plan.first_lines} lines not seen while the cell ran" if late else "",
        )
    ]


def _local_line(session: Session) -> float:
    word = uuid.uuid4().hex
    seen_s = session.local(f'import time\nprint("{word}")\ntime.sleep(0.5)').seconds_until(word)
    if seen_s is None:
        raise KernelProblem("the kernel lost a local cell's line")
    return seen_s


def flood(session: Session, plan: Plan) -> list[Figures]:
    """Print many lines on every rank and look for each of them on the page."""
    count = plan.lines_per_rank
    values, yardstick, problems = [], [], []
    for _ in range(plan.floods):
        code = f'for i in range({count}):\n    print(f"rank {{rank}} line {{i}}")'
        record = session.on_all_ranks(code, timeout_s=_FLOOD_WITHIN_S)
        values.append(record.seconds)
        problems.append(_problem(record, session.ranks, count))
        if session.arm.has_local_cells():
            total = count * session.ranks
            yardstick.append(session.local(f'for i in range({total}):\n    print(f"rank 0 line {{i}}")').seconds)
    wrong = [problem for problem in problems if problem]
    return [
        Figures(
            measure="lines",
            arm=session.arm.name,
            ranks=session.ranks,
            unit="s",
            values=tuple(values),
            yardstick=tuple(yardstick),
            yardstick_name="as many lines from a local cell",
            problem=f"in {len(wrong)} of {len(problems)} runs: {wrong[0]}" if wrong else "",
        )
    ]


def _problem(record: CellRecord, ranks: int, count: int) -> str:
    return check_lines(record.text, ranks, count).problem
