"""What happens on a rank before and after each cell.

Covers: keeping the process group usable for the next cell, with the client's help.
Does not cover: making it (``process_group``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .process_group import Group


def before_cell(group: Group | None, cell: int) -> None:
    """Tell the process group which cell begins."""
    if group is not None:
        group.before_cell(cell)


def after_cell(group: Group | None) -> bool:
    """Return False if the cell ended the process group: the client then has all ranks make a new one together."""
    return group is None or group.alive
