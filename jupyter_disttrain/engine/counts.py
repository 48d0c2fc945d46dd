"""How many collectives a cell has called, by group.

Covers: torch's own numbers, without the point-to-point messages that Gloo counts among them.
Does not cover: comparing ranks (``cluster.cell_state``).
"""

from __future__ import annotations

import functools
import inspect
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .groups import GroupRecord

# They go from one rank to another, so that ranks may call different numbers of them and be in step all the same.
_BETWEEN_TWO = ("send", "recv", "isend", "irecv", "monitored_barrier")


class Counts:
    """The collectives of the cell that runs."""

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}  # what had been called when it began
        self._between_two: dict[str, int] = {}  # numbers that stand for no collective, by group
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
            group = options.get("group", args[group_at] if len(args) > group_at else None)
            before = _number(group)
            self._inside.call = True
            try:
                return original(*args, **options)
            finally:
                self._inside.call = False
                self._note(group, before)

        return call

    def _note(self, group: Any, before: int | None) -> None:
        after = _number(group)
        if before is not None and after is not None:
            name = _default_or(group).group_name
            self._between_two[name] = self._between_two.get(name, 0) + after - before

    def begin_anew(self) -> None:
        """Forget all groups: those that are made now bear the same names, and count from 0."""
        self._begun.clear()
        self._between_two.clear()

    def begin(self, live: Mapping[str, GroupRecord]) -> None:
        """Count from here."""
        self._begun = self._count(live)

    def since_begin(self, live: Mapping[str, GroupRecord]) -> dict[str, int]:
        """Return how many collectives were called in each group."""
        return {name: count - self._begun.get(name, 0) for name, count in self._count(live).items()}

    def _count(self, live: Mapping[str, GroupRecord]) -> dict[str, int]:
        numbers = {name: _number(held) for name, record in live.items() if (held := record.held()) is not None}
        self._between_two = {name: count for name, count in self._between_two.items() if name in numbers}
        return {name: number - self._between_two.get(name, 0) for name, number in numbers.items() if number is not None}


def _default_or(group: Any) -> Any:
    import torch.distributed as dist  # noqa: PLC0415

    return dist.group.WORLD if group is None else group


def _number(group: Any) -> int | None:
    """Return torch's number of the last collective; None for a group that has none, or that this rank is not in."""
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

    found = _default_or(group)
    try:
        if found is None or ":" not in str(c10d.get_backend(found)):
            return None if found is None else int(found._get_sequence_number_for_group())  # noqa: SLF001
        # Torch gives the number of one backend; those of a group with one for each device count apart.
        backends = [found._get_backend(device) for device in found._device_types]  # noqa: SLF001
        return sum(int(each._get_sequence_number_for_group()) for each in backends)  # noqa: SLF001
    except (AttributeError, RuntimeError):
        return None  # many backends don't count


def _position_of_group(function: Callable[..., Any]) -> int:
    return list(inspect.signature(function).parameters).index("group")
