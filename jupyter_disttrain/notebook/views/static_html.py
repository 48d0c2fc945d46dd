"""Draw a cluster as a still picture, for a saved notebook and nbconvert.

Covers: the table of ranks and the plots of metrics as HTML with SVG, without a script.
Does not cover: the live view (``widget``).
"""

from __future__ import annotations

import html
import math
import time
from typing import TYPE_CHECKING, Any

from ...protocol.ranks import label_ranks
from .status_text import rank_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from ...client import Cluster
    from ...features.telemetry.metrics_table import Gathered

# As in labextension/src/view/plots/colours.ts, which gives the reason.
COLOURS = ("#0072b2", "#c27800", "#009e73", "#d55e00", "#c76fa1", "#2e8fc4", "#8f8300", "#8a6fd1")
DASHES = ("", "8 3", "2 2", "8 3 2 3", "14 4", "4 4", "14 3 2 3", "5 2 1 2")
MOST_PLOTS = 12
MOST_LINES = 8  # more ranks than this are drawn as their mean with a band
WIDTH, HEIGHT = 334, 144
LEFT, RIGHT, TOP, BOTTOM = 62, 8, 34, 18
POINTS = 300  # points of a line
MIN_SPAN = 0.02  # of y, as a fraction of the largest value; as in labextension/src/view/plots/scales.ts
MOST_GAPS = 50
WRONG = "#d00000"
TITLES = ("rank", "state", "cell", "steps/s", "CPU", "memory", "GPU use", "device", "host")


def plots(cluster: Cluster) -> list[str]:
    """Return the metrics that were logged last, each as HTML."""
    return [_plot(found) for found in cluster.metrics.gather_last(MOST_PLOTS)]


def render_static(cluster: Cluster, snapshot: dict[str, Any], drawn: Sequence[str]) -> str:
    """Return the picture as HTML, with plots that were drawn before."""
    seen = time.strftime("%H:%M:%S")
    parts = [f"<b>{html.escape(cluster.name)}</b> <small>as of {seen}</small>", _table(snapshot["ranks"])]
    parts += drawn
    parts += [f"<p>{html.escape(remark)}</p>" for remark in snapshot["remarks"]]
    return f'<div class="jdt-static" data-cluster="{html.escape(cluster.cluster_id)}">{"".join(parts)}</div>'


def _table(ranks: Sequence[dict[str, Any]]) -> str:
    rows = [rank_columns(rank) for rank in ranks]
    kept = [title for title in TITLES if any(row[title] for row in rows)]
    cells = "".join(f"<th>{title}</th>" for title in kept)
    lines = "".join(f"<tr>{''.join(f'<td>{html.escape(row[title])}</td>' for title in kept)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"


def _plot(found: Gathered) -> str:
    """Return one metric as SVG; values that are not finite are gaps."""
    import numpy as np  # noqa: PLC0415  (without metrics a notebook doesn't need it)

    is_band = len(found.ranks) > MOST_LINES
    # A band ends at the last step that all ranks have logged.
    end = len(found.steps) - (int(found.is_missing[::-1].argmin(axis=0).max()) if is_band else 0)
    shown = slice(0, end, max(1, math.ceil(end / POINTS)))
    steps = found.steps[shown].astype(float)
    lines = [line[shown] for line in ((found.minimum, found.maximum, found.mean) if is_band else found.values.T)]
    finite = np.concatenate([line[np.isfinite(line)] for line in lines])
    title = html.escape(found.name)
    if not len(finite):
        return f"<p>{title}: no finite value</p>"
    low, high = float(finite.min()), float(finite.max())
    is_constant = low == high
    missing_span = MIN_SPAN * (max(abs(low), abs(high)) or 1.0) - (high - low)
    if missing_span > 0:
        low, high = low - missing_span / 2, high + missing_span / 2
    first, last = steps[0], steps[-1]
    across = (WIDTH - LEFT - RIGHT) / ((last - first) or 1.0)
    up = (HEIGHT - TOP - BOTTOM) / (high - low)

    def place(line: np.ndarray) -> list[str]:
        with np.errstate(invalid="ignore", over="ignore"):
            points = zip(LEFT + (steps - first) * across, TOP + (high - line) * up, strict=True)
        return [f"{x:.1f},{y:.1f}" for x, y in points if math.isfinite(y)]

    drawn = []
    if is_band:
        edge = " ".join(place(lines[1]) + place(lines[0])[::-1])
        drawn.append(f'<polygon points="{edge}" fill="{COLOURS[0]}" fill-opacity="0.2"/>')
    for rank, line in [(0, lines[2])] if is_band else zip(found.ranks, lines, strict=True):
        points = " ".join(place(line))
        drawn.append(f'<polyline points="{points}" fill="none" {_style(rank)} stroke-width="1.75"/>')
    bottom = HEIGHT - BOTTOM
    is_nan = (np.isnan(found.values) & ~found.is_missing).any(axis=1)
    gaps = LEFT + (found.steps[is_nan & (found.steps <= last)][:MOST_GAPS] - first) * across
    drawn += [f'<path d="M{x:.1f},{bottom}v5" stroke="{WRONG}"><title>NaN</title></path>' for x in gaps]
    right = f'x="{LEFT - 4}" text-anchor="end"'
    texts = (
        f'<text x="{LEFT}" y="13" font-weight="bold">{title}</text>',
        f'<text x="{LEFT}" y="27">{_legend(found, end, is_band=is_band)}</text>',
        f'<text {right} y="{(TOP + bottom) // 2 + 4}">{finite[0]:.4g}</text>'
        if is_constant
        else f'<text {right} y="{TOP + 8}">{high:.3g}</text><text {right} y="{bottom}">{low:.3g}</text>',
        f'<text x="{LEFT}" y="{HEIGHT - 4}">{int(first)}</text>',
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{int(last)}</text>',
    )
    axes = f'<path d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}" fill="none" stroke="#999"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="11" fill="#888" role="img" aria-label="{title}">{axes}{"".join(drawn)}{"".join(texts)}</svg>'
    )


def _style(rank: int) -> str:
    """Return a rank's colour and dash."""
    dash = DASHES[(rank + rank // len(COLOURS)) % len(DASHES)]
    return f'stroke="{COLOURS[rank % len(COLOURS)]}" stroke-dasharray="{dash or "none"}"'


def _legend(found: Gathered, end: int, *, is_band: bool) -> str:
    """Return each line's rank, with the last values."""
    if is_band:
        return f"mean {found.mean[end - 1]:.3g}, range of {label_ranks(found.ranks)}"
    spans = (
        f'<tspan fill="{COLOURS[rank % len(COLOURS)]}">rank {rank}: {last:.3g}</tspan>'
        for rank, last in zip(found.ranks, found.values[-1], strict=True)
    )
    return " ".join(spans)
