"""The memory of an idle rank, of what stands beside the ranks, and of the notebook's process.

Shared pages are counted by how many processes map them, so each contender and torchrun is weighed with nothing else of
this benchmark running.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from benchmarks.compare import torchrun
from benchmarks.lib import processes
from benchmarks.lib.kernel import KernelProblem
from benchmarks.lib.session import ALL_REDUCE, Session
from benchmarks.lib.stats import Figures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.compare.plan import Plan
    from benchmarks.lib.tools import Arm

_SETTLE_S = 0.5
_IDLE_S = 5.0


def weigh(arms: Sequence[Arm], ranks: int, plan: Plan) -> list[Figures]:
    """Weigh torchrun's ranks, then each arm's, after one all_reduce and at rest."""
    with torchrun.held(ranks, plan.environment(ranks)) as (agent, workers):
        beside = [processes.memory_of(pid) for pid in workers]
        agent_mb = processes.memory_of(agent).pss_mb
    return [figures for arm in arms for figures in _weigh_arm(arm, ranks, plan, (beside, agent_mb))]


def _weigh_arm(arm: Arm, ranks: int, plan: Plan, beside: tuple[list[processes.Memory], float]) -> list[Figures]:
    try:
        with Session(arm, ranks, plan.environment(ranks)) as session:
            session.on_all_ranks(ALL_REDUCE)
            time.sleep(_SETTLE_S)
            notebook = [] if session.before is None else [_notebook(session, session.before)]
            return [*notebook, *_ranks(session, *beside), _idle_cpu(session)]
    except KernelProblem as problem:
        return [Figures(measure="rank_memory", arm=arm.name, ranks=ranks, unit="MB", problem=str(problem))]


def _ranks(session: Session, beside: list[processes.Memory], agent_mb: float) -> list[Figures]:
    ranks = [processes.memory_of(pid) for _, pid in sorted(session.rank_pids.items())]
    helpers = session.helpers()
    names = ", ".join(f"{count} {name}" for name, count in Counter(map(processes.name_of, helpers)).items())
    rows = {
        "rank_memory": ([m.pss_mb for m in ranks], [m.pss_mb for m in beside], ""),
        "rank_private": ([m.private_mb for m in ranks], [m.private_mb for m in beside], ""),
        "helpers": ([sum(processes.memory_of(p.pid).pss_mb for p in helpers)], [agent_mb], f"PSS of {names or 'none'}"),
    }
    return [
        Figures(
            measure=measure,
            arm=session.arm.name,
            ranks=session.ranks,
            unit="MB",
            values=tuple(values),
            yardstick=tuple(yardstick),
            yardstick_name="torchrun's agent" if measure == "helpers" else "torchrun's ranks",
            note=note,
        )
        for measure, (values, yardstick, note) in rows.items()
    ]


def _idle_cpu(session: Session) -> Figures:
    """Measure what a cluster costs while nobody types: processor time of all its processes, in percent of one core."""
    everything = processes.with_token(session.kernel.token)
    begun, used = time.perf_counter(), processes.cpu_seconds(everything)
    time.sleep(_IDLE_S)
    percent = 100 * (processes.cpu_seconds(everything) - used) / (time.perf_counter() - begun)
    return Figures(measure="idle_cpu", arm=session.arm.name, ranks=session.ranks, unit="%", values=(percent,))


def _notebook(session: Session, before: processes.Memory) -> Figures:
    """Compare the kernel with itself before anything was loaded into it."""
    after = processes.memory_of(session.kernel.pid)
    answer = session.local('import sys\nprint("torch" in sys.modules)').text
    imported = "imported" if "True" in answer else "not imported"
    return Figures(
        measure="notebook",
        arm=session.arm.name,
        ranks=session.ranks,
        unit="MB",
        values=(after.rss_mb - before.rss_mb,),
        yardstick=(before.rss_mb,),
        yardstick_name="the kernel before",
        note=f"RSS; PSS grew by {after.pss_mb - before.pss_mb:.0f} MB; torch is {imported}",
    )
