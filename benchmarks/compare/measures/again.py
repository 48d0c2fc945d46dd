"""Measure what makes new processes in a running session: a reset, the death of a rank, a script."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from typing import TYPE_CHECKING

from benchmarks.compare import torchrun
from benchmarks.lib.environment import WORKLOADS
from benchmarks.lib.kernel import KernelError
from benchmarks.lib.session import ALL_REDUCE

if TYPE_CHECKING:
    from benchmarks.compare.plan import Plan
    from benchmarks.lib.session import Session
    from benchmarks.lib.stats import Measurement

_SCRIPT = "first_all_reduce.py"


def again(session: Session, plan: Plan) -> list[Measurement]:
    """Reset all ranks, kill one, and run a script, in turn; torchrun's start and run are the baselines."""
    reset = session.tool.reset_cell()
    if reset is None:
        return []
    environment = plan.environment(session.ranks)
    resets, deaths, scripts, torchrun_starts, torchrun_runs = [], [], [], [], []
    for _ in range(plan.starts):
        torchrun_starts.append(torchrun.seconds_to_first_all_reduce(session.ranks, environment))
        resets.append(_seconds_of_reset(session, reset))
        deaths.append(_seconds_after_death(session))
        with tempfile.TemporaryDirectory(prefix="disttrain-bench-") as folder:
            begun = time.perf_counter()
            torchrun.run(_SCRIPT, session.ranks, [folder], environment)
            torchrun_runs.append(time.perf_counter() - begun)
            cell = session.tool.script_cell(str(WORKLOADS / _SCRIPT), folder)
            scripts.append(session.local(cell).seconds)
    return [
        session.measurement("reset", resets, baseline=torchrun_starts, baseline_name="torchrun"),
        session.measurement("death", deaths),
        session.measurement("script", scripts, baseline=torchrun_runs, baseline_name="torchrun"),
    ]


def _seconds_of_reset(session: Session, reset: str) -> float:
    """Return the time of a reset and of the first all_reduce after it."""
    begun = time.perf_counter()
    session.local(reset)
    session.on_all_ranks(ALL_REDUCE)
    seconds = time.perf_counter() - begun
    session.check_ranks()
    return seconds


def _seconds_after_death(session: Session) -> float:
    """Return the time from the death of the last rank to the end of the next all_reduce on all ranks."""
    begun = time.perf_counter()
    os.kill(session.rank_pids[session.ranks - 1], signal.SIGKILL)
    while True:
        try:
            session.on_all_ranks(ALL_REDUCE)
            break
        except KernelError:  # the cell was sent before the death was seen
            continue
    seconds = time.perf_counter() - begun
    session.check_ranks()
    return seconds
