"""Explain what limits scaling, from compute and communication in a step.

Covers: the verdict per strategy, where additional compute time is spent, how much communication is hidden.
Does not cover: the definitions of the quantities (points).
"""

from __future__ import annotations

from statistics import median

from benchmarks.lib.environment import core_count
from benchmarks.lib.table import format_amount

from .points import GRADIENT_BYTES, PATHS, Point, format_size

LINEAR_EFFICIENCY = 0.97  # the rest is noise
DOMINANT_FACTOR = 3.0  # a limit this many times larger than the other is named alone
MIN_SHARE = 0.02  # smaller shares of compute are not explained


def explain_limits(one: Point, many: Point, device: str) -> list[str]:
    """Explain why ``many`` ranks are less than ``many.ranks`` times as fast as ``one``, as lines of Markdown."""
    efficiency, slower, exposed = many.efficiency(one), many.compute - one.compute, many.exposed - one.exposed
    least = max(slower, exposed) / DOMINANT_FACTOR
    limits = [name for name, seconds in (("compute", slower), ("communication", exposed)) if seconds >= least > 0]
    verdict = "linear within the noise"
    if efficiency < LINEAR_EFFICIENCY:
        verdict = f"limited by {' and '.join(limits)}" if limits else "no limit above the noise"
    slowdown = f"{many.compute / one.compute:.2f} times as long as on one rank"
    added = f"{format_amount(many.exposed, 's')}, {100 * many.exposed / many.step:.0f} % of the step"
    return [
        f"- **{many.title}, {many.ranks} ranks: {100 * efficiency:.0f} % of linear; {verdict}.**",
        f"  A step takes {format_amount(many.step, 's')}, on one rank {format_amount(one.step, 's')}.",
        f"  - Compute takes {slowdown}{_compute(one, many, device)}.",
        f"  - Communication adds {added if many.exposed > 0 else 'nothing above the noise'}. {_hidden(many, device)}",
    ]


def _compute(one: Point, many: Point, device: str) -> str:
    """Explain the additional compute time, which is known only on CPU."""
    if device != "cpu":
        return ""
    cores = core_count()
    if many.ranks > cores:
        sharing = f"{many.ranks} ranks share {cores} cores"
    else:
        sharing = f"{many.ranks} ranks leave {cores - many.ranks or 'none'} of {cores} cores to the operating system"
    owner = "Horovod's, which polls" if many.strategy == "horovod" else "Gloo's and others"
    parts = (
        (
            median(many.thread_s) - median(one.thread_s),
            "more processor time for the same work: ranks share caches, memory and possibly physical cores",
        ),
        (many.waiting - one.waiting, f"more without a core: {sharing}"),
        (median(many.others_s), f"of processor time in other threads of a rank ({owner})"),
    )
    texts = [f"{format_amount(part, 's')} {text}" for part, text in parts if part >= MIN_SHARE * many.compute]
    return f" ({'; '.join(texts)})" if texts else ""


def _hidden(many: Point, device: str) -> str:
    """Explain how much of the all_reduce of the gradients is hidden by the backward pass."""
    alone = many.gradients_alone
    assert alone is not None  # since there is more than one rank
    hidden = max(0.0, min(1.0, 1 - many.exposed / alone))
    part = "all" if hidden == 1 else "nothing" if hidden == 0 else f"about {100 * hidden:.0f} %"
    bus = many.bandwidths()[GRADIENT_BYTES][2]
    where = ", on the cores that compute" if device == "cpu" else ", through the host" if many.path == "mpi" else ""
    return (
        f"One all_reduce of {format_size(GRADIENT_BYTES)}, the size of all gradients, takes "
        f"{format_amount(alone, 's')} without compute ({PATHS[many.path]}, {bus / 1e9:.2g} GB/s{where}); the backward "
        f"pass hides {part} of it."
    )
