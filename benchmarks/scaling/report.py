"""The figures of ``scaling`` as Markdown, and what they say limits.

Covers: efficiency, exposed communication, bandwidths, the tables, how each figure is defined, the words on limits.
Does not cover: measuring (``scaling``), drawing (``scaling_plot``).

Sources: efficiency is that of Horovod's benchmarks (its docs/benchmarks.rst): images a second against a multiple of
what one has; the batch of a rank stays as it is. Bandwidths are those of nccl-tests (its doc/PERFORMANCE.md):
algorithm bandwidth = size / time, bus bandwidth = that * 2 (n - 1) / n for an all_reduce of n ranks. Exposed
communication is a difference of two times that are measured in turns: a step, and the same step without communication,
which is torch's own ``DistributedDataParallel.no_sync()``, or with Horovod a plain optimizer, on as many ranks at once.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from importlib.metadata import version
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.compare.report import amount

if TYPE_CHECKING:
    from collections.abc import Sequence

PARAMETERS = 25_557_032
GRADIENT_BYTES = 4 * PARAMETERS  # in float32
TITLES = {"ddp": "DDP", "horovod": "Horovod"}
PATHS = {"gloo": "Gloo", "mpi": "MPI", "nccl": "NCCL"}
NEARLY_LINEAR = 0.97  # what is lost beyond that is lost in the noise
CLEARLY_MORE = 3.0  # times as much: then it alone is named as what limits
WORTH_A_WORD = 0.02  # of the step, in which other threads use a core

HOW_TO_READ = """\
- images/s: of all ranks together, by the step of the slowest rank.
- efficiency: images/s over as many times the images/s of one rank of the same arm; each rank has its own batch at every
  number of ranks (Horovod, docs/benchmarks.rst).
- compute: the same step on as many ranks at once, without communication: DDP under `no_sync()`, Horovod with a plain
  optimizer in place of `DistributedOptimizer`.
- exposed: step minus compute, block by block, in turns: what communication adds to a step, with what DDP and Horovod do
  for it (copies into buckets, hooks), and without what the backward pass hides. Below zero is noise.
- gradients alone: one all_reduce of as many bytes as all gradients have, when nothing else runs."""

BANDWIDTHS = """\
Bandwidths as nccl-tests has them (doc/PERFORMANCE.md): algbw = size / time, busbw = algbw * 2 (n - 1) / n, in GB/s of
10^9 bytes. Time is that of the slowest rank, of calls one after another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured, and how often."""

    batch: int  # images a rank and step
    image: int  # pixels of a side
    steps: int  # in a block
    blocks: int  # in a round
    rounds: int
    message_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One arm on one number of ranks; each time is one block's, on its slowest rank."""

    arm: str
    path: str  # what carries its messages: "gloo", "nccl" or "mpi"
    ranks: int
    step_s: tuple[float, ...]
    compute_s: tuple[float, ...]  # of the same step without communication
    thread_s: tuple[float, ...]  # of a core, used in that by the rank's own thread
    others_s: tuple[float, ...]  # of a core, used meanwhile by other threads of its process
    all_reduce_s: dict[int, tuple[float, ...]]  # by bytes

    @property
    def title(self) -> str:
        return f"{TITLES[self.arm]} ({PATHS[self.path]})"

    @property
    def step(self) -> float:
        return median(self.step_s)

    @property
    def compute(self) -> float:
        return median(self.compute_s)

    @property
    def waiting(self) -> float:
        """Seconds of a step without communication in which a CPU rank's thread has no core."""
        return median(compute - thread for compute, thread in zip(self.compute_s, self.thread_s, strict=True))

    @property
    def exposed(self) -> float:
        """Seconds of a step in which communication is not hidden behind compute; below zero if that is in the noise."""
        return median(step - compute for step, compute in zip(self.step_s, self.compute_s, strict=True))

    @property
    def gradients_alone(self) -> float | None:
        times = self.all_reduce_s.get(GRADIENT_BYTES)
        return median(times) if times else None

    def rates(self, batch: int) -> list[float]:
        """Return images a second of all ranks, block by block, the least first."""
        return sorted(self.ranks * batch / step for step in self.step_s)

    def efficiency(self, one: Point) -> float:
        """Return images a second against those of as many times one rank; 1 is linear."""
        return one.step / self.step

    def bandwidths(self) -> dict[int, tuple[float, float, float]]:
        """Return seconds, algorithm bandwidth and bus bandwidth in bytes a second, by bytes."""
        times = {size: median(each) for size, each in self.all_reduce_s.items()}
        factor = 2 * (self.ranks - 1) / self.ranks
        return {size: (time, size / time, factor * size / time) for size, time in times.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return the raw figures as JSON takes them."""
        return asdict(self)


def ones(points: Sequence[Point]) -> dict[str, Point]:
    """Return what each arm did on one rank."""
    return {point.arm: point for point in points if point.ranks == 1}


def on_most_ranks(points: Sequence[Point]) -> list[Point]:
    """Return what each arm did on the most ranks, if those are more than one."""
    most = max(point.ranks for point in points)
    return [point for point in points if point.ranks == most > 1]


def size_of(size: int) -> str:
    """Write a size as people do: ``64 MiB``, or ``102 MB`` where it is not a power of two."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size % (1 << power) == 0:
            return f"{size >> power} {unit}"
    return f"{size / 1e6:.0f} MB"


def warning(settings: Settings, device: str) -> str:
    """Say what figures of a CPU are not; nothing on GPUs."""
    if device != "cpu":
        return ""
    return f"synthetic data, CPU, {settings.image} x {settings.image} images: says nothing of GPUs"


def facts(settings: Settings, device: str, arms: Sequence[str]) -> list[str]:
    """Return what belongs to the workload, beside the facts of the machine."""
    small = f"{settings.batch} synthetic images of {settings.image} x {settings.image} pixels a rank and step"
    where = (
        "ranks on CPU, one torch thread each at every number of ranks, so that one against several is fair"
        if device == "cpu"
        else f"one {device} a rank; TF32 in convolutions, as torch has it by default"
    )
    often = f"rounds, each with new clusters: {settings.rounds}; blocks a round: {settings.blocks}"
    told = [
        f"ResNet-50 v1.5, {PARAMETERS:,} parameters in float32; {small}; SGD with momentum",
        where,
        f"{often}; steps a block: {settings.steps}, after a warm-up",
        "medians over all blocks, in brackets the least and the most",
    ]
    return [*told, f"Horovod {version('horovod')}"] if "horovod" in arms else told


def markdown(
    facts: Sequence[str], settings: Settings, device: str, points: Sequence[Point], notes: Sequence[str], plot: str
) -> str:
    """Return the whole page."""
    lines = ["# ResNet-50 by number of ranks", ""]
    label = warning(settings, device)
    lines += [f"**{label[0].upper()}{label[1:]}.**", ""] if label else []
    lines += [*(f"- {fact}" for fact in facts), *(f"- {note}" for note in notes), ""]
    lines += [f"![Images a second by number of ranks; bus bandwidth by message size]({plot})", ""]
    lines += ["## Images a second", "", *_scaling_table(settings, points), "", HOW_TO_READ, ""]
    most = on_most_ranks(points)
    if most:
        said = [line for point in most for line in limit(ones(points)[point.arm], point, device)]
        lines += ["## What limits", "", *said, ""]
        lines += [f"## all_reduce on {most[0].ranks} ranks", "", *_bandwidth_table(most), "", BANDWIDTHS]
    return "\n".join(lines).rstrip()


def _scaling_table(settings: Settings, points: Sequence[Point]) -> list[str]:
    head = ("", "ranks", "images/s", "efficiency", "step", "compute", "exposed", "of the step", "gradients alone")
    rows = []
    for point in points:
        rates = point.rates(settings.batch)
        rate = f"{median(rates):.1f} ({rates[0]:.1f}-{rates[-1]:.1f})"
        efficiency = f"{100 * point.efficiency(ones(points)[point.arm]):.0f} %"
        times = [amount(seconds, "s") for seconds in (point.step, point.compute, point.exposed)]
        share = f"{100 * point.exposed / point.step:.0f} %"
        alone = amount(point.gradients_alone, "s")
        rows.append([point.title, str(point.ranks), rate, efficiency, *times, share, alone])
    return _table(head, rows)


def _bandwidth_table(points: Sequence[Point]) -> list[str]:
    head = ["size"]
    for point in points:
        head += [f"{point.title}: time", "algbw", "busbw"]
    found = [point.bandwidths() for point in points]
    rows = []
    for size in found[0]:
        row = [size_of(size)]
        for each in found:
            time, algorithm, bus = each[size]
            row += [_short(time), _gigabytes(algorithm), _gigabytes(bus)]
        rows.append(row)
    return _table(head, rows)


def _short(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else amount(seconds, "s")


def _gigabytes(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.3f}" if bandwidth >= 1e6 else "< 0.001"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def limit(one: Point, many: Point, device: str) -> list[str]:
    """Say from the figures why ``many`` ranks are not as many times as fast as ``one``, as lines of Markdown."""
    efficiency, slower, exposed = many.efficiency(one), many.compute - one.compute, many.exposed - one.exposed
    least = max(slower, exposed) / CLEARLY_MORE
    limits = [what for what, part in (("compute", slower), ("communication", exposed)) if part >= least > 0]
    limits = limits or ["in the noise"]
    verdict = f"what limits is {' and '.join(limits)}" if efficiency < NEARLY_LINEAR else "linear within the noise"
    added = f"{amount(many.exposed, 's')}, {100 * many.exposed / many.step:.0f} % of the step"
    return [
        f"- **{many.title}, {many.ranks} ranks: {100 * efficiency:.0f} % of linear; {verdict}.**",
        f"  A step takes {amount(many.step, 's')}, on one rank {amount(one.step, 's')}.",
        f"  - Compute takes {many.compute / one.compute:.2f} times as long as on one rank{_why(one, many, device)}.",
        f"  - Communication adds {added if many.exposed > 0 else 'nothing above the noise'}. {_hidden(many, device)}",
    ]


def _why(one: Point, many: Point, device: str) -> str:
    """Say where the time goes that compute takes more than on one rank; a GPU's can't be told from outside."""
    if device != "cpu":
        return ""
    cores = len(os.sched_getaffinity(0))
    left = f"{many.ranks} ranks leave {cores - many.ranks or 'none'} of {cores} cores to the operating system"
    whose = "Horovod's, which polls" if many.arm == "horovod" else "Gloo's and others"
    parts = [
        (
            median(many.thread_s) - median(one.thread_s),
            "more processor time for the same work: ranks share caches and memory (virtual cores: perhaps a real core)",
        ),
        (
            many.waiting - one.waiting,
            f"more without a core: {f'{many.ranks} ranks share {cores}' if many.ranks > cores else left}",
        ),
        (median(many.others_s), f"of a core go to other threads of a rank meanwhile ({whose})"),
    ]
    told = [f"{amount(part, 's')} {what}" for part, what in parts if part >= WORTH_A_WORD * many.compute]
    return f" ({'; '.join(told)})" if told else ""


def _hidden(many: Point, device: str) -> str:
    alone = many.gradients_alone
    assert alone is not None  # since there is more than one rank
    hidden = max(0.0, min(1.0, 1 - many.exposed / alone))
    part = "all" if hidden == 1 else "nothing" if hidden == 0 else f"about {100 * hidden:.0f} %"
    bus = many.bandwidths()[GRADIENT_BYTES][2]
    where = ", on the cores that compute" if device == "cpu" else ", through the host" if many.path == "mpi" else ""
    return (
        f"One all_reduce of {size_of(GRADIENT_BYTES)}, as all gradients have, takes {amount(alone, 's')} by itself "
        f"({PATHS[many.path]}, {bus / 1e9:.2g} GB/s{where}), and the backward pass hides {part} of that."
    )
