r"""What text on a stream means: lines, carriage returns, colours.

Covers: ``"\r"``, backspaces, cursor-up as tqdm's nested bars use it, colours that go on over the end of a line.
Does not cover: merging what ranks say (``transcript``).

A stream is a small terminal: a growing list of lines and a cursor in it. Text without control characters, which is nearly
all there is, takes a short way.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .transcript import Row

_CONTROL = re.compile(r"(\r\n|[\n\r\x08]|\x1b\[\d*A)")
_COLOUR = re.compile(r"\x1b\[([\d;]*)m")
RECENT = 64  # lines above the cursor that can still be rewritten


class Paper(Protocol):
    """Where a stream writes its lines."""

    def open_row(self) -> Row:
        """Begin a line at the end."""

    def rewrite(self, row: Row, text: str) -> Row:
        """Change a line; returns the line that now holds the text."""

    def finish(self, row: Row) -> Row:
        """A line is complete; returns the line that it became."""

    def add_lines(self, texts: list[str]) -> Row | None:
        """Add complete lines; returns the last, None beyond the bound."""


class Writer:
    """One stream of one rank."""

    def __init__(self, paper: Paper) -> None:
        self._paper = paper
        self._rows: list[Row | None] = [None]  # the last few lines; None: nothing was written on that line yet
        self._at = 0
        self._column = 0
        self._colour = ""

    def write(self, text: str) -> None:
        """Take text as it came, lines finished or not."""
        if self._at == len(self._rows) - 1 and not _needs_terminal(text):
            self._write_plain(text)
            return
        for part in _CONTROL.split(text):
            if part in ("\n", "\r\n"):
                self._line_feed()
            elif part == "\r":
                self._column = 0
            elif part == "\x08":
                self._column = max(0, self._column - 1)
            elif part.startswith("\x1b[") and part.endswith("A"):
                self._at = max(0, self._at - int(part[2:-1] or 1))
            elif part:
                self._put(part)

    def _write_plain(self, text: str) -> None:
        """Write text whose only control character is the line feed."""
        first, *rest = text.split("\n")
        if first:
            self._put(first)
        if not rest:
            return
        self._line_feed()
        lines, last = rest[:-1], rest[-1]
        if lines:
            if self._colour or any("\x1b" in line for line in lines):
                lines = [self._coloured(line) for line in lines]
            self._rows = [*self._rows[:-1], self._paper.add_lines(lines), None][-RECENT:]
            self._at = len(self._rows) - 1
        if last:
            self._put(last)

    def _put(self, part: str) -> None:
        """Write on the current line, over what stands there."""
        row = self._rows[self._at]
        if row is None:
            row = self._paper.open_row()
            old = self._colour
            column = len(old) if self._column == 0 else self._column
        else:
            old, column = row.text, self._column
        if "\x1b" in part or "\x1b" in old:
            # Escapes have no width, so columns can't be counted: either all is rewritten, or the text is appended.
            new = part if column == 0 and row.text else old + part
        else:
            new = old[:column].ljust(column) + part + old[column + len(part) :]
        self._column = column + len(part)
        self._note_colour(part)
        self._rows[self._at] = self._paper.rewrite(row, new)

    def _line_feed(self) -> None:
        row = self._rows[self._at]
        last = self._at == len(self._rows) - 1
        if last:
            if row is None:
                row = self._paper.rewrite(self._paper.open_row(), self._colour)
            self._rows[self._at] = self._paper.finish(row)
            self._rows.append(None)
            del self._rows[:-RECENT]
        self._at = len(self._rows) - 1 if last else self._at + 1
        self._column = 0

    def close(self) -> None:
        """The cell has ended: an unfinished line is finished."""
        for row in self._rows:
            if row is not None:
                self._paper.finish(row)
        self._rows, self._at, self._column = [None], 0, 0

    def _coloured(self, line: str) -> str:
        before = self._colour
        self._note_colour(line)
        return before + line

    def _note_colour(self, text: str) -> None:
        for match in _COLOUR.finditer(text):
            self._colour = "" if match[1] in ("", "0", "00") else self._colour + match[0]


def _needs_terminal(text: str) -> bool:
    return "\r" in text or "\x08" in text or ("\x1b[" in text and bool(_CONTROL.search(text.replace("\n", ""))))
