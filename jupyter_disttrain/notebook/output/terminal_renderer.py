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
from typing import TYPE_CHECKING, Any

from prompt_toolkit.utils import get_cwidth

from .ansi import SGR, Style, from_cells, to_cells
from .displays import Sink
from .renderer import Screen

if TYPE_CHECKING:
    from .rows import Line, Row

SPARE_LINES = 3  # lines of the terminal for the cell's own text


class TerminalScreen(Screen):
    """Listen to a cell and print it."""

    _has_ended = False
    _painted = 0  # lines that can still be repainted

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(Sink(), *args, **options)
        self._unfinished: list[tuple[Row, str]] = []  # printed rows that may still change, as they were printed

    def _has_bar(self) -> bool:
        return self._transcript.has_bar  # a widget is shown here only in its first state

    def _draw_live(self) -> None:
        self._changed = False
        self._transcript.arrange()  # also where nothing is painted yet, so that no more is kept than is shown
        if self._has_ended or sys.stdout.isatty():
            self._paint()

    def _finish(self) -> None:
        self._has_ended = True
        self._paint()

    def before_question(self, hint: str) -> None:
        """Print what was shown so far permanently."""
        super().before_question(hint)
        self._has_ended = False

    def _paint(self) -> None:
        """Repaint the last lines, and permanently print those that no longer fit; at the end all of them."""
        self._fit_labels(self._transcript.lines, self._label_width)
        columns, height = shutil.get_terminal_size()
        room = max(1, height - SPARE_LINES)
        below = [*self._lines(self._tail())[0], *self._red_notes(), *self._progress]
        below = below if self._has_ended else below[-room:]
        texts = [self._text_of(line).split("\n") for line in self._transcript.lines]
        at = len(texts) if self._has_ended else 0
        room -= len(below) + sum(map(len, texts))
        while room < 0 and at < len(texts):
            room += len(texts[at])
            at += 1
        permanent = [text for each in texts[:at] for text in each]
        painted = [text for each in texts[at:] for text in each] + below
        taken = self._transcript.take(at)
        if self._has_ended:
            permanent += [*self._changed_since(), *below]
            painted = []
        self._unfinished += [(row, row.text) for line in taken for row in line.rows if row.is_open]
        start = f"\x1b[{self._painted}A\r\x1b[J" if self._painted else ""
        self._painted = len(painted)
        sys.stdout.write(
            start + "".join(f"{line}\n" for line in [*permanent, *(fit(line, columns) for line in painted)])
        )
        sys.stdout.flush()

    def _changed_since(self) -> list[str]:
        """Return the final state of rows, such as bars, that were printed permanently before they were finished."""
        changed: dict[tuple[str, str], set[int]] = {}
        for row, text in self._unfinished:
            if row.text != text:
                changed.setdefault((row.stream, row.text), set()).add(row.rank)
        self._unfinished = [(row, row.text) for row, _ in self._unfinished if row.is_open]
        return [self._labelled_line(frozenset(ranks), stream, text) for (stream, text), ranks in changed.items()]

    def _text_of(self, line: Line) -> str:
        """Return a line as it is printed; a display is printed in its text form."""
        stream, text, display = line.row.stream, line.row.text, line.row.display
        if display is not None:
            stream, text = "result", str((display.data or {}).get("text/plain", ""))
        return self._labelled_line(line.ranks, stream, text)

    def _labelled_line(self, ranks: frozenset[int], stream: str, text: str) -> str:
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
