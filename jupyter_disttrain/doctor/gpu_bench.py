"""Provide the ranks that the checks of ``jupyter disttrain gpu-check`` share.

Covers: starting them, invariants after each check, waiting for events.
Does not cover: the checks (``gpu_check_cases``).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from jupyter_disttrain.errors import RankFailure

from ..client.startup.gpus import visible_gpus
from ..protocol.time_limits import GPU_BENCH_LIMIT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from jupyter_disttrain import CellRun, Cluster


ON_CPU, ON_ONE_GPU, MOST = 3, 4, 8  # number of ranks; else one for each GPU


class NotSoError(Exception):
    """A condition of a check does not hold."""


class Bench:
    """The ranks that the checks share; arguments as in ``gpu_check.run``."""

    def __init__(self, device: str, ranks: int | None, *, long: bool) -> None:
        self.has_gpu = device != "cpu"
        self.gpus = len(visible_gpus()) if self.has_gpu else 0
        # Seconds to watch released ranks: torch's watchdog sleeps for 60 s before it ends a process.
        self.watch_s = 1.0 if not self.has_gpu else 600.0 if long else 75.0
        self.pids: dict[int, int] = {}
        self._cluster: Cluster | None = None
        count = ranks or (min(self.gpus, MOST) if self.gpus > 1 else ON_ONE_GPU if self.has_gpu else ON_CPU)
        self._options: dict[str, Any] = {
            "name": f"gpu-check-{os.getpid()}",
            "launcher": "local",
            "n": count,
            "backend": "nccl" if self.has_gpu else "gloo",
            "share_gpus": self.has_gpu and count > self.gpus,
            "grace_s": 2.0,
            "hang_after_s": 2.0,
            "sample_s": 0.5,
        }

    def starts(self, **options: Any) -> Cluster:
        """Start ranks with these options in place of the default ones."""
        from jupyter_disttrain import Cluster  # noqa: PLC0415  (imports ipyparallel)

        return Cluster(**self._options | options)

    @property
    def last(self) -> int:
        """The last rank."""
        return len(self.pids) - 1

    @property
    def cluster(self) -> Cluster:
        """Usable ranks, each with a variable that has to survive the check."""
        if self._cluster is None or self._cluster.closed:
            self._cluster = self.starts()
        self.pids = self.run("import os, time; kept = rank * 11; value = None; os.getpid()")
        return self._cluster

    def run(self, code: str) -> dict[int, Any]:
        """Run a cell on all ranks, and return its values."""
        assert self._cluster is not None
        return self._cluster.run(code, timeout_s=GPU_BENCH_LIMIT_SECONDS).results

    def check_whole(self, replaced: Collection[int] = ()) -> None:
        """Check that all ranks can sum, and that those not replaced have their process and variables."""
        total = float(sum(self.pids))
        code = "import os\ny = torch.tensor([float(rank)], device=device); dist.all_reduce(y)\n"
        seen = self.run(f"{code}y.item(), os.getpid(), globals().get('kept')")
        require(all(each[0] == total for each in seen.values()), f"a sum of ranks afterwards: {seen}, not {total}")
        for rank, (_, pid, kept) in seen.items():
            if rank in replaced:
                require(pid != self.pids[rank], f"rank {rank} has its old process")
            else:
                require((pid, kept) == (self.pids[rank], rank * 11), f"rank {rank} lost its process or its variables")

    def close(self) -> None:
        """Shut down the ranks."""
        if self._cluster is not None:
            self._cluster.shutdown()
        self._cluster = None


def require(holds: object, what: str) -> None:
    """Raise a NotSoError with this text if the condition does not hold."""
    if not holds:
        raise NotSoError(what)


def until(condition: Callable[[], object], what: str, limit_s: float = GPU_BENCH_LIMIT_SECONDS) -> float:
    """Poll a condition for which there is no event; returns how long that took, in seconds."""
    began = time.monotonic()
    while not condition():
        require(time.monotonic() - began < limit_s, f"{what}: not within {limit_s:g} s")
        time.sleep(0.05)
    return time.monotonic() - began


def pids(cluster: Cluster) -> dict[int, int]:
    """Return the pid of each rank."""
    return {entry.info.rank: entry.info.pid for entry in cluster.table}


def ended(run: CellRun) -> tuple[RankFailure, float]:
    """Wait for a cell that fails, and return its failure and how long that took, in seconds."""
    began = time.monotonic()
    try:
        run.wait(timeout_s=GPU_BENCH_LIMIT_SECONDS)
    except RankFailure as failure:
        return failure, time.monotonic() - began
    raise NotSoError("the cell succeeded")


def waiting(run: CellRun, ranks: set[int], limit_s: float = GPU_BENCH_LIMIT_SECONDS) -> None:
    """Wait until ranks are observed waiting for others."""

    def seen() -> bool:
        looks = run._supervisor.stacks.collect(ranks, 5)  # noqa: SLF001
        return all(look.waits_s is not None for look in looks.values())

    until(seen, f"ranks {sorted(ranks)} are seen waiting", limit_s)


def stop(cluster: Cluster, code: str, ranks: set[int]) -> float:
    """Interrupt a cell once, while ranks wait; returns how long that took, in seconds."""
    run = cluster.run(code, block=False)
    waiting(run, ranks)
    began = time.monotonic()
    cluster.interrupt()
    ended(run)
    return time.monotonic() - began
