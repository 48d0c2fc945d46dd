"""Which code is the person's own: that of cells, or of the script that a cell runs.

IPython compiles each cell under a name of its own. While a cell runs a script, the script's file stands in its place:
lines, hangs and errors are the script's. What a magic has the ranks run is nobody's: it has no lines to show.
"""

from __future__ import annotations

from pathlib import Path

CELL = "ipykernel_"  # in the name under which a cell is compiled

_script: str | None = None  # the file; None while cells run, empty while nobody's code does


def begin_cell(*, is_typed: bool) -> None:
    """Take cells for the person's code; or nothing, if nobody has written what runs."""
    global _script  # noqa: PLW0603  (a process runs one cell at a time)
    _script = None if is_typed else ""


def begin_script(filename: str) -> None:
    """Take a script's file for what runs, until the next cell begins."""
    global _script  # noqa: PLW0603
    _script = filename


def is_own(filename: str) -> bool:
    """Whether code of this file is the cell's, or the script's that it runs."""
    return is_cell(filename) if _script is None else filename == _script


def is_cell(filename: str) -> bool:
    """Whether code of this file is a cell's, or what a magic has the rank run."""
    return CELL in filename


def is_typed() -> bool:
    """Whether a cell runs that a person has written."""
    return _script is None


def script_name() -> str:
    """Return the name of the script that runs, without its folder; empty while none does."""
    return Path(_script or "").name
