"""Cause the faults that interrupt the first use of a library in new processes.

Covers: bursts of interrupts in the first ``torch.compile``, the first step of a DDP model, the first import of
transformers; most of that time is spent in imports and in one-time initialization of torch.
Does not cover: the code of the cells (cells).
"""

from __future__ import annotations

import importlib.util
import os
import random
from typing import TYPE_CHECKING

from .cells import CPU_S, FIRST_USES
from .kinds import burst_of_interrupts, run_interrupted
from .round import CHECK_TIMEOUT_S, Fault, Round

if TYPE_CHECKING:
    from jupyter_disttrain import Cluster


def _first_use(name: str) -> Fault:
    """Return the fault that interrupts a first use of kind ``name``, in a random variant."""

    def interrupt(cluster: Cluster, result: Round, _code: str, _victim: int, delay_s: float) -> float:
        choose = random.Random(delay_s)
        cluster.reset()
        cluster.run(result.prepare, timeout_s=CHECK_TIMEOUT_S)
        result.pids = {entry.info.rank: entry.info.pid for entry in cluster.table}
        variant = choose.choice(list(FIRST_USES[name]))
        result.cell = variant
        code, result.probe = (FIRST_USES[name][variant].format(number=choose.randrange(1_000_000)) for _ in range(2))
        burst = burst_of_interrupts(cluster, delay_s)
        first_s = choose.uniform(0.0, CPU_S[name] * max(1.0, cluster.world_size / (os.cpu_count() or 1)))
        return run_interrupted(cluster, result, code, first_s, burst, ends=True)

    return interrupt


def transformers_problem() -> str:
    """Return why transformers cannot be imported; empty if it can."""
    return "" if importlib.util.find_spec("transformers") else "transformers is not installed"


FIRST_FAULTS: dict[str, Fault] = {f"first {name}": _first_use(name) for name in FIRST_USES}
