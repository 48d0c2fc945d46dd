"""How many collectives this rank has called, by group.

Covers: torch's own numbers, without the point-to-point messages that Gloo counts among them.
Does not cover: comparing ranks (``cluster.steps``).
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from typing import TYPE_CHECKING, Any

from ..ranks import label_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .groups import GroupRecord

# They go from one rank to another, so that ranks may call different numbers of them and be in step all the same.
_BETWEEN_TWO = ("send", "recv", "isend", "irecv", "monitored_barrier")


class Counts:
    """The collectives of each group since it was made."""

    def __init__(self) -> None:
        self._between_two: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # that are no collectives
        self._inside = threading.local()
        self._hook()

    def _hook(self) -> None:
        import torch.distributed as dist  # noqa: PLC0415
        from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

        for name in _BETWEEN_TWO:
            wrapped = self._wrap(getattr(c10d, name))
            # Both are the names by which scripts and libraries reach it; torch compares functions with them.
            setattr(c10d, name, wrapped)
            setattr(dist, name, wrapped)

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        group_at = _position_of_group(original)

        @functools.wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            if getattr(self._inside, "call", False):
                return original(*args, **options)  # one of them calls another
            group = _default_or(options.get("group", args[group_at] if len(args) > group_at else None))
            before = _number(group)
            self._inside.call = True
            try:
                return original(*args, **options)
            finally:
                self._inside.call = False
                after = _number(group)
                if before is not None and after is not None:
                    self._between_two[group] = self._between_two.get(group, 0) + after - before

        return call

    def totals(self, live: Mapping[str, GroupRecord]) -> dict[str, int]:
        """Return how many collectives were called in each group; the ranks of a subgroup are part of its name.

        Two groups may have one name where only their own ranks have called ``new_group``.
        """
        totals = {}
        for record in live.values():
            group = record.held()
            if group is not None and (number := _number(group)) is not None:
                name = f"{record.name} of {label_ranks(record.ranks)}" if record.ranks else record.name
                totals[name] = number - self._between_two.get(group, 0)
        return totals


def _default_or(group: Any) -> Any:
    import torch.distributed as dist  # noqa: PLC0415

    return dist.group.WORLD if group is None else group


def _number(group: Any) -> int | None:
    """Return torch's number of the last collective; None for a group that has none, or that this rank is not in."""
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

    try:
        if group is None or ":" not in str(c10d.get_backend(group)):
            return None if group is None else int(group._get_sequence_number_for_group())  # noqa: SLF001
        # Torch gives the number of one backend; those of a group with one for each device count apart.
        backends = [group._get_backend(device) for device in group._device_types]  # noqa: SLF001
        return sum(int(each._get_sequence_number_for_group()) for each in backends)  # noqa: SLF001
    except (AttributeError, RuntimeError):
        return None  # many backends don't count


def _position_of_group(function: Callable[..., Any]) -> int:
    return list(inspect.signature(function).parameters).index("group")
