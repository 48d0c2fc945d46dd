"""Determine which code is the user's own: that of cells, or of the script that a cell runs.

IPython compiles each cell under a name of its own. While a cell runs a script, the script's file is the user's code:
lines, hangs and errors are the script's. Code that a magic runs on the ranks belongs to neither: it has no lines to
show.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cell_started import CellStarted

CELL = "ipykernel_"  # part of the name under which a cell is compiled

_script: str | None = None  # the file; None while cells run, empty while a magic's code does


def set_cells(cell: CellStarted) -> None:
    """Set cells as the user's code; or none, if the user has not written what runs."""
    global _script  # noqa: PLW0603  (a process runs one cell at a time)
    _script = None if cell.is_typed else ""


def begin_script(filename: str) -> None:
    """Set a script's file as the user's code, until the next cell starts."""
    global _script  # noqa: PLW0603
    _script = filename


def is_own(filename: str) -> bool:
    """Whether code of this file is the cell's, or the script's that it runs."""
    return is_cell(filename) if _script is None else filename == _script


def is_cell(filename: str) -> bool:
    """Whether code of this file is a cell's, or a magic's on the rank."""
    return CELL in filename


def is_typed() -> bool:
    """Whether a cell runs that the user has written."""
    return _script is None


def script_name() -> str:
    """Return the name of the script that runs, without its folder; empty while none does."""
    return Path(_script or "").name
