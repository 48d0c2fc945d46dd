"""Define the parts of a transcript.

Covers: what one rank printed as rows, the lines of the screen that merge equal rows, sections of lines.
"""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from ...protocol.messages import OutputElided

TAIL_ROWS = 20  # last lines kept of what is beyond the bound

# An empty line of rich has only these tags.
_BLANK_HTML = re.compile(r"(?:\s|</?(?:pre|span|code|p|br)\b[^<>]*>)*", re.IGNORECASE)
# What differs between equal displays of ranks: addresses of objects, random ids in HTML's tags, styles and scripts.
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
_RANDOM_ID = re.compile(r"\bT_[0-9a-f]{5}|[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}")
_MARKUP = re.compile(r"<(script|style)\b.*?</\1\s*>|<[^>]*>", re.DOTALL | re.IGNORECASE)


@dataclass(eq=False, slots=True)
class Row:
    """A line of one rank, a result of several lines, or the label of a display."""

    text: str
    stream: str  # "stdout", "stderr", "result", "label", "note"
    rank: int = -1
    number: int = 0  # of all rows, in the order in which they were begun
    display: Section | None = None
    alike: Hashable = None  # what equal rows have in common; None: stream and text
    is_open: bool = False  # it may still grow
    is_rewritten: bool = False  # in place, as a progress bar is
    line: Line | None = None  # where it stays until the cell ends

    @property
    def content(self) -> Hashable:
        """What equal rows have in common; a row that may grow equals none."""
        return self if self.is_open else self.alike or (self.stream, self.text)


@dataclass(eq=False, slots=True)
class Line:
    """A line of the screen: equal rows, of which the first is shown."""

    rows: list[Row]
    ranks: frozenset[int]
    section: Section | None = None

    @property
    def row(self) -> Row:
        """The row that is shown."""
        return self.rows[0]


@dataclass(eq=False, slots=True)
class Section:
    """A part of the screen: lines, or one rich display."""

    lines: list[Line] = field(default_factory=list)
    data: dict[str, Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    ranks: frozenset[int] = frozenset()  # of a display
    is_dirty: bool = True
    place: int = -1  # position on the screen at the last draw

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


class RankOutput:
    """The output of one rank, in order."""

    def __init__(self, rank: int, numbers: Iterator[int]) -> None:
        self.rank = rank
        self.rows: list[Row] = []
        self.settled = 0  # rows at the start that stay in their lines until the cell ends
        self.last = -1  # the number of the last of these lines
        self.is_stale = False  # a row changed that has settled in a line of several ranks
        self.is_full = False  # following lines are beyond the bound
        self.hidden_lines = self.hidden_bytes = 0  # beyond the bound
        self.tail: deque[Row] = deque(maxlen=TAIL_ROWS)  # the last of these lines
        self._numbers = numbers

    def add(
        self, text: str, stream: str, *, is_open: bool = False, alike: Hashable = None, display: Section | None = None
    ) -> Row:
        """Add a row at the end."""
        row = Row(text, stream, self.rank, next(self._numbers), display, alike, is_open=True)
        self.rows.append(row)
        if not is_open:
            self.finish(row)
        return row

    def add_lines(self, texts: list[str], stream: str) -> list[Row]:
        """Add complete lines; returns the last rows."""
        if not self.is_full:
            return [self.add(text, stream) for text in texts]
        rows = [Row(text, stream, self.rank) for text in texts[-TAIL_ROWS:]]
        self.tail.extend(rows)
        self._count_hidden(texts)
        return rows

    def rewrite(self, row: Row, text: str) -> None:
        """Change a row; it is open from then on."""
        row.is_rewritten = row.is_rewritten or not text.startswith(row.text)
        row.text, row.is_open = text, True
        if row.line is not None and row.line.section is not None:
            row.line.section.is_dirty = True
            self.is_stale = self.is_stale or len(row.line.rows) > 1

    def finish(self, row: Row) -> None:
        """Mark a row as complete."""
        was_open, row.is_open = row.is_open, False
        if was_open and self.is_full and row.display is None and self.erase(row):
            self.tail.append(row)
            self._count_hidden([row.text])

    def erase(self, row: Row) -> bool:
        """Remove a row; returns whether it was on the screen."""
        at = next((at for at in reversed(range(len(self.rows))) if self.rows[at] is row), None)
        if at is None:
            return False
        del self.rows[at]
        self.is_stale = self.is_stale or at < self.settled
        return True

    def hide(self, rows: Sequence[Row]) -> None:
        """Remove rows from the screen that are beyond the bound."""
        hidden = set(rows)
        self.rows = [row for row in self.rows if row not in hidden]
        self.tail = deque([*rows, *self.tail], maxlen=TAIL_ROWS)
        self._count_hidden([row.text for row in rows])
        self.is_full = True

    def add_unsent(self, record: OutputElided) -> None:
        """Count output that the rank did not even send."""
        self.hidden_lines += record.lines
        self.hidden_bytes += record.size_bytes
        self.tail.extend(Row(text, record.stream, self.rank) for text in record.tail.removesuffix("\n").split("\n"))

    def _count_hidden(self, texts: Sequence[str]) -> None:
        self.hidden_lines += len(texts)
        self.hidden_bytes += sum(map(len, texts)) + len(texts)


def content_of_result(text: str) -> Hashable:
    """Return what equal results have in common."""
    return "result", _ADDRESS.sub("at 0x", text)


def content_of_display(data: dict[str, Any]) -> Hashable:
    """Return what equal displays have in common."""
    markup = data.get("text/html")
    if isinstance(markup, str):
        data = data | {"text/html": _MARKUP.sub(lambda tag: _RANDOM_ID.sub("", tag[0]), markup)}
    return "display", _ADDRESS.sub("at 0x", json.dumps(data, sort_keys=True, default=str))
