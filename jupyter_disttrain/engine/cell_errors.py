"""What the reply says of a cell that failed.

Covers: the line of the cell, the traceback without this package's frames, the time.
Does not cover: comparing the failures of several ranks (``cluster.cell_run``).
"""

from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .shell import RankShell


class InputOnRankError(RuntimeError):
    """``input()`` was called on a rank."""

    def __init__(self, prompt: str) -> None:
        asked = f" ({prompt.strip()!r})" if prompt.strip() else ""
        super().__init__(
            f"input(){asked} can't be answered on a rank; ask in a notebook cell of its own, then %dist_push the answer"
        )


def complete(reply: dict[str, Any], shell: RankShell, lines_before: int) -> None:
    """Add the line, the time and a plain traceback to an error reply."""
    error, shell.last_error = shell.last_error, None
    reply["time_s"] = time.time()
    reply["line"] = None
    if error is None:
        return
    reply["line"] = cell_line(error, lines_before)
    reply["evalue"] = str(error)


def cell_line(error: BaseException, lines_before: int) -> int | None:
    """Return the line of the cell at which ``error`` was raised, None where it has none."""
    if isinstance(error, SyntaxError) and error.lineno:
        return error.lineno + lines_before
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "ipykernel_" in frame.filename and frame.lineno is not None:
            return frame.lineno + lines_before
    return None
