"""Measure the transfer of 100 MB from rank 0 to the notebook, and from the notebook to every rank."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.compare.plan import Plan
    from benchmarks.lib.session import Session
    from benchmarks.lib.stats import Measurement

_CONTENT = re.compile(r"content (\S+) (\S+) (\d+)")


def both_ways(session: Session, plan: Plan) -> list[Measurement]:
    """Measure both directions, with a copy in memory as the baseline, and check the values on arrival."""
    return [*_pull(session, plan), *_push(session, plan)]


def _print_content(name: str) -> str:
    """Return code that prints the last element, the dtype and the size of a variable."""
    return (
        f"_v = {name}[0] if isinstance({name}, dict) else {name}\n"
        'print(f"content {float(_v.reshape(-1)[-1]):.6f} {str(_v.dtype).split(chr(46))[-1]} {_v.nbytes}")'
    )


def _make_array(session: Session, plan: Plan, turn: int) -> None:
    """Make an array in the notebook, as ``bench_up``."""
    session.local(
        "import numpy as np\n"
        f"bench_up = np.full({plan.tensor_elements}, {turn}, dtype=np.float32)\n"
        f"bench_up[-1] = {turn}.25"
    )


def _copy_seconds(session: Session) -> float:
    """Copy ``bench_up`` within the notebook's process."""
    return session.local("bench_copy = bench_up.copy()").seconds


def _expected(plan: Plan, last: float) -> tuple[str, str, str]:
    return f"{last:.6f}", "float32", str(4 * plan.tensor_elements)


def _pull(session: Session, plan: Plan) -> list[Measurement]:
    cell = session.tool.pull_cell("bench_down")
    if cell is None:
        return []
    values, baseline, problem = [], [], ""
    for turn in range(plan.transfers):
        session.on_all_ranks(
            f"bench_down = torch.full(({plan.tensor_elements},), {turn}.0)\nbench_down[-1] = {turn} + 0.5"
            + session.tool.pull_conversion("bench_down")
        )
        values.append(session.local(cell).seconds)
        found = _CONTENT.findall(session.local(_print_content("bench_down")).text)
        if _expected(plan, turn + 0.5) not in found:
            problem = "the values in the notebook differ from rank 0's"
        _make_array(session, plan, turn)
        baseline.append(_copy_seconds(session))
    return [_measurement("pull", session, values, baseline, problem)]


def _push(session: Session, plan: Plan) -> list[Measurement]:
    cell = session.tool.push_cell("bench_up")
    if cell is None:
        return []
    values, baseline, problem = [], [], ""
    for turn in range(plan.transfers):
        _make_array(session, plan, turn)
        baseline.append(_copy_seconds(session))
        values.append(session.local(cell).seconds)
        text = session.on_all_ranks(f'{_print_content("bench_up")}\nprint(f"on rank {{rank}}")').text
        if set(_CONTENT.findall(text)) != {_expected(plan, turn + 0.25)}:
            problem = "the values on the ranks differ from the notebook's"
    return [_measurement("push", session, values, baseline, problem)]


def _measurement(
    measure: str, session: Session, values: list[float], baseline: list[float], problem: str
) -> Measurement:
    return session.measurement(measure, values, baseline=baseline, baseline_name="a copy in memory", problem=problem)
