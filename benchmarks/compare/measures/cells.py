"""An empty cell on all ranks, and an empty local cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.lib.session import Session
from benchmarks.lib.stats import Figures

if TYPE_CHECKING:
    from benchmarks.compare.plan import Plan
    from benchmarks.lib.tools import Arm

_WARM_UP = 3


def _in_turns(session: Session, times: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    on_ranks, local = [], []
    for turn in range(times + _WARM_UP):
        distributed_s = session.on_all_ranks("pass").seconds
        local_s = session.local("pass").seconds if session.arm.has_local_cells() else None
        if turn >= _WARM_UP:
            on_ranks.append(distributed_s)
            if local_s is not None:
                local.append(local_s)
    return tuple(on_ranks), tuple(local)


def passes(session: Session, plan: Plan) -> list[Figures]:
    """``pass`` on all ranks and ``pass`` in the notebook's process, in turns."""
    values, yardstick = _in_turns(session, plan.passes)
    return [
        Figures(
            measure="pass",
            arm=session.arm.name,
            ranks=session.ranks,
            unit="s",
            values=values,
            yardstick=yardstick,
            yardstick_name="local cell",
        )
    ]


def many_ranks(arm: Arm, plan: Plan) -> list[Figures]:
    """``pass`` on ranks that have no torch."""
    with Session(arm, plan.many_ranks, plan.environment(plan.many_ranks), torch=False) as session:
        values, yardstick = _in_turns(session, plan.many_passes)
        note = f"{plan.many_ranks} ranks came up in {session.start_s:.1f} s"
    return [
        Figures(
            measure="many_ranks",
            arm=arm.name,
            ranks=plan.many_ranks,
            unit="s",
            values=values,
            yardstick=yardstick,
            yardstick_name="local cell",
            note=note,
        )
    ]
