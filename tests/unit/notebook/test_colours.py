"""Colours and dashes of ranks: contrast, distinct styles, and the same in the live and the static view."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from jupyter_disttrain.notebook.views.static_html import COLOURS, DASHES, _style

SOURCE = Path(__file__).parents[3] / "labextension" / "src" / "view" / "plots" / "colours.ts"
BACKGROUNDS = ("#ffffff", "#212121", "#111111", "#1e1e1e")  # JupyterLab light and dark, VS Code dark


def luminance(colour: str) -> float:
    """Relative luminance after WCAG 2.1."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_each_line_contrasts_with_every_background() -> None:
    assert min(contrast(colour, back) for colour in COLOURS for back in BACKGROUNDS) >= 3


def test_64_ranks_are_distinct_and_neighbours_differ_by_dash() -> None:
    assert len({_style(rank) for rank in range(64)}) == 64
    dashes = [_style(rank).split("dasharray")[1] for rank in range(64)]
    assert all(one != other for one, other in itertools.pairwise(dashes))


def test_live_view_has_the_same_colours_and_dashes() -> None:
    source = SOURCE.read_text()
    assert tuple(re.findall(r"'(#[0-9a-f]{6})'", source.split("];")[0])) == COLOURS
    dashes = re.findall(r"^  \[([\d, ]*)\]", source.split("const DASHES")[1].split("];")[0], re.MULTILINE)
    assert tuple(dash.replace(",", "") for dash in dashes) == DASHES
