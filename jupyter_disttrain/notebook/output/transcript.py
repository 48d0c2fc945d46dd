"""Merge the output of a cell's ranks.

Covers: which lines and displays are equal, their order, the bound on the screen.
Does not cover: matching and ordering (``merge``), control characters (``terminal``), drawing (``renderer``).

Each rank's output is a sequence of rows, and the transcript is one merge of these sequences: the order within a rank
never changes. While the cell runs, only the last rows are merged at each draw. Lines above them have settled: a rank
that is behind can still join them, but not move them. When the cell has ended, the whole sequences are merged once
more, and that result does not depend on which rank was faster.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any

from .merge import merge
from .rows import Line, RankOutput, Row, Section, content_of_display, content_of_result
from .terminal import Writer

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from ...protocol.messages import OutputElided

SECTION_LINES = 200  # lines that are drawn together
LIVE_LINES = 1000  # more lines than this do not move any more while the cell runs, section by section


class Transcript:
    """Merge the output of ranks.

    Parameters
    ----------
    max_lines, max_bytes
        The bound on what is shown; beyond it lines are counted, and the last few are kept.
    """

    def __init__(self, max_lines: int, max_bytes: int) -> None:
        self.sections: list[Section] = []
        self.lines: list[Line] = []  # as of the last merge, below those that have settled
        self.of_earlier_cells: dict[tuple[int, str], tuple[dict[str, Any], dict[str, Any]]] = {}  # updates
        self._bounds = max_lines, max_bytes
        self._numbers = count()
        self._outputs: dict[int, RankOutput] = {}
        self._writers: dict[tuple[int, str], Writer] = {}
        self._displays: dict[tuple[int, str], Row] = {}
        self._clear_first: set[int] = set()
        self._settle_none()

    # Output of ranks

    def add_text(self, rank: int, stream: str, text: str) -> None:
        """Add text of one rank."""
        output = self._output(rank)
        if (rank, stream) not in self._writers:
            self._writers[rank, stream] = Writer(output, stream)
        self._writers[rank, stream].write(text)
        if len(output.rows) - output.settled > self._bounds[0]:
            self.arrange()  # so that not much more is kept than is shown

    def show(
        self, rank: int, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, kind: str
    ) -> None:
        """Add a display or a result of one rank."""
        if kind == "update_display_data":
            self._update(rank, data, metadata, display_id or "")
        elif set(data) <= {"text/plain"} and display_id is None:
            text = data.get("text/plain", "")
            self._output(rank).add(text, "result", alike=content_of_result(text))
        else:
            alike = (rank, display_id) if display_id else content_of_display(data)
            row = self._output(rank).add("", "label", alike=alike, display=Section(data=data, metadata=metadata))
            if display_id:
                self._displays[rank, display_id] = row

    def _update(self, rank: int, data: dict[str, Any], metadata: dict[str, Any], display_id: str) -> None:
        row = self._displays.get((rank, display_id))
        if row is not None and row.display is not None:
            row.display.data, row.display.metadata, row.display.is_dirty = data, metadata, True
        else:
            self.of_earlier_cells[rank, display_id] = data, metadata

    def add_unsent(self, rank: int, record: OutputElided) -> None:
        """Count output that a rank did not even send."""
        self._output(rank).add_unsent(record)

    @property
    def hidden(self) -> list[RankOutput]:
        """The output of the ranks of which not everything is shown."""
        return [output for _, output in sorted(self._outputs.items()) if output.tail]

    @property
    def has_bar(self) -> bool:
        """Whether a rank has an unfinished line that it rewrites in place, as a progress bar is."""
        return any(writer.has_bar for writer in self._writers.values())

    def displays(self) -> dict[tuple[int, str], Section]:
        """Return the displays that can be updated, by rank and id."""
        return {key: row.display for key, row in self._displays.items() if row.display is not None}

    def clear(self, rank: int, *, wait: bool) -> None:
        """Remove a rank's output; with ``wait`` only at its next output."""
        if wait:
            self._clear_first.add(rank)
            return
        self._clear_first.discard(rank)
        self._writers = {key: writer for key, writer in self._writers.items() if key[0] != rank}
        self._displays = {key: row for key, row in self._displays.items() if key[0] != rank}
        if self._outputs.pop(rank, None) is not None:
            self._settle_none()

    def _output(self, rank: int) -> RankOutput:
        if rank in self._clear_first:
            self.clear(rank, wait=False)
        if rank not in self._outputs:
            self._outputs[rank] = RankOutput(rank, self._numbers)
        return self._outputs[rank]

    # Lines

    def arrange(self) -> None:
        """Merge what has not settled."""
        if any(output.is_stale for output in self._outputs.values()):
            self._settle_none()
        for output in self._outputs.values():
            self._join_settled(output)
        lines = self._merge_rest()
        if self._settled and self._exceeds_bound(lines):
            self._settle_none()  # ranks that are behind may have lines in common with those that have settled
            lines = self._merge_rest()
        self.lines = self._bound(lines)

    def _merge_rest(self) -> list[Line]:
        rows = {rank: output.rows[output.settled :] for rank, output in self._outputs.items()}
        return merge_rows(rows, is_live=True)

    def _exceeds_bound(self, lines: Sequence[Line]) -> bool:
        most_lines, most_bytes = self._bounds
        size = self._settled_bytes + sum(len(line.row.text) for line in lines)
        return len(self._settled) + len(lines) > most_lines or size > most_bytes

    def close(self) -> None:
        """Finish unfinished lines at the end of the cell, and merge everything."""
        for writer in self._writers.values():
            writer.close()
        for output in self._outputs.values():
            # E.g. a progress bar that removed itself.
            output.rows = [row for row in output.rows if row.display is None or not row.display.is_blank]
        self._settle_none()
        self.sections = []
        self.lines = self._bound(merge_rows({rank: output.rows for rank, output in self._outputs.items()}))
        self._divide()

    def _bound(self, lines: list[Line]) -> list[Line]:
        """Return the lines within the bound, and those that can't be left out: displays, and what may still grow."""
        most_lines, most_bytes = self._bounds
        number, size = len(self._settled), self._settled_bytes
        kept: list[Line] = []
        beyond: dict[int, list[Row]] = {}
        for line in lines:
            row = line.row
            number, size = number + 1, size + len(row.text)
            is_beyond = bool(beyond) or number > most_lines or (size > most_bytes and (number > 1 or most_bytes <= 0))
            if is_beyond and row.display is None and not row.is_open:
                for each in line.rows:
                    beyond.setdefault(each.rank, []).append(each)
            else:
                kept.append(line)
        for rank, rows in beyond.items():
            self._outputs[rank].hide(rows)
        return kept

    def take(self, number: int) -> list[Line]:
        """Remove the first lines, which are shown for good."""
        taken, self.lines = self.lines[:number], self.lines[number:]
        for rank, rows in Counter(rank for line in taken for rank in line.ranks).items():
            del self._outputs[rank].rows[:rows]
        self._bounds = self._bounds[0] - len(taken), self._bounds[1] - sum(len(line.row.text) for line in taken)
        return taken

    # Sections

    def divide(self) -> None:
        """Divide the lines into sections; if there are many, the first sections settle."""
        self._divide()
        while len(self.lines) > LIVE_LINES:
            settled = self.sections[self._settled_sections].lines
            self._settled_sections += 1
            if settled and settled[-1].row.display is not None:
                self._settled_sections += 1  # the display below its label
            self._settle(settled)
            del self.lines[: len(settled)]

    def _divide(self) -> None:
        texts = iter([section for section in self.sections[self._settled_sections :] if section.data is None])
        del self.sections[self._settled_sections :]
        text = None
        for line in self.lines:
            if text is None or len(text.lines) >= SECTION_LINES:
                text = next(texts, None) or Section()
                text.lines, text.is_dirty = [], True
                self.sections.append(text)
            text.lines.append(line)
            line.section = text
            display = line.row.display
            if display is not None:
                display.is_dirty = display.is_dirty or display.ranks != line.ranks
                display.ranks = line.ranks
                self.sections.append(display)
                text = None

    def _settle(self, lines: Sequence[Line]) -> None:
        for line in lines:
            for row in line.rows:
                row.line = line
                output = self._outputs[row.rank]
                output.settled += 1
                output.last = len(self._settled)
            self._settled_bytes += len(line.row.text)
            self._by_content.setdefault(line.row.content, []).append(len(self._settled))
            self._settled.append(line)

    def _settle_none(self) -> None:
        """Merge everything the next time."""
        self._settled: list[Line] = []
        self._settled_bytes = 0
        self._settled_sections = 0
        self._by_content: dict[Hashable, list[int]] = {}  # numbers of settled lines, increasing
        for output in self._outputs.values():
            output.settled, output.last, output.is_stale = 0, -1, False
            for row in output.rows:
                row.line = None

    def _join_settled(self, output: RankOutput) -> None:
        """Add a rank's next rows to equal lines below its last one, as long as there are some."""
        for row in output.rows[output.settled :]:
            numbers = self._by_content.get(row.content, [])
            at = bisect_right(numbers, output.last)
            line = self._settled[numbers[at]] if at < len(numbers) else None
            if line is None or line.section is None or line.row.content != row.content:
                return
            line.rows.append(row)
            line.ranks |= {row.rank}
            line.section.is_dirty = True
            if line.row.display is not None:
                line.row.display.ranks, line.row.display.is_dirty = line.ranks, True
            row.line = line
            output.last = numbers[at]
            output.settled += 1


def merge_rows(rows: Mapping[int, Sequence[Row]], *, is_live: bool = False) -> list[Line]:
    """Merge the rows of several ranks to lines; ``is_live``: ranks may still print."""
    contents = {rank: [row.content for row in own] for rank, own in rows.items()}
    parts = merge(contents, {rank: _times(own) for rank, own in rows.items()} if is_live else None)
    only = {rank: frozenset([rank]) for rank in rows}
    shared: dict[frozenset[int], frozenset[int]] = {}  # because lines are many
    lines: list[Line] = []
    for items, number in parts:
        if len(items) == 1:
            ((rank, place),) = items
            lines += [Line([row], only[rank]) for row in rows[rank][place : place + number]]
        else:
            ranks = frozenset([rank for rank, _ in items])
            lines.append(Line([rows[rank][place] for rank, place in items], shared.setdefault(ranks, ranks)))
    return lines


def _times(rows: Sequence[Row]) -> list[float]:
    """Return the times of a rank's rows; bars and displays at the end stay there, in the order of the ranks."""
    times: list[float] = [row.number for row in rows]
    for at in reversed(range(len(rows))):
        if not (rows[at].is_open or rows[at].is_rewritten or rows[at].display is not None):
            break
        times[at] = inf
    return times
