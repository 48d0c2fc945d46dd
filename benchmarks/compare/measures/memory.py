"""Measure the memory of idle ranks, of the processes beside them and of the notebook's process.

The size of a shared page is divided by the number of processes that map it, so torchrun and each tool are measured one
at a time.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from benchmarks.compare import torchrun
from benchmarks.lib import processes
from benchmarks.lib.kernel import KernelError
from benchmarks.lib.session import ALL_REDUCE, Session
from benchmarks.lib.stats import Measurement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.compare.plan import Plan
    from benchmarks.lib.tools import Tool

_SETTLE_S = 0.5
_IDLE_S = 5.0


def idle_memory(tools: Sequence[Tool], ranks: int, plan: Plan) -> list[Measurement]:
    """Measure torchrun's ranks, then those of each tool, idle after one all_reduce."""
    with torchrun.running_ranks(ranks, plan.environment(ranks)) as (agent, workers):
        baseline = [processes.memory_of(pid) for pid in workers]
        agent_mb = processes.memory_of(agent).pss_mb
    return [found for tool in tools for found in _measure_tool(tool, ranks, plan, (baseline, agent_mb))]


def _measure_tool(
    tool: Tool, ranks: int, plan: Plan, baseline: tuple[list[processes.Memory], float]
) -> list[Measurement]:
    try:
        with Session(tool, ranks, plan.environment(ranks)) as session:
            session.on_all_ranks(ALL_REDUCE)
            time.sleep(_SETTLE_S)
            notebook = [] if session.before is None else [_notebook(session, session.before)]
            return [*notebook, *_ranks(session, *baseline), _idle_cpu(session)]
    except KernelError as error:
        return [Measurement(measure="rank_memory", tool=tool.name, ranks=ranks, unit="MB", problem=str(error))]


def _ranks(session: Session, baseline: list[processes.Memory], agent_mb: float) -> list[Measurement]:
    ranks = [processes.memory_of(pid) for _, pid in sorted(session.rank_pids.items())]
    helpers = session.helpers()
    names = ", ".join(f"{count} {name}" for name, count in Counter(map(processes.name_of, helpers)).items())
    rows = [
        session.measurement(
            measure,
            [getattr(memory, field) for memory in ranks],
            unit="MB",
            baseline=[getattr(memory, field) for memory in baseline],
            baseline_name="torchrun's ranks",
        )
        for measure, field in (("rank_memory", "pss_mb"), ("rank_private", "private_mb"))
    ]
    helpers_mb = sum(processes.memory_of(process.pid).pss_mb for process in helpers)
    return [
        *rows,
        session.measurement(
            "helpers",
            [helpers_mb],
            unit="MB",
            baseline=[agent_mb],
            baseline_name="torchrun's agent",
            note=f"PSS of {names or 'no process'}",
        ),
    ]


def _idle_cpu(session: Session) -> Measurement:
    """Measure the processor time of all processes of an idle session, in percent of one core."""
    running = processes.with_token(session.kernel.token)
    begun, used = time.perf_counter(), processes.cpu_seconds(running)
    time.sleep(_IDLE_S)
    percent = 100 * (processes.cpu_seconds(running) - used) / (time.perf_counter() - begun)
    return session.measurement("idle_cpu", [percent], unit="%")


def _notebook(session: Session, before: processes.Memory) -> Measurement:
    """Measure the growth of the kernel since before the tool was loaded."""
    after = processes.memory_of(session.kernel.pid)
    text = session.local('import sys\nprint("torch" in sys.modules)').text
    imported = "imported" if "True" in text else "not imported"
    return session.measurement(
        "notebook",
        [after.rss_mb - before.rss_mb],
        unit="MB",
        baseline=[before.rss_mb],
        baseline_name="the kernel before",
        note=f"RSS; PSS grew by {after.pss_mb - before.pss_mb:.0f} MB; torch is {imported}",
    )
