"""What a dead rank said at the end.

Covers: the last lines of its stderr, Python's own report of a crash in C code and the cell's line in it.
Does not cover: how the process ended (``messages.RankDeath``).
"""

from __future__ import annotations

import re

LINES = 12
_CRASH = "Fatal Python error"
_CELL = re.compile(r'File ".*ipykernel_\d+/\d+\.py", line (\d+)')


def last_words(stderr_tail: str) -> tuple[tuple[str, ...], int | None]:
    """Return the lines to show, and the line of the cell that ran if they tell it.

    Python's report of a crash lists the frames from the innermost on; those that called the cell are left out.
    """
    lines = stderr_tail.strip().splitlines()
    start = next((index for index, line in enumerate(lines) if _CRASH in line), None)
    if start is None:
        return _shown(lines[-LINES:]), None
    for index in range(start, len(lines)):
        match = _CELL.search(lines[index])
        if match:
            frames = [_CELL.sub(r"Cell, line \1", line) for line in lines[start : index + 1] if line]
            return _shown([*lines[max(0, start - LINES) : start], *frames]), int(match[1])
    return _shown(lines[start : start + LINES]), None


def _shown(lines: list[str]) -> tuple[str, ...]:
    return ("Its last lines on stderr:", *lines) if lines else ()
