r"""Interpret the text of a stream: lines, carriage returns, colours.

Covers: ``"\r"``, backspaces, cursor-up as in tqdm's nested bars, colours that continue past the end of a line.
Does not cover: merging the output of ranks (``transcript``).

A stream is a small terminal: a growing list of lines with a cursor. Text without control characters, which is nearly
all there is, takes a short path. It makes no difference where the text is split into messages.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .ansi import Cell, Style, from_cells, to_cells, width

if TYPE_CHECKING:
    from .rows import RankOutput, Row

_MOVE = r"\x1b\[[\d;?]*[@-ln-~]"  # every escape sequence but those for colours
_CONTROL = re.compile(rf"(\r\n|[\n\r\x08]|{_MOVE})")
_NEEDS_TERMINAL = re.compile(rf"[\r\x08]|{_MOVE}")
_CUT_OFF = re.compile(r"\x1b(\[[\d;?]{0,32})?\Z")
RECENT = 64  # lines above the cursor that can still be rewritten
COLUMNS = 1000  # the cursor can be moved up to here; blanks are written before the next text


class Writer:
    """One stream of one rank."""

    def __init__(self, output: RankOutput, stream: str) -> None:
        self._output = output
        self._stream = stream
        self._rows: list[Row | None] = [None]  # the last few lines; None: nothing was written on that line yet
        self._at = 0
        self._column = 0
        self._style = Style()
        self._untouched = False  # the current line was only appended to
        self._cells: list[Cell] | None = None  # cells of the current line, once any were overwritten
        self._held = ""  # the start of an incomplete escape sequence

    def write(self, text: str) -> None:
        """Write a piece of text, with finished lines or not."""
        text = self._held + text
        cut_off = _CUT_OFF.search(text, max(0, len(text) - 40))
        self._held = cut_off[0] if cut_off else ""
        text = text[: len(text) - len(self._held)]
        if self._at == len(self._rows) - 1 and not _NEEDS_TERMINAL.search(text):
            self._write_plain(text)
            return
        for part in _CONTROL.split(text):
            if part in ("\n", "\r\n"):
                self._line_feed()
            elif part == "\r":
                self._column = 0
            elif part == "\x08":
                self._column = max(0, self._column - 1)
            elif part.startswith("\x1b[") and not part.endswith("m") and _CONTROL.fullmatch(part):
                self._obey(part)
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
            if self._style.text or "\x1b" in text:
                lines = [self._coloured(line) for line in lines]
            self._keep_recent([*self._rows[:-1], *self._output.add_lines(lines, self._stream), None])
            self._at = len(self._rows) - 1
        if last:
            self._put(last)

    def _obey(self, command: str) -> None:
        """Move the cursor or erase; other commands are ignored."""
        kind, number = command[-1], command[2:-1]
        count = int(number) if number.isdigit() else 0
        if kind == "A":
            self._go(self._at - max(1, count))
        elif kind == "B":
            self._go(self._at + max(1, count))
        elif kind == "G":
            self._column = max(0, min(count, COLUMNS) - 1)
        elif kind == "K":
            self._erase(whole=count > 0)

    def _go(self, line: int) -> None:
        self._at = max(0, min(line, len(self._rows) - 1))
        self._cells, self._untouched = None, False

    def _erase(self, *, whole: bool) -> None:
        """Erase the line, or the part right of the cursor."""
        row = self._rows[self._at]
        if row is not None:
            cells = self._cells_of(row)
            del cells[0 if whole else self._column :]
            self._output.rewrite(row, from_cells(cells))

    def _put(self, part: str) -> None:
        """Write on the current line, over the old text."""
        row = self._rows[self._at] or self._begin()
        blanks = self._column - width(row.text)
        if self._untouched and blanks >= 0:
            new = row.text + " " * blanks + part
            self._style.follow(part)
            self._column += width(part)
        else:
            cells = self._cells_of(row)
            cells += [("", " ")] * (self._column - len(cells))
            written = to_cells(part, self._style)
            cells[self._column : self._column + len(written)] = written
            new = from_cells(cells)
            self._column += len(written)
        self._output.rewrite(row, new)

    def _cells_of(self, row: Row) -> list[Cell]:
        """Return the cells of the current line, to change them."""
        self._untouched = False
        if self._cells is None:
            self._cells = to_cells(row.text, Style())
        return self._cells

    def _line_feed(self) -> None:
        row = self._rows[self._at]
        if self._at == len(self._rows) - 1:
            self._output.finish(row or self._begin())
            self._keep_recent([*self._rows, None])
            self._at = len(self._rows) - 2
        self._go(self._at + 1)
        self._column = 0

    def _keep_recent(self, rows: list[Row | None]) -> None:
        """Keep the last rows; those above can't be rewritten any more."""
        for row in rows[:-RECENT]:
            if row is not None:
                self._output.finish(row)
        self._rows = rows[-RECENT:]

    @property
    def has_bar(self) -> bool:
        """Whether an unfinished line is rewritten in place, as a progress bar is."""
        return any(
            row is not None and row.is_open and row.is_rewritten and bool(row.text.strip()) for row in self._rows
        )

    def close(self) -> None:
        """Finish the unfinished line at the end of the cell. A progress bar that erased itself leaves nothing."""
        if self._held:
            held, self._held = self._held, ""
            self._put(held)
        for at, row in enumerate(self._rows):
            if row is None:
                continue
            if at == len(self._rows) - 1 and self._at == at and self._column == 0 and not row.text.strip():
                self._output.erase(row)
            else:
                self._output.finish(row)
        self._rows = [None]
        self._go(0)
        self._column = 0

    def _begin(self) -> Row:
        """Begin the current line, with the colours that continue."""
        row = self._rows[self._at] = self._output.add(self._style.text, self._stream, is_open=True)
        self._untouched = True
        return row

    def _coloured(self, line: str) -> str:
        before = self._style.text
        self._style.follow(line)
        return before + line
