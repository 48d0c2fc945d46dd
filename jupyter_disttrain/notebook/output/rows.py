"""Define the parts of a transcript.

Covers: lines, and the sections of the screen that hold them.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...protocol.messages import OutputElided

TAIL_ROWS = 20  # last lines kept of what is beyond the bound
SECTION_ROWS = 500  # lines that are drawn together
SLOW_SECTION_ROWS = 100  # lines drawn together once they were drawn many times
SLOW_SECTION_DRAWS = 50
SEARCHED_ROWS = 100  # equal rows searched

# An empty line of rich has only these tags.
_BLANK_HTML = re.compile(r"(?:\s|</?(?:pre|span|code|p|br)\b[^<>]*>)*", re.IGNORECASE)

row_key = attrgetter("key")


@dataclass(eq=False, slots=True)
class Row:
    """A line, or a result of several lines."""

    key: tuple[float, ...]  # sort key: rows are in the order of their keys
    text: str
    stream: str  # "stdout", "stderr", "result", "label"
    ranks: frozenset[int]
    section: Section
    open: bool = False  # it may still grow
    rewritten: bool = False  # in place, as a progress bar is
    like: Any = None  # key that equal rows have in common


@dataclass(eq=False, slots=True)
class Section:
    """A part of the screen: lines, or one rich display."""

    rows: list[Row] = field(default_factory=list)
    data: dict[str, Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    dirty: bool = True
    place: int = -1  # position on the screen at the last draw
    of_ranks: tuple[int, ...] = ()  # ranks of the display at the last draw
    drawn: str = ""  # its lines at the last draw
    draws: int = 0  # number of draws

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not self.data and not self.rows

    @property
    def is_blank(self) -> bool:
        """Whether it is a display without visible content."""
        data = self.data
        if data is None:
            return False
        markup = data.get("text/html")
        if isinstance(markup, str):
            return _BLANK_HTML.fullmatch(markup) is not None and set(data) <= {"text/html", "text/plain"}
        return not "".join(map(str, data.values())).strip()

    @property
    def is_full(self) -> bool:
        """Whether new lines need another section: this one is long, or grows so slowly that redrawing it costs more."""
        return len(self.rows) >= (SLOW_SECTION_ROWS if self.draws >= SLOW_SECTION_DRAWS else SECTION_ROWS)


@dataclass(slots=True)
class ElidedRows:
    """Output beyond the bound."""

    lines: int = 0
    size_bytes: int = 0
    tails: dict[int, deque[tuple[str, str]]] = field(default_factory=dict)  # by rank: stream, text of the last lines

    def add(self, rank: int, stream: str, texts: list[str]) -> None:
        """Count lines."""
        self.lines += len(texts)
        self.size_bytes += sum(map(len, texts)) + len(texts)
        self.keep(rank, stream, texts)

    def keep(self, rank: int, stream: str, texts: list[str]) -> None:
        """Keep the last lines."""
        tail = self.tails.setdefault(rank, deque(maxlen=TAIL_ROWS))
        tail.extend((stream, text) for text in texts[-TAIL_ROWS:])

    def add_unsent(self, rank: int, record: OutputElided) -> None:
        """Count output that a rank did not even send."""
        self.lines += record.lines
        self.size_bytes += record.size_bytes
        self.keep(rank, record.stream, record.tail.removesuffix("\n").split("\n"))


@cache
def alone(rank: int) -> frozenset[int]:
    """Return the set of one rank; rows share it, because there are many."""
    return frozenset((rank,))


def insert_row(rows: list[Row], row: Row) -> None:
    """Insert a row in order; nearly always the new one is the last."""
    if not rows or rows[-1].key < row.key:
        rows.append(row)
    else:
        insort(rows, row, key=row_key)


class RowsByContent:
    """Rows by content; rows of equal content are in order."""

    def __init__(self) -> None:
        self._rows: dict[Any, Row | list[Row]] = {}  # most lines have no equal

    def __contains__(self, like: Any) -> bool:
        """Whether there is a row of this content."""
        return like in self._rows

    def after(self, key: tuple[float, ...], like: Any) -> list[Row]:
        """Return the next rows of a content below ``key``."""
        rows = self._rows.get(like, [])
        if isinstance(rows, Row):
            return [rows] if rows.key > key else []
        start = bisect_right(rows, key, key=row_key)
        return rows[start : start + SEARCHED_ROWS]

    def add(self, row: Row) -> None:
        """Add a row."""
        rows = self._rows.setdefault(row.like, row)
        if rows is row:
            return
        if isinstance(rows, Row):
            rows = self._rows[row.like] = [rows]
        insert_row(rows, row)

    def remove(self, row: Row) -> None:
        """Remove a row."""
        rows = self._rows.get(row.like, [])
        if rows is row:
            del self._rows[row.like]
        if not isinstance(rows, list):
            return
        at = bisect_left(rows, row.key, key=row_key)
        if at < len(rows) and rows[at] is row:
            del rows[at]
