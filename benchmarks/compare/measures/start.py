"""Measure the start of the ranks until their first all_reduce, with torchrun as the baseline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.compare import torchrun
from benchmarks.lib.kernel import KernelError
from benchmarks.lib.session import Session
from benchmarks.lib.stats import Measurement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.compare.plan import Plan
    from benchmarks.lib.tools import Tool

_MAX_FAILURES = 2  # of one tool; a failed start may take minutes


@dataclass
class _Starts:
    """The starts of one tool."""

    tool: Tool
    ranks: int
    start_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def run(self, environment: dict[str, str]) -> None:
        """Start the tool once, unless it has failed too often."""
        if len(self.failures) >= _MAX_FAILURES:
            return
        try:
            with Session(self.tool, self.ranks, environment) as session:
                self.start_s.append(session.start_s)
                self.load_s.append(session.load_s)
        except KernelError as error:
            self.failures.append(str(error))

    def measurements(self, torchrun_s: Sequence[float]) -> list[Measurement]:
        """Return the start and, for a tool that is loaded first, the time to load it."""
        problem = f"{len(self.failures)} starts failed: {self.failures[-1]}" if self.failures else ""
        start = Measurement(
            measure="start",
            tool=self.tool.name,
            ranks=self.ranks,
            unit="s",
            values=tuple(self.start_s),
            baseline=tuple(torchrun_s),
            baseline_name="torchrun",
            note="includes the start of the kernel" if self.tool.start_includes_kernel else "",
            problem=problem,
        )
        if not self.tool.load_cells():
            return [start]
        load = Measurement(
            measure="load", tool=self.tool.name, ranks=self.ranks, unit="s", values=tuple(self.load_s), problem=problem
        )
        return [start, load]


def starts(tools: Sequence[Tool], ranks: int, plan: Plan) -> list[Measurement]:
    """Start torchrun and every tool in turn, each time in new processes."""
    environment = plan.environment(ranks)
    torchrun_s: list[float] = []
    by_tool = [_Starts(tool, ranks) for tool in tools]
    for _ in range(plan.starts):
        torchrun_s.append(torchrun.seconds_to_first_all_reduce(ranks, environment))
        for each in by_tool:
            each.run(environment)
    return [found for each in by_tool for found in each.measurements(torchrun_s)]
