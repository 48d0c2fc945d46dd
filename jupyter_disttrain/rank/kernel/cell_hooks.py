"""Clean up after each cell and collect the state of the process group for the cell's reply.

Covers: the group's state and collective counts after a cell, lock files left by an interrupted cell.
Does not cover: the group itself (``rank.process_group.group``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..libraries.extension_builds import give_back_files
from ..process_group.errors import is_of_group
from ..process_group.model_rebuild import is_step_cut_off

if TYPE_CHECKING:
    from ...features.horovod.calls import HorovodCalls
    from ..process_group.group import Group


def counts(group: Group | None, horovod: HorovodCalls) -> dict[str, Any]:
    """Return this rank's counts of collectives in each process group since it was made, and of messages."""
    if group is None:
        return {"collectives": {}, "messages": None}
    found = group.counts
    return found | {"collectives": found["collectives"] | horovod.counted}


def after_cell(group: Group | None, horovod: HorovodCalls, error: BaseException | None) -> tuple[str, dict[str, Any]]:
    """Return the rank's process group, and the entries about groups for the cell's reply.

    The first is ``Group.tag``, or ``"none"`` on a rank without torch. The entries state whether the error comes from a
    group, how many collectives the rank has called in each, and whether a step of an FSDP2 model was interrupted.
    """
    give_back_files()
    of_group = error is not None and is_of_group(error)
    if group is None:
        return "none", {"group_error": of_group}
    group.broken = group.broken or of_group
    entries = {"group_error": of_group} | counts(group, horovod)
    return group.tag, entries | {"step_cut_off": error is not None and is_step_cut_off()}
