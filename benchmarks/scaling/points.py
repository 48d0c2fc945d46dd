"""Define the measured quantities of ``benchmarks.scaling``.

Covers: settings, times of one strategy on one number of ranks, efficiency, exposed communication, bandwidths.
Does not cover: measuring (measure), tables (report).

Sources: efficiency is defined as in Horovod's benchmarks (docs/benchmarks.rst): images/s over a multiple of the
images/s of one rank, with the same batch per rank. Bandwidths are defined as in nccl-tests (doc/PERFORMANCE.md):
algorithm bandwidth = size / time, bus bandwidth = algorithm bandwidth * 2 (n - 1) / n for an all_reduce of n ranks.
Exposed communication is the difference of two times measured alternately: a step, and the same step without
communication, on as many ranks at once. The latter is torch's ``DistributedDataParallel.no_sync()``, or a plain
optimizer with Horovod.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

PARAMETERS = 25_557_032
GRADIENT_BYTES = 4 * PARAMETERS  # float32
TITLES = {"ddp": "DDP", "horovod": "Horovod"}
PATHS = {"gloo": "Gloo", "mpi": "MPI", "nccl": "NCCL"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured, and how often."""

    batch: int  # images per rank and step
    image: int  # height and width in pixels
    steps: int  # per block
    blocks: int  # per round
    rounds: int
    message_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One strategy on one number of ranks; each time is that of one block on its slowest rank."""

    strategy: str
    path: str  # of the messages: "gloo", "nccl" or "mpi"
    ranks: int
    step_s: tuple[float, ...]
    compute_s: tuple[float, ...]  # of the same step without communication
    thread_s: tuple[float, ...]  # processor time of the rank's main thread in compute_s
    others_s: tuple[float, ...]  # processor time of the other threads of its process in compute_s
    all_reduce_s: dict[int, tuple[float, ...]]  # by bytes

    @property
    def title(self) -> str:
        return f"{TITLES[self.strategy]} ({PATHS[self.path]})"

    @property
    def step(self) -> float:
        return median(self.step_s)

    @property
    def compute(self) -> float:
        return median(self.compute_s)

    @property
    def waiting(self) -> float:
        """Seconds of a step without communication in which the main thread of a CPU rank has no core."""
        return median(compute - thread for compute, thread in zip(self.compute_s, self.thread_s, strict=True))

    @property
    def exposed(self) -> float:
        """Seconds of a step in which communication is not hidden by compute; a value below zero is noise."""
        return median(step - compute for step, compute in zip(self.step_s, self.compute_s, strict=True))

    @property
    def gradients_alone(self) -> float | None:
        """Seconds of one all_reduce of all gradients."""
        times = self.all_reduce_s.get(GRADIENT_BYTES)
        return median(times) if times else None

    def rates(self, batch: int) -> list[float]:
        """Return the images/s of all ranks for each block, sorted."""
        return sorted(self.ranks * batch / step for step in self.step_s)

    def efficiency(self, one: Point) -> float:
        """Return images/s over as many times the images/s of one rank; 1 is linear scaling."""
        return one.step / self.step

    def bandwidths(self) -> dict[int, tuple[float, float, float]]:
        """Return seconds, algorithm bandwidth and bus bandwidth (bytes/s), by bytes."""
        times = {size: median(each) for size, each in self.all_reduce_s.items()}
        factor = 2 * (self.ranks - 1) / self.ranks
        return {size: (time, size / time, factor * size / time) for size, time in times.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


def on_one_rank(points: Sequence[Point]) -> dict[str, Point]:
    """Return the points on one rank, by strategy."""
    return {point.strategy: point for point in points if point.ranks == 1}


def on_most_ranks(points: Sequence[Point]) -> list[Point]:
    """Return the points on the most ranks; empty if that is one rank."""
    most = max(point.ranks for point in points)
    return [point for point in points if point.ranks == most > 1]


def format_size(size: int) -> str:
    """Format a number of bytes: ``64 MiB``, or ``102 MB`` if it is no multiple of a power of two.

    >>> format_size(64 << 20), format_size(102_228_128)
    ('64 MiB', '102 MB')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size % (1 << power) == 0:
            return f"{size >> power} {unit}"
    return f"{size / 1e6:.0f} MB"


def cpu_warning(settings: Settings, device: str) -> str:
    """Return a warning for results on CPU; empty on GPUs."""
    if device != "cpu":
        return ""
    return f"synthetic data, CPU, {settings.image} x {settings.image} images: not representative of GPUs"
