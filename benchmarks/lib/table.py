"""Format Markdown tables, lists and quantities.

Covers: quantities with units, tables, the page of a report.
Does not cover: what is in a table (report modules of each benchmark).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def format_amount(value: float | None, unit: str) -> str:
    """Format a value with three digits; seconds below 1 are shown in ms, a missing value as a dash.

    >>> format_amount(0.0123, "s"), format_amount(123.4, "MB"), format_amount(None, "s")
    ('12.3 ms', '123 MB', '-')
    """
    if value is None:
        return "-"
    if unit == "s" and abs(value) < 1:
        value, unit = value * 1000, "ms"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f} {unit}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; a ``|`` in a cell becomes a ``/``."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def bullets(texts: Iterable[str]) -> list[str]:
    """Return the lines of a Markdown list."""
    return [f"- {text}" for text in texts]


def page(title: str, facts: Iterable[str], lines: Iterable[str]) -> str:
    """Return a results page: a title, the facts of the run, then ``lines``."""
    return "\n".join([f"# {title}", "", *bullets(facts), "", *lines])
