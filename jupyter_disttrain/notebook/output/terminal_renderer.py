"""Show the output of ranks in IPython in a terminal.

Covers: lines as they arrive, bars and notes below them that change in place, output that is not a terminal.
Does not cover: merging (``transcript``), notebooks (``renderer``).

The last lines, as many as the terminal has, are repainted when something changes: they are merged with the output of
other ranks, as in a notebook. A line that has scrolled out of that is printed permanently, for the ranks that had
printed it by then.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from prompt_toolkit.utils import get_cwidth

from ...client.cells.events import Cleared
from .ansi import SGR, Style, from_cells, to_cells
from .renderer import Screen

if TYPE_CHECKING:
    from ...client.cells.cell_run import CellRun
    from ...client.cells.events import Event
    from .rows import Row

SPARE_LINES = 3  # lines of the terminal for the cell's own text


class TerminalScreen(Screen):
    """Listen to a cell and print it."""

    _has_ended = False
    _painted = 0  # lines that can still be repainted

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._printed: Counter[int] = Counter()  # by rank: number of its lines that are printed permanently
        self._unfinished: list[tuple[Row, str, frozenset[int]]] = []  # printed rows that may still change

    def _take(self, event: Event, run: CellRun) -> None:
        super()._take(event, run)
        if isinstance(event, Cleared):
            del self._printed[event.rank]

    def _has_bar(self) -> bool:
        return self._transcript.has_bar  # a widget is shown here only in its first state

    def _draw(self) -> None:
        self._changed = False
        if self._has_ended or sys.stdout.isatty():
            self._paint(is_end=self._has_ended)

    def _finish(self) -> None:
        self._has_ended = True
        self._paint(is_end=True)
        self._printed.clear()
        self._unfinished.clear()

    def _paint(self, *, is_end: bool) -> None:
        """Repaint the last lines, and permanently print those that no longer fit; at the end all of them."""
        self._fit_labels(self._label_width)
        columns, height = shutil.get_terminal_size()
        below = [*self._lines(self._tail())[0], *self._red_notes(), *self._progress]
        if not is_end:
            below = below[-max(1, height - SPARE_LINES) :]
        left = self._lines_left()
        room = 0 if is_end else max(0, height - SPARE_LINES - len(below))
        at = len(left)
        while at > 0 and len(left[at - 1][1]) <= room:
            at -= 1
            room -= len(left[at][1])
        self._unfinished += [(row, row.text, row.ranks) for row, _ in left[:at] if row.open]
        for_good = [line for _, texts in left[:at] for line in texts]
        self._count_printed([row for row, _ in left[:at]])
        painted = [line for _, texts in left[at:] for line in texts] + below
        if is_end:
            for_good += [*self._changed_since(), *below]
            self._unfinished = [(row, row.text, ranks) for row, _, ranks in self._unfinished if row.open]
            painted = []
        start = f"\x1b[{self._painted}A\r\x1b[J" if self._painted else ""
        self._painted = len(painted)
        sys.stdout.write(
            start + "".join(f"{line}\n" for line in [*for_good, *(fit(line, columns) for line in painted)])
        )
        sys.stdout.flush()

    def _changed_since(self) -> list[str]:
        """Return the final state of rows, such as bars, that were printed permanently before they were finished."""
        ends: dict[tuple[str, str], frozenset[int]] = {}
        for row, text, ranks in self._unfinished:
            if row.ranks and row.text != text:
                ends[row.stream, row.text] = ends.get((row.stream, row.text), frozenset()) | ranks
        return [
            self._line(self._label(ranks, stream)[0] if self._labelled else "", stream, text)
            for (stream, text), ranks in ends.items()
        ]

    def _lines_left(self) -> list[tuple[Row, list[str]]]:
        """Return the rows that are not printed permanently on all of their ranks, with their lines."""
        places: Counter[int] = Counter()
        left = []
        for section in self._transcript.sections:
            for row in section.rows:
                ranks = frozenset(rank for rank in row.ranks if places[rank] >= self._printed[rank])
                places.update(row.ranks)
                if ranks:
                    left.append((row, self._text_of(row, ranks).split("\n")))
        return left

    def _count_printed(self, rows: list[Row]) -> None:
        """Count rows that are printed permanently: the next ones of their ranks, in order."""
        chosen = set(map(id, rows))
        places: Counter[int] = Counter()
        printed = self._printed.copy()
        for section in self._transcript.sections:
            for row in section.rows:
                places.update(row.ranks)
                if id(row) in chosen:
                    printed.update({rank: places[rank] - printed[rank] for rank in row.ranks})
        self._printed = printed

    def _text_of(self, row: Row, ranks: frozenset[int]) -> str:
        """Return a row as it is printed; a display is printed in its text form."""
        stream, text = row.stream, row.text
        if stream == "label":
            display = self._transcript.display_of(row)
            stream, text = "result", str((display.data or {}).get("text/plain", ""))
        return self._line(self._label(ranks, stream)[0] if self._labelled else "", stream, text)


def fit(line: str, columns: int) -> str:
    """Cut a line to the width of the terminal, so that the cursor can return to its start."""
    line = line.expandtabs()
    if get_cwidth(SGR.sub("", line)) < columns:
        return line
    cells = to_cells(line, Style())
    width = end = 0
    while end < len(cells) and (width := width + get_cwidth(cells[end][1])) < columns - 1:
        end += 1
    return from_cells([*cells[:end], ("", "…")])
