"""Draw images/s by number of ranks and bus bandwidth by message size."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .points import cpu_warning, format_size, on_most_ranks, on_one_rank

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .points import Point, Settings

COLORS = {"ddp": "tab:orange", "horovod": "tab:blue"}
MARKERS = {"ddp": "o", "horovod": "s"}


def write(path: Path, settings: Settings, device: str, points: Sequence[Point]) -> None:
    """Draw both panels into a PNG; with one rank there is no second panel."""
    most = on_most_ranks(points)
    figure = Figure(figsize=(10 if most else 5, 4.2), layout=ConstrainedLayoutEngine(wspace=0.06))
    panels = figure.subplots(1, 2 if most else 1, squeeze=False)[0]
    _draw_rates(panels[0], settings, points)
    if most:
        _draw_bandwidths(panels[1], most)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
        axes.legend(frameon=False, loc="upper left")
    size = f"{settings.image} x {settings.image} images"
    title = f"ResNet-50, {settings.batch} images per rank; {cpu_warning(settings, device) or f'{device}, {size}'}"
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)


def _draw_rates(axes: Any, settings: Settings, points: Sequence[Point]) -> None:
    most = max(point.ranks for point in points)
    for index, (strategy, one) in enumerate(on_one_rank(points).items()):
        found = sorted((point for point in points if point.strategy == strategy), key=lambda point: point.ranks)
        rates = [point.rates(settings.batch) for point in found]
        medians = [median(each) for each in rates]
        below = [middle - each[0] for middle, each in zip(medians, rates, strict=True)]
        above = [each[-1] - middle for middle, each in zip(medians, rates, strict=True)]
        axes.plot([0, most], [0, most * settings.batch / one.step], "--", linewidth=1, color=COLORS[strategy])
        shifted = [point.ranks + index * most / 80 for point in found]  # so that the error bars do not overlap
        style = {"color": COLORS[strategy], "marker": MARKERS[strategy], "capsize": 3, "elinewidth": 1}
        axes.errorbar(shifted, medians, yerr=[below, above], label=found[0].title, **style)
        for point, rate in zip(found, medians, strict=True):
            if point.ranks == most > 1:  # all labels would cover the curves; the table has them
                text = f"{100 * point.efficiency(one):.0f} %"
                position = (point.ranks + most / 40, rate)
                axes.annotate(text, position, (4, 0), textcoords="offset points", va="center", color=COLORS[strategy])
    axes.plot([], [], "--", linewidth=1, color="0.4", label="linear")
    axes.xaxis.set_major_locator(FixedLocator(sorted({point.ranks for point in points})))
    axes.set(xlabel="ranks", ylabel="images/s", ylim=(0, None), xlim=(0, most * 1.15))


def _draw_bandwidths(axes: Any, points: Sequence[Point]) -> None:
    sizes: list[int] = []
    for point in points:
        found = {size: bus for size, (_, _, bus) in point.bandwidths().items() if size & (size - 1) == 0}
        sizes = list(found)
        buses = [bus / 1e9 for bus in found.values()]
        axes.plot(sizes, buses, color=COLORS[point.strategy], marker=MARKERS[point.strategy], label=point.title)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes[::2]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(int(size))))
    axes.set(xlabel=f"size of an all_reduce on {points[0].ranks} ranks", ylabel="bus bandwidth, GB/s", ylim=(0, None))
