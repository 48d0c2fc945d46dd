"""Keep references to destroyed process groups for a while, so that freeing them can't deadlock.

Covers: delaying the release of destroyed groups, removing groups that an interrupt left half destroyed.
Does not cover: forming groups (``group``).

A finished collective of Gloo is freed by one of the group's own threads, which needs the GIL for it. The destructor of
a group waits for these threads. It waits without the GIL if Python drops the last reference, but with the GIL if a
model in DistributedDataParallel does: a script that makes a model, trains it, destroys the group and returns sometimes
hangs (seen with torch 2.13, also in two plain processes). So this module holds a destroyed group until its threads have
finished.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import _unregister_all_process_groups
from torch.distributed import distributed_c10d as c10d

from ...protocol.time_limits import KEPT_SECONDS
from .object_replacement import Protected

if TYPE_CHECKING:
    from collections.abc import Callable


def keep_ended_groups() -> Callable[[], None]:
    """Patch ``destroy_process_group`` to keep destroyed groups for a while; return torch's own, for aborted groups."""
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
    """Remove what is left of a group whose creation or destruction was interrupted.

    torch then has no default group but still has its name registered, so that no new one can be made. The steps are the
    last ones of ``destroy_process_group``.
    """
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
    kept = [Protected(each) for each in groups]
    timer = threading.Timer(KEPT_SECONDS, kept.clear)
    timer.name, timer.daemon = "ended process groups", True
    timer.start()
