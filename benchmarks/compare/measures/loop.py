"""Measure a DDP training loop in one cell, with the same file under torchrun as the baseline."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from benchmarks.compare import torchrun
from benchmarks.lib.environment import WORKLOADS
from benchmarks.lib.tools import Disttrain

if TYPE_CHECKING:
    from benchmarks.compare.plan import Plan
    from benchmarks.lib.session import Session
    from benchmarks.lib.stats import Measurement

_SECONDS = re.compile(r"loop seconds (\S+) loss (\S+)")
_LIMIT_S = 120.0


def against_torchrun(session: Session, plan: Plan) -> list[Measurement]:
    """Run the loop alternately under torchrun and in a cell, with the same number of threads."""
    environment = plan.environment(session.ranks)
    source = (WORKLOADS / "ddp_loop.py").read_text()
    repetitions = plan.loops if isinstance(session.tool, Disttrain) else plan.peer_loops
    measurements = []
    for model in ("mlp", "cnn"):
        values, baseline, problem = [], [], ""
        for _ in range(repetitions):
            baseline.append(torchrun.loop_seconds(session.ranks, model, environment))
            code = f'import os\nos.environ["BENCH_MODEL"] = "{model}"\n{source}'
            match = _SECONDS.search(session.on_all_ranks(code, timeout_s=_LIMIT_S).text)
            if match is None:
                problem = "rank 0 printed no result"
                break
            values.append(float(match[1]))
        measurements.append(
            session.measurement(f"loop_{model}", values, baseline=baseline, baseline_name="torchrun", problem=problem)
        )
    return measurements
