"""A 100 MB tensor from rank 0 to the notebook, and an array from the notebook to every rank."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from benchmarks.lib.stats import Figures

if TYPE_CHECKING:
    from benchmarks.compare.plan import Plan
    from benchmarks.lib.session import Session

_HOLDS = re.compile(r"holds (\S+) (\S+) (\d+)")


def both_ways(session: Session, plan: Plan) -> list[Figures]:
    """Time both ways, a copy in memory beside each, and look whether the values arrived."""
    return [figures for figures in (_pull(session, plan), _push(session, plan)) if figures is not None]


def _check_code(name: str) -> str:
    return (
        f"_v = {name}[0] if isinstance({name}, dict) else {name}\n"
        'print(f"holds {float(_v.reshape(-1)[-1]):.6f} {str(_v.dtype).split(chr(46))[-1]} {_v.nbytes}")'
    )


def _copy_seconds(session: Session) -> float:
    """Copy the array that lies in the notebook as ``bench_up``."""
    return session.local("bench_copy = bench_up.copy()").seconds


def _prepare_local(session: Session, plan: Plan, turn: int) -> None:
    session.local(
        "import numpy as np\n"
        f"bench_up = np.full({plan.tensor_elements}, {turn}, dtype=np.float32)\n"
        f"bench_up[-1] = {turn}.25"
    )


def _pull(session: Session, plan: Plan) -> Figures | None:
    cell = session.arm.pull_cell("bench_down")
    if cell is None:
        return None
    values, yardstick, problem = [], [], ""
    for turn in range(plan.transfers):
        session.on_all_ranks(
            f"bench_down = torch.full(({plan.tensor_elements},), {turn}.0)\nbench_down[-1] = {turn} + 0.5"
            + session.arm.pull_conversion("bench_down")
        )
        values.append(session.kernel.run(cell, timeout_s=session.arm.limit_s).seconds)
        expected = (f"{turn + 0.5:.6f}", "float32", str(4 * plan.tensor_elements))
        if expected not in _HOLDS.findall(session.local(_check_code("bench_down")).text):
            problem = "the notebook does not hold rank 0's values"
        _prepare_local(session, plan, turn)
        yardstick.append(_copy_seconds(session))
    return _figures("pull", session, values, yardstick, problem)


def _push(session: Session, plan: Plan) -> Figures | None:
    cell = session.arm.push_cell("bench_up")
    if cell is None:
        return None
    values, yardstick, problem = [], [], ""
    for turn in range(plan.transfers):
        _prepare_local(session, plan, turn)
        yardstick.append(_copy_seconds(session))
        values.append(session.kernel.run(cell, timeout_s=session.arm.limit_s).seconds)
        expected = (f"{turn + 0.25:.6f}", "float32", str(4 * plan.tensor_elements))
        text = session.on_all_ranks(f'{_check_code("bench_up")}\nprint(f"on rank {{rank}}")').text
        if expected not in _HOLDS.findall(text) or len(set(_HOLDS.findall(text))) != 1:
            problem = "the ranks do not hold the notebook's values"
    return _figures("push", session, values, yardstick, problem)


def _figures(measure: str, session: Session, values: list[float], yardstick: list[float], problem: str) -> Figures:
    return Figures(
        measure=measure,
        arm=session.arm.name,
        ranks=session.ranks,
        unit="s",
        values=tuple(values),
        yardstick=tuple(yardstick),
        yardstick_name="a copy in memory",
        problem=problem,
    )
