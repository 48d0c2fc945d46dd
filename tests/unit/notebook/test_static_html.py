"""Plots of the static view: where mean and range end, and the axis of constant values."""

from __future__ import annotations

import re

import numpy as np

from jupyter_disttrain.features.telemetry.metrics_table import Gathered
from jupyter_disttrain.notebook.views.static_html import MOST_LINES, _plot

RANKS = tuple(range(MOST_LINES + 1))


def plotted(values: np.ndarray) -> str:
    ranks = RANKS[: values.shape[1]]
    steps = np.arange(len(values))
    return _plot(Gathered(name="loss", steps=steps, ranks=ranks, values=values, is_missing=np.isnan(values)))


def labels_of_y(svg: str) -> list[str]:
    return re.findall(r'<text x="58"[^>]*>([^<]*)<', svg)


def test_mean_and_range_end_at_the_last_step_that_all_ranks_have_logged() -> None:
    values = np.ones((3, len(RANKS))) * [[4.0], [2.0], [9.0]]
    values[2, 1:] = np.nan
    svg = plotted(values)
    (mean,) = re.findall(r'<polyline points="([^"]*)"', svg)
    assert len(mean.split()) == 2
    assert "mean 2, range of ranks 0-8" in svg
    assert labels_of_y(svg) == ["4", "2"]


def test_a_constant_has_one_label() -> None:
    svg = plotted(np.full((2, 1), 0.001))
    assert labels_of_y(svg) == ["0.001"]
    ((first, last),) = re.findall(r'<polyline points="[\d.]+,([\d.]+) [\d.]+,([\d.]+)"', svg)
    assert first == last == "80.0"  # the middle


def test_labels_of_close_values_differ() -> None:
    assert labels_of_y(plotted(np.array([[2.3025], [2.3026]]))) == ["2.33", "2.28"]
