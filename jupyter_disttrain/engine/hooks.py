"""What happens on a rank before and after each cell.

Covers: keeping the process group usable for the next cell.
Does not cover: making it (``process_group``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .process_group import Group


def before_cell(group: Group | None) -> None:
    """Prepare the process group for the cell."""
    if group is not None:
        group.before_cell()


def after_cell(group: Group | None) -> None:
    """Bring the session's process group back if the cell ended it."""
    if group is not None:
        group.after_cell()
