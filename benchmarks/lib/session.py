"""Run one tool's kernel with its ranks.

Covers: starting and ending the ranks, local cells, cells on all ranks, the pids of the ranks.
Does not cover: the kernel itself (kernel), repeating and comparing starts (compare.measures.start).
"""

from __future__ import annotations

import contextlib
import re
import time
from typing import TYPE_CHECKING

from . import processes
from .kernel import EXIT_TIMEOUT_S, CellRecord, DrivenKernel, KernelError
from .stats import Measurement

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    import psutil

    from .tools import Tool

ALL_REDUCE = "ones = torch.ones(1)\ndist.all_reduce(ones)"
_CHECK = 'import os\nprint(f"rank {rank} of {world_size} has {ones.item():.0f} in pid {os.getpid()}")'
_CHECKED = re.compile(r"rank (\d+) of (\d+) has (\d+) in pid (\d+)")


class Session:
    """A context manager that runs a kernel of ``tool`` with ``ranks`` ranks."""

    def __init__(self, tool: Tool, ranks: int, environment: dict[str, str], *, torch: bool = True) -> None:
        self.tool = tool
        self.ranks = ranks
        self.kernel = DrivenKernel(tool.command(), {**environment, **tool.environment(ranks)})
        self.rank_pids: dict[int, int] = {}
        self.load_s = 0.0
        self.start_s = 0.0
        self.before: processes.Memory | None = None  # of the kernel, before the tool was loaded
        self._torch = torch

    def __enter__(self) -> Session:  # noqa: PYI034
        try:
            self._start()
        except BaseException:
            self.kernel.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        left = self.end()
        if left and kind is None:
            message = f"{left} processes still ran {EXIT_TIMEOUT_S:g} s after their kernel and were ended"
            print(f"    {self.tool.name}: {message}", flush=True)

    def _start(self) -> None:
        self.kernel.start()
        comm = self.tool.comm_target()
        if comm is not None:
            self.kernel.open_comm(comm)
        if self.tool.has_local_cells():
            self.local("pass")
            self.before = processes.memory_of(self.kernel.pid)
        begun = time.perf_counter()
        for cell in self.tool.load_cells():
            self.kernel.run(cell)
        self.load_s = time.perf_counter() - begun
        begun = self.kernel.started_s if self.tool.start_includes_kernel else time.perf_counter()
        cells = self.tool.start_cells(self.ranks) if self._torch else self.tool.torchless_start_cells(self.ranks)
        assert cells is not None, f"{self.tool.name} cannot start ranks without torch"
        for cell in cells:
            self.kernel.run(cell, timeout_s=120.0)
        if not self._torch:
            self.start_s = time.perf_counter() - begun
            return
        self.on_all_ranks(ALL_REDUCE)
        self.start_s = time.perf_counter() - begun
        for cell in self.tool.after_start_cells():
            self.kernel.run(cell)
        self.check_ranks()

    def check_ranks(self) -> None:
        """Check the result of the all_reduce on every rank, since some tools print an error and continue."""
        text = self.on_all_ranks(_CHECK).text
        found = [tuple(map(int, match.groups())) for match in _CHECKED.finditer(text)]
        self.rank_pids = {rank: pid for rank, _, _, pid in found}
        sums = {(size, total) for _, size, total, _ in found}
        if sorted(self.rank_pids) != list(range(self.ranks)) or sums != {(self.ranks, self.ranks)}:
            last = text.strip().splitlines()[-1:] or ["(no output)"]
            raise KernelError(f"the first all_reduce did not complete on all ranks: {last[0][:120]}")

    def end(self) -> int:
        """Run the tool's stop cells, then end the kernel; return how many processes still ran."""
        with contextlib.suppress(Exception):
            for cell in self.tool.stop_cells():
                self.kernel.run(cell, timeout_s=20.0)
        return self.kernel.end()

    def local(self, code: str) -> CellRecord:
        """Run a cell in the notebook's process."""
        return self.kernel.run(code, timeout_s=self.tool.limit_s)

    def on_all_ranks(self, code: str, *, timeout_s: float | None = None) -> CellRecord:
        """Run a cell on all ranks."""
        return self.kernel.run(self.tool.on_all_ranks(code), timeout_s=timeout_s or self.tool.limit_s)

    def helpers(self) -> list[psutil.Process]:
        """Return the session's processes other than the kernel and the ranks."""
        known = {self.kernel.pid, *self.rank_pids.values()}
        return [process for process in processes.with_token(self.kernel.token) if process.pid not in known]

    def measurement(
        self,
        measure: str,
        values: Iterable[float],
        *,
        unit: str = "s",
        baseline: Iterable[float] = (),
        baseline_name: str = "",
        note: str = "",
        problem: str = "",
    ) -> Measurement:
        """Return a record of ``values`` with this session's tool and number of ranks."""
        return Measurement(
            measure=measure,
            tool=self.tool.name,
            ranks=self.ranks,
            unit=unit,
            values=tuple(values),
            baseline=tuple(baseline),
            baseline_name=baseline_name,
            note=note,
            problem=problem,
        )
