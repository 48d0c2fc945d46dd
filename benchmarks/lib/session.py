"""One contender's kernel with its ranks up, for the measures that need them.

Covers: starting and ending it, local cells, cells on all ranks, the pids of its ranks.
Does not cover: timing of the start (``measures.start``).
"""

from __future__ import annotations

import contextlib
import re
import time
from typing import TYPE_CHECKING

from . import processes
from .kernel import CellRecord, DrivenKernel, KernelProblem

if TYPE_CHECKING:
    from types import TracebackType

    import psutil

    from .tools import Arm

ALL_REDUCE = "ones = torch.ones(1)\ndist.all_reduce(ones)"
_PROOF = 'import os\nprint(f"rank {rank} of {world_size} has {ones.item():.0f} in pid {os.getpid()}")'
_PROVEN = re.compile(r"rank (\d+) of (\d+) has (\d+) in pid (\d+)")


class Session:
    """A kernel of ``arm`` with ``ranks`` ranks; ended on the way out whatever happened."""

    def __init__(self, arm: Arm, ranks: int, environment: dict[str, str], *, torch: bool = True) -> None:
        self.arm = arm
        self.ranks = ranks
        self.kernel = DrivenKernel(arm.command(), {**environment, **arm.environment(ranks)})
        self.rank_pids: dict[int, int] = {}
        self.load_s = 0.0
        self.start_s = 0.0
        self.before: processes.Memory | None = None  # the kernel, when nothing was loaded into it
        self._torch = torch

    def __enter__(self) -> Session:  # noqa: PYI034
        try:
            self._start()
        except BaseException:
            self.kernel.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = self.end()
        if left and kind is None:
            print(f"    {self.arm.name}: {left} processes outlived their kernel by 5 s and were ended", flush=True)

    def _start(self) -> None:
        self.kernel.start()
        comm = self.arm.comm_target()
        if comm is not None:
            self.kernel.open_comm(comm)
        if self.arm.has_local_cells():
            self.local("pass")
            self.before = processes.memory_of(self.kernel.pid)
        begun = time.perf_counter()
        for cell in self.arm.load_cells():
            self.kernel.run(cell)
        self.load_s = time.perf_counter() - begun
        begun = self.kernel.started_s if self.arm.start_includes_kernel else time.perf_counter()
        cells = self.arm.start_cells(self.ranks) if self._torch else self.arm.torchless_start_cells(self.ranks)
        assert cells is not None, f"{self.arm.name} has no ranks without torch"
        for cell in cells:
            self.kernel.run(cell, timeout_s=120.0)
        if not self._torch:
            self.start_s = time.perf_counter() - begun
            return
        self.on_all_ranks(ALL_REDUCE)
        self.start_s = time.perf_counter() - begun
        for cell in self.arm.after_start_cells():
            self.kernel.run(cell)
        self._prove()

    def _prove(self) -> None:
        """Ask every rank for its sum; some contenders print an error and go on."""
        text = self.on_all_ranks(_PROOF).text
        found = [tuple(map(int, match.groups())) for match in _PROVEN.finditer(text)]
        self.rank_pids = {rank: pid for rank, _, _, pid in found}
        sums = {(size, total) for _, size, total, _ in found}
        if sorted(self.rank_pids) != list(range(self.ranks)) or sums != {(self.ranks, self.ranks)}:
            last = text.strip().splitlines()[-1:] or ["nothing was printed"]
            raise KernelProblem(f"the first all_reduce is not done on all ranks: {last[0][:120]}")

    def end(self) -> int:
        """End the ranks as a person does, then the kernel; return how many processes were left behind."""
        with contextlib.suppress(Exception):
            for cell in self.arm.stop_cells():
                self.kernel.run(cell, timeout_s=20.0)
        return self.kernel.end()

    def local(self, code: str) -> CellRecord:
        """Run a cell in the notebook's own process."""
        return self.kernel.run(code, timeout_s=self.arm.limit_s)

    def on_all_ranks(self, code: str, *, timeout_s: float | None = None) -> CellRecord:
        """Run a cell on all ranks."""
        return self.kernel.run(self.arm.on_all_ranks(code), timeout_s=timeout_s or self.arm.limit_s)

    def helpers(self) -> list[psutil.Process]:
        """Return the processes that are neither the kernel nor a rank."""
        known = {self.kernel.pid, *self.rank_pids.values()}
        return [process for process in processes.with_token(self.kernel.token) if process.pid not in known]
