"""What the ranks of one cell have said, merged.

Covers: which lines and displays are alike, in what order they stand, the bound on the screen.
Does not cover: control characters (``terminal``), putting it on a screen (``screen``).

Each rank reads as a sequence, and the transcript is one merge of these sequences: the order within a rank never changes,
and a line that a rank says is shown with the same line of other ranks if such a line stands after the last thing that
this rank said. So the outcome does not depend on which rank was faster, as long as the ranks say the same. Finding the
line is a look-up: the cost of n lines is n.
"""

from __future__ import annotations

import json
from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from .terminal import Writer

SECTION_ROWS = 500  # lines that are drawn together
TAIL_ROWS = 20  # of what is beyond the bound


@dataclass(eq=False, slots=True)
class Row:
    """A line, or a result of several lines."""

    sequence: int  # where it stands
    text: str
    stream: str  # "stdout", "stderr", "result", "label"
    ranks: set[int]
    section: Section
    open: bool = False  # it may still grow


@dataclass(eq=False, slots=True)
class Section:
    """A part of the screen: lines, or one rich display."""

    rows: list[Row] = field(default_factory=list)
    data: dict[str, Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    dirty: bool = True
    shown_as: str | None = None  # the screen's name for it
    drawn: str = ""  # its lines as they were last drawn


@dataclass(slots=True)
class Hidden:
    """What is beyond the bound."""

    lines: int = 0
    size_bytes: int = 0
    ranks: set[int] = field(default_factory=set)
    tail: deque[tuple[int, str, str]] = field(default_factory=lambda: deque(maxlen=TAIL_ROWS))  # rank, stream, text


class Transcript:
    """Merge what ranks say.

    Parameters
    ----------
    max_lines, max_bytes
        The bound on what is shown; beyond it lines are counted, and the last few are kept.
    """

    def __init__(self, max_lines: int, max_bytes: int) -> None:
        self.sections: list[Section] = []
        self.hidden = Hidden()
        self._left_lines, self._left_bytes = max_lines, max_bytes
        self._next = 0
        self._cursor: dict[int, int] = {}  # by rank: the sequence of the last thing it said
        self._alike: dict[Any, list[Row]] = {}
        self._writers: dict[tuple[int, str], Writer] = {}
        self._displays: dict[tuple[int, str], Row] = {}
        self._clear_first: set[int] = set()

    # What ranks say

    def say(self, rank: int, stream: str, text: str) -> None:
        """Take text of one rank."""
        self._clear_if_due(rank)
        writer = self._writers.get((rank, stream))
        if writer is None:
            writer = self._writers[rank, stream] = Writer(_Paper(self, rank, stream))
        writer.write(text)

    def show(
        self, rank: int, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, kind: str
    ) -> None:
        """Take a display or a result of one rank."""
        self._clear_if_due(rank)
        if kind == "update_display_data":
            self._update(rank, data, metadata, display_id)
            return
        if set(data) <= {"text/plain"} and display_id is None:
            self.add(rank, "result", data.get("text/plain", ""))
            return
        key = None if display_id else ("rich", json.dumps(data, sort_keys=True, default=str))
        row = self._find(rank, key) if key else None
        if row is None:
            row = self._new_row(rank, "label", "")
            section = Section(data=data, metadata=metadata)
            self.sections.append(section)
            if key:
                self._alike.setdefault(key, []).append(row)
        else:
            self._join(rank, row)
        if display_id:
            self._displays[rank, display_id] = row

    def _update(self, rank: int, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None) -> None:
        row = self._displays.get((rank, display_id or ""))
        if row is None:
            return  # of an earlier cell, or cleared: Jupyter ignores these too
        section = self.sections[self.sections.index(row.section) + 1]
        section.data, section.metadata, section.dirty = data, metadata, True

    def clear(self, rank: int, *, wait: bool) -> None:
        """Take back what a rank said; with ``wait`` only when it says something new."""
        if wait:
            self._clear_first.add(rank)
            return
        self._clear_first.discard(rank)
        for key in [key for key in self._writers if key[0] == rank]:
            del self._writers[key]
        for section in list(self.sections):
            for row in [row for row in section.rows if rank in row.ranks]:
                row.ranks.discard(rank)
                section.dirty = True
                if not row.ranks:
                    self._remove(row)
        self._displays = {key: row for key, row in self._displays.items() if key[0] != rank}

    def _clear_if_due(self, rank: int) -> None:
        if rank in self._clear_first:
            self.clear(rank, wait=False)

    def close(self) -> None:
        """The cell has ended: unfinished lines are finished."""
        for writer in self._writers.values():
            writer.close()
        self._sort_last_results()

    def _sort_last_results(self) -> None:
        """Put the values of the last expression in the order of the ranks: they came as each rank ended."""
        rows = self.sections[-1].rows if self.sections else []
        start = len(rows)
        while start and rows[start - 1].stream == "result":
            start -= 1
        rows[start:] = sorted(rows[start:], key=lambda row: min(row.ranks))

    # Rows

    def add(self, rank: int, stream: str, text: str) -> Row | None:
        """Place a complete line: with its like, or at the end; None beyond the bound."""
        key = (stream, text)
        row = self._find(rank, key)
        if row is not None:
            self._join(rank, row)
            return row
        size = len(text)
        if self._left_lines <= 0 or (size > self._left_bytes and self.sections):
            self._hide(rank, stream, text)
            return None
        row = self._new_row(rank, stream, text)
        self._alike.setdefault(key, []).append(row)
        return row

    def _find(self, rank: int, key: Any) -> Row | None:
        """Return the first row of this content after the rank's last, if the rank isn't in it."""
        rows = self._alike.get(key)
        if not rows:
            return None
        index = bisect_right(rows, self._cursor.get(rank, -1), key=lambda row: row.sequence)
        return next((row for row in rows[index:] if rank not in row.ranks), None)

    def _join(self, rank: int, row: Row) -> None:
        row.ranks.add(rank)
        row.section.dirty = True
        self._cursor[rank] = row.sequence

    def _new_row(self, rank: int, stream: str, text: str, *, is_open: bool = False) -> Row:
        self._left_lines -= 1
        self._left_bytes -= len(text)
        section = self.sections[-1] if self.sections else None
        if section is None or section.data is not None or len(section.rows) >= SECTION_ROWS:
            section = Section()
            self.sections.append(section)
        row = Row(self._next, text, stream, {rank}, section, is_open)
        self._next += 1
        section.rows.append(row)
        section.dirty = True
        if not is_open:
            self._cursor[rank] = row.sequence
        return row

    def _finish(self, rank: int, row: Row) -> Row:
        """Close an open row: it joins its like, or stays, or is beyond the bound."""
        row.section.dirty = True
        alike = self._find(rank, (row.stream, row.text))
        if alike is not None:
            row.section.rows.remove(row)
            self._join(rank, alike)
            return alike
        row.open = False
        self._left_bytes -= len(row.text)
        if self._left_lines < 0:
            row.section.rows.remove(row)
            self._hide(rank, row.stream, row.text)
            return row
        self._cursor[rank] = max(self._cursor.get(rank, -1), row.sequence)
        insort(self._alike.setdefault((row.stream, row.text), []), row, key=lambda other: other.sequence)
        return row

    def _forget(self, row: Row) -> None:
        """No longer offer a row to other ranks."""
        rows = self._alike.get((row.stream, row.text), [])
        if row in rows:
            rows.remove(row)

    def _remove(self, row: Row) -> None:
        section = row.section
        section.rows.remove(row)
        section.dirty = True
        self._forget(row)
        if row.stream == "label":
            self.sections[self.sections.index(section) + 1].data = {}
            self.sections[self.sections.index(section) + 1].dirty = True

    def _hide(self, rank: int, stream: str, text: str) -> None:
        self.hidden.lines += 1
        self.hidden.size_bytes += len(text) + 1
        self.hidden.ranks.add(rank)
        self.hidden.tail.append((rank, stream, text))

    def hide_unsent(self, rank: int, stream: str, lines: int, size_bytes: int, tail: str) -> None:
        """Count what a rank did not even send."""
        self.hidden.lines += lines
        self.hidden.size_bytes += size_bytes
        self.hidden.ranks.add(rank)
        self.hidden.tail.extend((rank, stream, line) for line in tail.splitlines()[-TAIL_ROWS:])


class _Paper:
    """The lines of one stream of one rank, as its :class:`Writer` sees them."""

    def __init__(self, transcript: Transcript, rank: int, stream: str) -> None:
        self._transcript = transcript
        self._rank = rank
        self._stream = stream

    def open_row(self) -> Row:
        return self._transcript._new_row(self._rank, self._stream, "", is_open=True)  # noqa: SLF001

    def rewrite(self, row: Row, text: str) -> Row:
        """Change the line; what other ranks share with it stays theirs."""
        if row.open:
            row.text = text
            row.section.dirty = True
            return row
        section = row.section
        section.dirty = True
        if row.ranks == {self._rank}:
            self._transcript._forget(row)  # noqa: SLF001
            row.open, row.text = True, text
            return row
        row.ranks.discard(self._rank)
        own = Row(row.sequence, text, self._stream, {self._rank}, section, open=True)
        section.rows.insert(section.rows.index(row) + 1, own)
        return own

    def finish(self, row: Row) -> Row:
        """Merge the line with its like, now that it can't change any more."""
        if not row.open:
            return row
        return self._transcript._finish(self._rank, row)  # noqa: SLF001

    def add_lines(self, texts: list[str]) -> Row | None:
        """Add complete lines; returns the last, None beyond the bound."""
        add = self._transcript.add
        row = None
        for text in texts:
            row = add(self._rank, self._stream, text)
        return row
