"""What a dead rank said at the end.

Covers: the last lines of its stderr, Python's own report of a crash in C code and the cell's line in it.
Does not cover: how the process ended (``messages.RankDeath``).
"""

from __future__ import annotations

import re

LINES = 12
_NO_NEWS = "Extension modules:"  # the names of all that are loaded
_GLOO_MISMATCH = "Received data size doesn't match expected size"
_CELL = re.compile(r'File ".*ipykernel_\d+/\d+\.py", line (\d+)')


def last_words(stderr_tail: str, crash: str) -> tuple[tuple[str, ...], int | None]:
    """Return the lines to show, and the line of the cell that ran if a crash's report tells it."""
    said = stderr_tail.strip().splitlines()[-LINES:]
    reported, line = _up_to_cell(crash)
    shown = (["Its last lines on stderr:", *said] if said else []) + reported
    if _GLOO_MISMATCH in stderr_tail:
        shown.append("Gloo ends a process that is sent more than its tensor holds: ranks gave tensors of different")
        shown.append("sizes or types to one collective, or to a send and its recv; compare the shapes on all ranks")
    return tuple(shown), line


def _up_to_cell(crash: str) -> tuple[list[str], int | None]:
    """Return the report's frames from the innermost on; those that called the cell are left out."""
    lines = [line for line in crash.splitlines() if line and not line.startswith(_NO_NEWS)]
    for index, line in enumerate(lines):
        match = _CELL.search(line)
        if match:
            return [*lines[:index], _CELL.sub(r"Cell, line \1", line)], int(match[1])
    return lines[:LINES], None
