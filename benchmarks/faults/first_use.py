"""The faults of the campaign that strike the first use of something in new processes.

Covers: bursts of interrupts in the first ``torch.compile``, the first step of a DDP model, the first import of
transformers: most of that time goes into imports, and into what torch makes once in a process.
Does not cover: the cells themselves (``fault_cells``).
"""

from __future__ import annotations

import importlib.util
import os
import random
from typing import TYPE_CHECKING

from .cells import CPU_S, FIRSTS
from .kinds import PATIENCE_S, interrupted, presses

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_disttrain import Cluster

    from .kinds import Round


def _first(name: str) -> Callable[[Cluster, Round, str, int, float], float]:
    def strike(cluster: Cluster, result: Round, _code: str, _victim: int, delay_s: float) -> float:
        choose = random.Random(delay_s)
        cluster.reset()
        cluster.run(result.prepare, timeout_s=PATIENCE_S)
        result.pids = {entry.info.rank: entry.info.pid for entry in cluster.table}
        variant = choose.choice(list(FIRSTS[name]))
        result.cell = variant
        code, result.probe = (FIRSTS[name][variant].format(number=choose.randrange(1_000_000)) for _ in range(2))
        press = presses(delay_s)
        first_s = choose.uniform(0.0, CPU_S[name] * max(1.0, cluster.world_size / (os.cpu_count() or 1)))
        return interrupted(cluster, result, code, first_s, lambda: press(cluster), ends=True)

    return strike


def why_no_transformers() -> str:
    """Return why transformers can't be imported; empty if it can."""
    return "" if importlib.util.find_spec("transformers") else "transformers is not installed"


FIRST_FAULTS = {f"first {name}": _first(name) for name in FIRSTS}
