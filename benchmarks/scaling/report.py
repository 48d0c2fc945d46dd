"""Write the results of ``benchmarks.scaling`` as Markdown.

Covers: the facts of the workload, the tables, the definitions below them.
Does not cover: measuring (measure), the explanation of limits (limits), drawing (plot).
"""

from __future__ import annotations

from importlib.metadata import version
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.lib.table import bullets, format_amount, markdown_table

from .limits import explain_limits
from .points import PARAMETERS, cpu_warning, format_size, on_most_ranks, on_one_rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .points import Point, Settings

DEFINITIONS = """\
- images/s: of all ranks together, from the step of the slowest rank; median, in brackets the range.
- efficiency: images/s over as many times the images/s of one rank of the same strategy; the batch per rank is the same
  at every number of ranks (Horovod, docs/benchmarks.rst).
- compute: the same step on as many ranks at once, without communication: DDP under `no_sync()`, Horovod with a plain
  optimizer in place of `DistributedOptimizer`.
- exposed: step minus compute, block by block, alternating: what communication adds to a step, including the work of DDP
  and Horovod for it (copies into buckets, hooks), without what the backward pass hides. A value below zero is noise.
- gradients alone: one all_reduce of as many bytes as all gradients have, when nothing else runs."""

BANDWIDTHS = """\
Bandwidths as in nccl-tests (doc/PERFORMANCE.md): algbw = size / time, busbw = algbw * 2 (n - 1) / n, in GB/s of 10^9
bytes. Time is that of the slowest rank, of consecutive calls."""


def facts(settings: Settings, device: str, strategies: Sequence[str]) -> list[str]:
    """Return the facts of the workload."""
    data = f"{settings.batch} synthetic images of {settings.image} x {settings.image} pixels per rank and step"
    where = (
        "ranks on CPU with one torch thread each, at every number of ranks"
        if device == "cpu"
        else f"one {device} per rank; TF32 in convolutions, as is torch's default"
    )
    repetitions = f"rounds, each with new clusters: {settings.rounds}; blocks per round: {settings.blocks}"
    found = [
        f"ResNet-50 v1.5, {PARAMETERS:,} parameters in float32; {data}; SGD with momentum",
        where,
        f"{repetitions}; steps per block: {settings.steps}, after a warm-up",
    ]
    return [*found, f"Horovod {version('horovod')}"] if "horovod" in strategies else found


def markdown(
    facts: Sequence[str], settings: Settings, device: str, points: Sequence[Point], notes: Sequence[str], plot: str
) -> str:
    """Return the whole page."""
    lines = ["# ResNet-50 by number of ranks", ""]
    warning = cpu_warning(settings, device)
    lines += [f"**{warning[0].upper()}{warning[1:]}.**", ""] if warning else []
    lines += [*bullets([*facts, *notes]), ""]
    lines += [f"![Images/s by number of ranks; bus bandwidth by message size]({plot})", ""]
    lines += ["## Images/s", "", *_scaling_table(settings, points), "", DEFINITIONS, ""]
    most = on_most_ranks(points)
    if most:
        one = on_one_rank(points)
        limits = [line for point in most for line in explain_limits(one[point.strategy], point, device)]
        lines += ["## Limits", "", *limits, ""]
        lines += [f"## all_reduce on {most[0].ranks} ranks", "", *_bandwidth_table(most), "", BANDWIDTHS]
    return "\n".join(lines).rstrip()


def _scaling_table(settings: Settings, points: Sequence[Point]) -> list[str]:
    head = ("", "ranks", "images/s", "efficiency", "step", "compute", "exposed", "of the step", "gradients alone")
    one = on_one_rank(points)
    rows = []
    for point in points:
        rates = point.rates(settings.batch)
        rate = f"{median(rates):.1f} ({rates[0]:.1f}-{rates[-1]:.1f})"
        efficiency = f"{100 * point.efficiency(one[point.strategy]):.0f} %"
        times = [format_amount(seconds, "s") for seconds in (point.step, point.compute, point.exposed)]
        share = f"{100 * point.exposed / point.step:.0f} %"
        alone = format_amount(point.gradients_alone, "s")
        rows.append([point.title, str(point.ranks), rate, efficiency, *times, share, alone])
    return markdown_table(head, rows)


def _bandwidth_table(points: Sequence[Point]) -> list[str]:
    head = ["size"]
    for point in points:
        head += [f"{point.title}: time", "algbw", "busbw"]
    bandwidths = [point.bandwidths() for point in points]
    rows = []
    for size in bandwidths[0]:
        row = [format_size(size)]
        for found in bandwidths:
            time, algorithm, bus = found[size]
            row += [_time(time), _gigabytes(algorithm), _gigabytes(bus)]
        rows.append(row)
    return markdown_table(head, rows)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else format_amount(seconds, "s")


def _gigabytes(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.3f}" if bandwidth >= 1e6 else "< 0.001"
