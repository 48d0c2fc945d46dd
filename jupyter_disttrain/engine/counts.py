"""How many collectives this rank has called, by group, and how many messages it has sent and received, by rank.

Covers: torch's own numbers of collectives, without the messages that Gloo counts among them.
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

# They go from one rank to another, so that ranks may call different numbers of them and be in step all the same. Each
# with its parameter that names the other rank, where that is one.
_BETWEEN_TWO = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src", "monitored_barrier": ""}


class Counts:
    """The collectives of each group since it was made."""

    def __init__(self) -> None:
        self._between_two: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # that are no collectives
        self._messages: dict[str, int] = {}  # by sender and receiver, as in "0>1"
        self._has_unknown_senders = False  # messages are awaited from any rank
        self._inside = threading.local()
        self._hook()

    def _hook(self) -> None:
        import torch.distributed as dist  # noqa: PLC0415
        from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

        for name, peer in _BETWEEN_TWO.items():
            wrapped = self._wrap(getattr(c10d, name), peer)
            # Both are the names by which scripts and libraries reach it; torch compares functions with them.
            setattr(c10d, name, wrapped)
            setattr(dist, name, wrapped)

    def _wrap(self, original: Callable[..., Any], peer: str) -> Callable[..., Any]:
        parameters = list(inspect.signature(original).parameters)

        def argument(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            at = parameters.index(name) if name in parameters else len(args)
            return options.get(name, args[at] if len(args) > at else None)

        @functools.wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            if getattr(self._inside, "call", False):
                return original(*args, **options)  # one of them calls another
            group = _default_or(argument("group", args, options))
            before = _number(group)
            result = None
            was_cut_off = True
            self._inside.call = True
            try:
                result = original(*args, **options)
                was_cut_off = False
                return result
            finally:
                self._inside.call = False
                after = _number(group)
                counted = 0 if before is None or after is None else after - before
                if counted:
                    self._between_two[group] = self._between_two.get(group, 0) + counted
                if peer and (counted or not was_cut_off):  # else there was no message yet
                    other = argument(peer, args, options), argument(f"group_{peer}", args, options)
                    self._note_message(group, peer, *other, result)

        return call

    def _note_message(self, group: Any, peer: str, other: int | None, at: int | None, result: Any) -> None:
        """Count a message to or from another rank, which is named as such or ``at`` its place in the group."""
        import torch.distributed as dist  # noqa: PLC0415

        if not isinstance(group, dist.ProcessGroup):
            return  # this rank is not in it, and the call did nothing
        if other is None and at is not None:
            other = dist.get_global_rank(group, at)
        if other is None and isinstance(result, int):
            other = result  # who has sent what recv() took from any rank
        if other is None or other < 0:
            self._has_unknown_senders = True
            return
        own = dist.get_rank()
        pair = f"{own}>{other}" if peer == "dst" else f"{other}>{own}"
        self._messages[pair] = self._messages.get(pair, 0) + 1

    def begin_again(self) -> None:
        """Forget messages: the groups through which they went are gone."""
        self._messages.clear()
        self._has_unknown_senders = False

    @property
    def messages(self) -> dict[str, int] | None:
        """How many messages this rank has sent or received since the default group was made; None: not known."""
        return None if self._has_unknown_senders else dict(self._messages)

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
