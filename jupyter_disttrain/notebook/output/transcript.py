"""Merge the output of a cell's ranks.

Covers: which lines and displays are equal, their order, the bound on the screen.
Does not cover: control characters (``terminal``), drawing (``renderer``).

Each rank's output is a sequence, and the transcript is one merge of these sequences: the order within a rank never
changes. While the cell runs, a line that another rank printed too, after the last one that both printed, is shown once;
what the slower rank alone printed before it moves in front of it. Finding a line is a look-up and moving is limited to
a few lines: the cost of n lines is O(n). When the cell has ended, the sequences are merged once more (``merge``), and
that result does not depend on which rank was faster.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from itertools import pairwise
from typing import Any

from .merge import merge
from .rows import SECTION_ROWS, SLOW_SECTION_ROWS, ElidedRows, Row, RowsByContent, Section, alone, insert_row, row_key
from .similarity import like_display, like_result
from .terminal import Writer

MOVABLE_ROWS = 1000  # rows of one rank alone that may still move in front of a common one
GROUPED_ROWS = 50  # while the cell runs, up to so many own lines of each rank are put in rank order


class Transcript:
    """Merge the output of ranks.

    Parameters
    ----------
    max_lines, max_bytes
        The bound on what is shown; beyond it lines are counted, and the last few are kept.
    """

    def __init__(self, max_lines: int, max_bytes: int) -> None:
        self.sections: list[Section] = []
        self.hidden = ElidedRows()
        self._max_lines = self._left_lines = max_lines
        self._left_bytes = max_bytes
        self._is_full = False
        self._count = 0
        self._common: dict[int, tuple[float, ...]] = {}  # by rank: key of the last row that it can't move past
        self._private: dict[int, list[Row]] = {}  # by rank: the rows after it that no other rank printed
        self._by_content = RowsByContent()
        self._writers: dict[tuple[int, str], Writer] = {}
        self._displays: dict[tuple[int, str], Row] = {}
        self.of_earlier_cells: dict[tuple[int, str], tuple[dict[str, Any], dict[str, Any]]] = {}  # updates
        self._clear_first: set[int] = set()

    # Output of ranks

    def add_text(self, rank: int, stream: str, text: str) -> None:
        """Add text of one rank."""
        self._clear_if_due(rank)
        writer = self._writers.get((rank, stream))
        if writer is None:
            writer = self._writers[rank, stream] = Writer(_Paper(self, rank, stream))
        writer.write(text)

    def show(
        self, rank: int, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, kind: str
    ) -> None:
        """Add a display or a result of one rank."""
        if kind == "update_display_data":
            self._update(rank, data, metadata, display_id or "")
            return
        self._clear_if_due(rank)
        if set(data) <= {"text/plain"} and display_id is None:
            text = data.get("text/plain", "")
            self.add(rank, "result", text, like_result(text))
            return
        like = None if display_id else like_display(data)
        row = self._find(rank, like)
        if row is None:
            row = self._new_display(rank, Section(data=data, metadata=metadata), like)
        else:
            self._join(rank, row)
        if display_id:
            self._displays[rank, display_id] = row

    def _new_display(self, rank: int, display: Section, like: Any) -> Row:
        """Place a display; displays at the end that only one rank has, such as bars, are in rank order."""
        below = self._first_display_after(rank)
        row = self._new_row(rank, "label", "")
        row.like = like
        self.sections.append(display)
        if below is None:
            self._offer(row, like)
        else:
            self._move(row, below, rank, self._common.get(rank, ()))
        self._settle(rank, row)
        return row

    def _first_display_after(self, rank: int) -> Row | None:
        """Return the label of the first of the displays at the end that belong to a rank after this one."""
        below, at = None, len(self.sections) - 1
        while at > 0 and self.sections[at].is_empty:
            at -= 1  # it carries a note at most
        while at > 0 and self.sections[at].data is not None:
            rows = self.sections[at - 1].rows
            if len(rows[-1].ranks) > 1 or min(rows[-1].ranks) <= rank:
                break
            below = rows[-1]
            at = at - 2 if len(rows) == 1 else 0
        return below

    def _update(self, rank: int, data: dict[str, Any], metadata: dict[str, Any], display_id: str) -> None:
        row = self._displays.get((rank, display_id))
        if row is not None:
            section = self.display_of(row)
            section.data, section.metadata, section.dirty = data, metadata, True
        else:
            self.of_earlier_cells[rank, display_id] = data, metadata

    @property
    def has_bar(self) -> bool:
        """Whether a rank has an unfinished line that it rewrites in place, as a progress bar is."""
        return any(writer.has_bar for writer in self._writers.values())

    def displays(self) -> dict[tuple[int, str], Section]:
        """Return the displays that can be updated, by rank and id."""
        return {key: self.display_of(row) for key, row in self._displays.items()}

    def display_of(self, label: Row) -> Section:
        """Return the display below its label."""
        return self.sections[self.sections.index(label.section) + 1]

    def clear(self, rank: int, *, wait: bool) -> None:
        """Remove a rank's output; with ``wait`` only at its next output."""
        if wait:
            self._clear_first.add(rank)
            return
        self._clear_first.discard(rank)
        for writer in [key for key in self._writers if key[0] == rank]:
            del self._writers[writer]
        for section in list(self.sections):
            for row in [row for row in section.rows if rank in row.ranks]:
                row.ranks -= {rank}
                section.dirty = True
                if not row.ranks:
                    self._remove(row)
        self._displays = {key: row for key, row in self._displays.items() if key[0] != rank}
        self._common.pop(rank, None)
        self._private.pop(rank, None)
        self.hidden.tails.pop(rank, None)
        self._is_full = bool(self.hidden.tails)

    def _clear_if_due(self, rank: int) -> None:
        if rank in self._clear_first:
            self.clear(rank, wait=False)

    def close(self) -> None:
        """Finish unfinished lines at the end of the cell."""
        # In the order in which they were started: a rank's earlier line must not pass its later one.
        for writer in sorted(self._writers.values(), key=lambda writer: writer.first_open_key):
            writer.close()
        self._remove_blank_displays()
        self._put_in_order()

    def _remove_blank_displays(self) -> None:
        """Remove labels of empty displays, e.g. of a progress bar that removed itself."""
        for row in [above.rows[-1] for above, below in pairwise(self.sections) if below.is_blank and above.rows]:
            self._remove(row)

    def _put_in_order(self) -> None:
        """Merge the ranks' output again and divide it into sections; the result does not depend on the ranks' speed."""
        displays = {above.rows[-1]: below for above, below in pairwise(self.sections) if below.data is not None}
        own: dict[int, list[Row]] = {}
        for section in self.sections:
            for row in section.rows:
                for rank in row.ranks:
                    own.setdefault(rank, []).append(row)
        placed: set[Row] = set()
        lines = merge({rank: [row.like for row in rows] for rank, rows in own.items()})
        if len(lines) > self._max_lines:
            return  # fewer equal lines were found than while they came in, so all of them would be beyond the bound
        self.sections, text = [], None
        for line in lines:
            rank, place = line[0]
            row, display = own[rank][place], displays.get(own[rank][place])
            if row in placed:  # ranks shared it that no longer do
                row, display = replace(row), display and replace(display, place=-1)
            placed.add(row)
            if text is None or len(text.rows) >= SECTION_ROWS:
                text = self._new_section()
            ranks = frozenset(rank for rank, _ in line) if len(line) > 1 else alone(rank)
            row.key, row.ranks, row.section = (self._number(),), ranks, text
            text.rows.append(row)
            if display is not None:
                self.sections.append(display)
                text = None
        self._by_content, self._common, self._private, self._displays = RowsByContent(), {}, {}, {}

    # Rows

    def add(self, rank: int, stream: str, text: str, like: Any = None) -> Row | None:
        """Place a complete line: with an equal line, or at the end; None beyond the bound."""
        like = like or (stream, text)
        row = self._find(rank, like)
        if row is not None:
            self._join(rank, row)
            return row
        if self._is_full or self._left_lines <= 0 or (len(text) > self._left_bytes and self.sections):
            self._is_full = True  # so that no later, shorter line is shown above
            self.hidden.add(rank, stream, [text])
            return None
        row = self._new_row(rank, stream, text)
        self._offer(row, like)
        self._settle(rank, row)
        return row

    def add_all(self, rank: int, stream: str, texts: list[str]) -> list[Row | None]:
        """Place complete lines."""
        rows: list[Row | None] = []
        for index, text in enumerate(texts):
            if self._is_full and self._is_last(rank):
                self.hidden.add(rank, stream, texts[index:])  # none of them is on the screen
                return [*rows, None]
            rows.append(self.add(rank, stream, text))
        return rows

    def _is_last(self, rank: int) -> bool:
        """Whether only this rank's own rows follow the last common row."""
        last = self.sections[-1].rows[-1] if self.sections and self.sections[-1].rows else None
        return last is not None and (last.key == self._common.get(rank) or last.ranks == {rank})

    def _find(self, rank: int, like: Any) -> Row | None:
        """Return the first row of this content that the rank can join."""
        if like not in self._by_content:
            return None
        private = self._private.get(rank)
        for row in self._by_content.after(self._common.get(rank, ()), like):
            if rank in row.ranks:
                continue
            if not private or row.key > private[-1].key or len(row.section.rows) < 2 * SECTION_ROWS:
                return row
        return None

    def _join(self, rank: int, row: Row) -> None:
        """Add the rank to an existing row."""
        if len(row.ranks) == 1:
            self._gather(next(iter(row.ranks)), row)
        self._gather(rank, row)
        row.ranks |= {rank}
        row.section.dirty = True

    def _gather(self, rank: int, row: Row) -> None:
        """Move what this rank alone printed in front of the row that is now common; later it can't move any more."""
        if row.key <= self._common.get(rank, ()):
            return
        after, self._common[rank] = self._common.get(rank, ()), row.key
        private = self._private.pop(rank, [])
        if rank in row.ranks:
            self._private[rank] = private[bisect_right(private, row.key, key=row_key) :]
            private = private[: bisect_left(private, row.key, key=row_key)]
        if len(private) > GROUPED_ROWS:
            private = [own for own in private if own.key > row.key]
        for own in private:
            self._move(own, row, rank, after)

    def _move(self, own: Row, row: Row, rank: int, after: tuple[float, ...]) -> None:
        """Move one of a rank's own rows between ``after`` and ``row``; own rows of several ranks are in rank order."""
        display = self.display_of(own) if own.stream == "label" else None
        self._take_out(own)
        gap = (*row.key[:-1], row.key[-1] - 0.5)  # between the row and the one before it
        own.key = (*gap, rank, self._number())
        if own.key < after:  # ``after`` is in this gap too
            own.key = (*gap, float("inf"), self._number())
        if own.key < after:  # ``after`` was started above an open row, and so is below the gap
            own.key = (*after, self._number())
        section = self._section_of(own.key, row.section)
        if display is not None:
            self.sections.remove(display)
            section = self._split(section, own.key, display)
        own.section = section
        insert_row(section.rows, own)
        section.dirty = True
        if not own.open:
            self._offer(own, own.like)

    def _section_of(self, key: tuple[float, ...], section: Section) -> Section:
        """Return the section of lines to which this key belongs, searching upwards from ``section``."""
        for above in reversed(self.sections[: self.sections.index(section)]):
            if above.rows and above.rows[-1].key < key:
                break
            if above.rows:
                section = above
        return section

    def _split(self, section: Section, key: tuple[float, ...], display: Section) -> Section:
        """Place a display among lines; returns the section above it."""
        at = bisect_left(section.rows, key, key=row_key)
        where = self.sections.index(section)
        if at == 0 and where > 0 and self.sections[where - 1].data is None:
            self.sections.insert(where, display)
            return self.sections[where - 1]
        above = Section(section.rows[:at])
        for row in above.rows:
            row.section = above
        del section.rows[:at]
        section.dirty = True
        self.sections[where:where] = [above, display]
        return above

    def _settle(self, rank: int, row: Row) -> None:
        """Record a new row that only this rank has printed, finished or not."""
        if row.key < self._common.get(rank, ()):
            return
        private = self._private.setdefault(rank, [])
        at = bisect_left(private, row.key, key=row_key)
        if at < len(private) and private[at] is row:
            return  # it is recorded since it was started
        private.insert(at, row)
        if len(private) > MOVABLE_ROWS:
            self._common[rank] = private.pop(0).key

    def _number(self) -> int:
        self._count += 1
        return self._count

    def _new_section(self) -> Section:
        self.sections.append(Section())
        return self.sections[-1]

    def carrier(self, *, for_good: bool) -> Section:
        """Return a section to show something below; no long section is redrawn for what stays ``for_good``."""
        last = self.sections[-1] if self.sections else None
        if last is None or last.data is not None or (for_good and len(last.rows) > SLOW_SECTION_ROWS):
            return self._new_section()
        return last

    def _new_row(self, rank: int, stream: str, text: str, *, is_open: bool = False) -> Row:
        section = self.sections[-1] if self.sections else None
        if section is None or section.data is not None or section.is_full:
            section = self._new_section()
        row = Row((self._number(),), text, stream, alone(rank), section, is_open)
        self._left_lines -= 1
        self._left_bytes -= len(text)
        section.rows.append(row)
        section.dirty = True
        return row

    def _open_row(self, rank: int, stream: str) -> Row:
        """Start a line; unfinished lines at the end, such as progress bars, are in rank order."""
        row = self._new_row(rank, stream, "", is_open=True)
        rows = row.section.rows
        at = len(rows) - 1
        while at > 0 and rows[at - 1].open and min(rows[at - 1].ranks) > rank:
            at -= 1
        if at < len(rows) - 1:
            rows.pop()
            below = rows[at].key
            key = (*rows[at - 1].key, row.key[0]) if at > 0 else below
            row.key = key if key < below else (*below[:-1], below[-1] - 0.25, row.key[0])
            insert_row(rows, row)
        self._settle(rank, row)
        return row

    def finish(self, rank: int, row: Row) -> Row | None:
        """Close an open row: it joins an equal row, or stays, or is beyond the bound."""
        like = (row.stream, row.text)
        alike = self._find_for_open(rank, row, like)
        if alike is not None or self._is_full or self._left_lines < 0:
            self._remove(row)
            if alike is None:
                self.hidden.add(rank, row.stream, [row.text])
            else:
                private = self._private.pop(rank, [])
                at = bisect_left(private, row.key, key=row_key)
                self._private[rank] = private[:at]
                self._join(rank, alike)
                for later in private[at:]:  # rows after the start of this line
                    self._settle(rank, later)
            return alike
        row.open = False
        row.section.dirty = True
        self._offer(row, like)
        self._settle(rank, row)
        return row

    def _find_for_open(self, rank: int, row: Row, like: Any) -> Row | None:
        """Return the row that an open one can join without passing what the rank has printed since it started that."""
        if row.key <= self._common.get(rank, ()):
            return None
        alike = self._find(rank, like)
        private = self._private.get(rank, [])
        at = bisect_right(private, row.key, key=row_key)
        return alike if at == len(private) or (alike is not None and alike.key < private[at].key) else None

    def reopen(self, rank: int, row: Row, text: str) -> Row:
        """Change a complete line; other ranks that share it keep the old text."""
        row.section.dirty = True
        if row.ranks == {rank}:
            self._by_content.remove(row)
            row.open = True
            self.retype(row, text)
            return row
        row.ranks -= {rank}
        own = Row((*row.key, self._number()), "", row.stream, alone(rank), row.section, open=True, rewritten=True)
        insert_row(row.section.rows, own)
        self._left_lines -= 1
        self._settle(rank, own)
        self.retype(own, text)
        return own

    def retype(self, row: Row, text: str) -> None:
        """Change an open row's text."""
        row.rewritten = row.rewritten or not text.startswith(row.text)
        self._left_bytes -= len(text) - len(row.text)
        row.text = text
        row.section.dirty = True

    def _offer(self, row: Row, like: Any) -> None:
        """Let other ranks join a row."""
        row.like = like
        if like is not None:
            self._by_content.add(row)

    def _remove(self, row: Row) -> None:
        if row.stream == "label":
            self.sections.remove(self.display_of(row))
        for rank in row.ranks:
            private = self._private.get(rank, [])
            at = bisect_left(private, row.key, key=row_key)
            if at < len(private) and private[at] is row:
                del private[at]
        self._take_out(row)
        self._left_lines += 1
        self._left_bytes += len(row.text)

    def _take_out(self, row: Row) -> None:
        """Remove a row from its section."""
        section = row.section
        del section.rows[bisect_left(section.rows, row.key, key=row_key)]
        section.dirty = True
        if section.is_empty:
            self.sections.remove(section)
        self._by_content.remove(row)


class _Paper:
    """The lines of one stream of one rank, as its :class:`Writer` sees them."""

    def __init__(self, transcript: Transcript, rank: int, stream: str) -> None:
        self._transcript = transcript
        self._rank = rank
        self._stream = stream

    def open_row(self) -> Row:
        return self._transcript._open_row(self._rank, self._stream)  # noqa: SLF001

    def rewrite(self, row: Row, text: str) -> Row:
        """Change the line."""
        if not row.open:
            return self._transcript.reopen(self._rank, row, text)
        self._transcript.retype(row, text)
        return row

    def finish(self, row: Row) -> Row | None:
        """Merge the line with its equal, now that it can't change any more."""
        return self._transcript.finish(self._rank, row) if row.open else row

    def erase(self, row: Row) -> None:
        """Remove an open line that became empty."""
        if row.open:
            self._transcript._remove(row)  # noqa: SLF001

    def add_lines(self, texts: list[str]) -> list[Row | None]:
        """Add complete lines; a line beyond the bound is None."""
        return self._transcript.add_all(self._rank, self._stream, texts)
