"""Run ResNet-50 on clusters of different sizes.

Covers: images/s, compute and communication in a step, all_reduce by message size.
Does not cover: accuracy, several hosts, what limits scaling (limits), the page (report), the plot (plot).

The workload, ``workloads/resnet50.py``, runs as a cell on a new cluster for each number of ranks. Every round covers
all numbers of ranks, so a change of the machine's speed affects all of them. The workload is that of Horovod's
pytorch_synthetic_benchmark.py, with a plain batch norm, momentum, and one thread per rank on CPU.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from benchmarks.lib.environment import WORKLOADS
from jupyter_disttrain import Cluster

from .points import GRADIENT_BYTES, Point, Settings

WORKLOAD = (WORKLOADS / "resnet50.py").read_text()
STRATEGIES = ("ddp", "horovod")
FIRST_BYTES, LAST_BYTES, LAST_BYTES_GPU = 1 << 10, 64 << 20, 1 << 30
CELL_LIMIT_S = 1800.0


@dataclass
class Blocks:
    """Blocks of one strategy on one number of ranks, from all rounds."""

    path: str = ""  # of the messages: "gloo", "nccl" or "mpi"
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    all_reduce_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, results: dict[str, Any]) -> None:
        """Add the blocks of one run of the workload."""
        self.path = results["path"]
        for name in ("step_s", "compute_s", "thread_s", "others_s"):
            self.times[name] += results[name]
        for size, times in results["all_reduce_s"].items():
            self.all_reduce_s[int(size)] += times

    def point(self, strategy: str, ranks: int) -> Point:
        """Return the blocks as a point of the report."""
        times = {name: tuple(found) for name, found in self.times.items()}
        all_reduce_s = {size: tuple(self.all_reduce_s[size]) for size in sorted(self.all_reduce_s)}
        return Point(strategy=strategy, path=self.path, ranks=ranks, all_reduce_s=all_reduce_s, **times)


def rank_counts(total: int) -> tuple[int, ...]:
    """Return the powers of two up to ``total``, and ``total``.

    >>> rank_counts(6)
    (1, 2, 4, 6)
    """
    return tuple(sorted({*(1 << power for power in range(total.bit_length())), total}))


def message_sizes(last: int) -> list[int]:
    """Return the sizes of the sweep in bytes, each four times the previous one."""
    return [FIRST_BYTES << power for power in range(0, (last // FIRST_BYTES).bit_length(), 2)]


def measure(settings: Settings, ranks: tuple[int, ...], strategies: tuple[str, ...]) -> tuple[str, list[Point]]:
    """Run every strategy on every number of ranks; returns the ranks' device and the points."""
    blocks = {(strategy, n): Blocks() for strategy in strategies for n in ranks}
    device = ""
    for turn in range(settings.rounds):
        for n in ranks if turn % 2 == 0 else reversed(ranks):
            with Cluster(n=n, launcher="mpi", name="scaling") as cluster:
                for strategy in strategies:
                    results = _run(cluster, strategy, settings, _sizes(settings, n, ranks))
                    device = results["device"]
                    blocks[strategy, n].add(results)
                    rate = n * settings.batch / min(results["step_s"])
                    print(f"round {turn + 1}, N={n}, {strategy}: up to {rate:.1f} images/s", flush=True)
    return device, [found.point(strategy, n) for (strategy, n), found in blocks.items()]


def _sizes(settings: Settings, n: int, ranks: tuple[int, ...]) -> list[int]:
    """Return the bytes to all_reduce on ``n`` ranks: all gradients, and on the most ranks the whole sweep."""
    if n == 1:
        return []
    return [*settings.message_bytes, GRADIENT_BYTES] if n == max(ranks) else [GRADIENT_BYTES]


def _run(cluster: Cluster, strategy: str, settings: Settings, sizes: list[int]) -> dict[str, Any]:
    variables = {
        "BENCH_STRATEGY": strategy,
        "BENCH_BATCH": str(settings.batch),
        "BENCH_IMAGE": str(settings.image),
        "BENCH_STEPS": str(settings.steps),
        "BENCH_BLOCKS": str(settings.blocks),
        "BENCH_SIZES": ",".join(map(str, sizes)),
    }
    code = f"import os\nos.environ.update({variables!r})\n{WORKLOAD}"
    output = cluster.run(code, values=False, timeout_s=CELL_LIMIT_S).stdout[0]
    (line,) = [line for line in output.splitlines() if line.startswith("results ")]
    results: dict[str, Any] = json.loads(line.removeprefix("results "))
    return results
