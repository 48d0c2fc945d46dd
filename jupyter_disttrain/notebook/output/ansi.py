r"""Parse colours in text: ANSI's SGR sequences, such as ``"\x1b[31m"``.

Covers: the style after some text, text as cells that can be overwritten.
"""

from __future__ import annotations

import re

SGR = re.compile(r"\x1b\[([\d;]*)m")
RESET = "\x1b[0m"

Cell = tuple[str, str]  # the style, the character

# The slot that each code sets, named by the code that resets it.
_SLOTS = {1: 22, 2: 22, 3: 23, 4: 24, 21: 24, 5: 25, 6: 25, 7: 27, 8: 28, 9: 29, 38: 39, 48: 49}
_SLOTS |= dict.fromkeys([*range(30, 38), *range(90, 98)], 39) | dict.fromkeys([*range(40, 48), *range(100, 108)], 49)
_LONG = {5: 3, 2: 5}  # 38;5;N and 38;2;R;G;B: how many numbers belong together


class Style:
    """The style at some point of a text."""

    def __init__(self) -> None:
        self._codes: dict[int, str] = {}
        self.text = ""  # the sequences that set it; empty for plain text

    def follow(self, text: str) -> None:
        """Apply the style changes of ``text``."""
        if "\x1b" not in text:
            return
        for match in SGR.finditer(text):
            self._apply([int(code or 0) for code in match[1].split(";")])
        self.text = "".join(f"\x1b[{code}m" for code in self._codes.values())

    def _apply(self, codes: list[int]) -> None:
        at = 0
        while at < len(codes):
            code = codes[at]
            size = _LONG.get(codes[at + 1], 1) if code in (38, 48) and at + 1 < len(codes) else 1
            if code == 0:
                self._codes.clear()
            elif code in _SLOTS:
                self._codes.pop(_SLOTS[code], None)
                self._codes[_SLOTS[code]] = ";".join(map(str, codes[at : at + size]))
            else:
                self._codes.pop(code, None)
            at += size


def width(text: str) -> int:
    """Return the number of visible characters."""
    return len(SGR.sub("", text)) if "\x1b" in text else len(text)


def to_cells(text: str, style: Style) -> list[Cell]:
    """Split text into cells; ``style`` is the one before it, and is updated."""
    cells: list[Cell] = []
    start = 0
    for match in SGR.finditer(text):
        cells += [(style.text, character) for character in text[start : match.start()]]
        style.follow(match[0])
        start = match.end()
    return cells + [(style.text, character) for character in text[start:]]


def from_cells(cells: list[Cell]) -> str:
    """Join cells to text."""
    parts = []
    before = ""
    for style, character in cells:
        if style != before:
            parts.append(RESET + style if before else style)
            before = style
        parts.append(character)
    return "".join([*parts, RESET]) if before else "".join(parts)
