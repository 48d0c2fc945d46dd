"""Process groups that were destroyed, kept for a moment.

Covers: keeping whoever lets go of a destroyed group last from waiting for ever; groups that are half ended.

A finished collective of Gloo is put away by one of the group's own threads, which needs Python's lock for it. A group
that nobody holds any more waits for its threads. Let go of by Python it waits without the lock, but where a model in
DistributedDataParallel is the last to hold it, with the lock: a script that makes a model, trains it, destroys the
group and returns hangs at times (seen with torch 2.13, in two plain processes as well). So a destroyed group is held
here until its threads have put away what they had to.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

from .replacing import Aside

if TYPE_CHECKING:
    from collections.abc import Callable

KEPT_SECONDS = 1.0  # much longer than a thread waits for Python's lock


def keep_ended_groups() -> Callable[[], None]:
    """From now on hold for a moment what ``destroy_process_group`` destroys; returns torch's, for aborted groups."""
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

    original: Callable[..., None] = dist.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        before = tuple(c10d._world.pg_map)  # noqa: SLF001
        try:
            original(group)
        finally:
            left = c10d._world.pg_map  # noqa: SLF001
            _hold(tuple(each for each in before if each not in left))

    dist.destroy_process_group = c10d.destroy_process_group = destroy_process_group
    return original


def forget_half_ended_groups() -> None:
    """Forget what an interrupt has left of a group, in the midst of its making or its end.

    There is no default group then, and still one of that name, so that none could be made. The steps are the last ones
    of ``destroy_process_group``.
    """
    from torch._C._distributed_c10d import _unregister_all_process_groups  # noqa: PLC0415
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

    world = c10d._world  # noqa: SLF001
    if c10d.is_initialized() or not (world.pg_map or world.pg_names):
        return
    _hold(tuple({*world.pg_map, *world.pg_names}))
    for records in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        records.clear()
    for by_tag in (world.pg_to_tag, world.tags_to_pg, world.pg_coalesce_state):
        by_tag.clear()
    _unregister_all_process_groups()


def _hold(groups: tuple[Any, ...]) -> None:
    kept = [Aside(each) for each in groups]
    timer = threading.Timer(KEPT_SECONDS, kept.clear)
    timer.name, timer.daemon = "ended process groups", True
    timer.start()
