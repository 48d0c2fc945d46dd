"""A DDP training loop in one cell, and the same file under torchrun."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from benchmarks.compare import torchrun
from benchmarks.lib.stats import Figures
from benchmarks.lib.tools import Ours

if TYPE_CHECKING:
    from benchmarks.compare.plan import Plan
    from benchmarks.lib.session import Session

_SECONDS = re.compile(r"loop seconds (\S+) loss (\S+)")
_LIMIT_S = 120.0


def against_torchrun(session: Session, plan: Plan) -> list[Figures]:
    """Run the loop here and there in turns, with the same number of threads."""
    environment = plan.environment(session.ranks)
    source = (torchrun.WORKLOADS / "ddp_loop.py").read_text()
    figures = []
    for model in ("mlp", "cnn"):
        values, yardstick, problem = [], [], ""
        for _ in range(plan.loops if isinstance(session.arm, Ours) else plan.peer_loops):
            yardstick.append(torchrun.loop_seconds(session.ranks, model, environment))
            code = f'import os\nos.environ["BENCH_MODEL"] = "{model}"\n{source}'
            match = _SECONDS.search(session.on_all_ranks(code, timeout_s=_LIMIT_S).text)
            if match is None:
                problem = "rank 0 printed no result"
                break
            values.append(float(match[1]))
        figures.append(
            Figures(
                measure=f"loop_{model}",
                arm=session.arm.name,
                ranks=session.ranks,
                unit="s",
                values=tuple(values),
                yardstick=tuple(yardstick),
                yardstick_name="torchrun",
                problem=problem,
            )
        )
    return figures
