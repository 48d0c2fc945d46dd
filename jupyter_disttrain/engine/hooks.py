"""What happens on a rank after each cell.

Covers: what the client has to know of the process group after a cell, files that a cell that was cut off has left.
Does not cover: the group itself (``process_group``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .cell_errors import is_of_group
from .compiled_parts import give_back_files
from .models import is_step_cut_off

if TYPE_CHECKING:
    from .horovod_calls import HorovodCalls
    from .process_group import Group


def counts(group: Group | None, horovod: HorovodCalls) -> dict[str, Any]:
    """Return how many collectives this rank has called in each process group since that was made, and messages."""
    if group is None:
        return {"collectives": {}, "messages": None}
    told = group.counts
    return told | {"collectives": told["collectives"] | horovod.counted}


def after_cell(group: Group | None, horovod: HorovodCalls, error: BaseException | None) -> tuple[str, dict[str, Any]]:
    """Return which process group the rank is in, and what the cell's reply says of it.

    The first is ``Group.tag``, or ``"none"`` on a rank without torch. The reply says whether the error came out of a
    group, how many collectives the rank has called in each, and whether a step of an FSDP2 model was cut off.
    """
    give_back_files()
    of_group = error is not None and is_of_group(error)
    if group is None:
        return "none", {"group_error": of_group}
    group.broken = group.broken or of_group
    told = {"group_error": of_group} | counts(group, horovod)
    return group.tag, told | {"step_cut_off": error is not None and is_step_cut_off()}
