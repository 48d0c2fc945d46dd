"""What happens on a rank before and after each cell.

Covers: what the client has to know of the process group after a cell.
Does not cover: the group itself (``process_group``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cell_errors import is_of_group

if TYPE_CHECKING:
    from .process_group import Group


def before_cell(group: Group | None, cell: int) -> None:
    """Tell the process group which cell begins."""
    if group is not None:
        group.before_cell(cell)


def after_cell(group: Group | None, error: BaseException | None) -> tuple[str, bool]:
    """Return which process group the rank is in, and whether the cell's error came out of one.

    The first is ``Group.tag``, or ``"none"`` on a rank without torch.
    """
    if group is None:
        return "none", False
    of_group = error is not None and is_of_group(error)
    group.broken = group.broken or of_group
    return group.tag, of_group
