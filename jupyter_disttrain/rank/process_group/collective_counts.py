"""Count this rank's collectives by group, and its sent and received messages by rank.

Covers: torch's own counts of collectives, less the point-to-point messages that Gloo includes.
Does not cover: comparing ranks (``client.recovery.collective_steps``).
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ...protocol.ranks import label_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .subgroups import GroupRecord

# Functions that send messages between two ranks, each with its parameter that names the other rank, if that is a single
# one. Ranks may call them different numbers of times and still be in step.
_BETWEEN_TWO = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src", "monitored_barrier": ""}


class Counts:
    """The collectives of each group since it was made."""

    def __init__(self) -> None:
        self._between_two: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # counts to subtract
        self._messages: dict[str, int] = {}  # by sender and receiver, e.g. "0>1"
        self._has_unknown_senders = False  # whether a receive accepts messages from any rank
        self._inside = threading.local()
        for name, peer in _BETWEEN_TWO.items():
            wrapped = self._wrap(getattr(c10d, name), peer)
            # Scripts and libraries use the function by either name; torch compares functions with both.
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
                return original(*args, **options)  # called by another wrapped function
            group = argument("group", args, options)
            group = dist.group.WORLD if group is None else group
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
                if peer and (counted or not was_cut_off):  # else it was interrupted before the message
                    other = argument(peer, args, options), argument(f"group_{peer}", args, options)
                    self._note_message(group, peer, *other, result)

        return call

    def _note_message(self, group: Any, peer: str, other: int | None, at: int | None, result: Any) -> None:
        """Count a message to or from a rank, given as global rank ``other`` or as rank ``at`` within the group."""
        if not isinstance(group, dist.ProcessGroup):
            return  # this rank is not in the group, and the call had no effect
        if other is None and at is not None:
            other = dist.get_global_rank(group, at)
        if other is None and isinstance(result, int):
            other = result  # recv() from any rank returns the sender
        if other is None or other < 0:
            self._has_unknown_senders = True
            return
        own = dist.get_rank()
        pair = f"{own}>{other}" if peer == "dst" else f"{other}>{own}"
        self._messages[pair] = self._messages.get(pair, 0) + 1

    def begin_again(self) -> None:
        """Reset the message counts after the groups were replaced."""
        self._messages.clear()
        self._has_unknown_senders = False

    @property
    def messages(self) -> dict[str, int] | None:
        """Numbers of messages sent or received since the default group was made; None if unknown."""
        return None if self._has_unknown_senders else dict(self._messages)

    def totals(self, live: Mapping[str, GroupRecord]) -> dict[str, int]:
        """Return the number of collectives called in each group; keys contain the ranks of a subgroup.

        Two groups may have the same name if only their own ranks called ``new_group``.
        """
        totals = {}
        for record in live.values():
            group = record.held()
            if group is not None and (number := _number(group)) is not None:
                name = f"{record.name} of {label_ranks(record.ranks)}" if record.ranks else record.name
                totals[name] = number - self._between_two.get(group, 0)
        return totals


def _number(group: Any) -> int | None:
    """Return torch's count of a group's collectives; None if it has none or this rank is not in the group.

    Each backend of a group counts separately. A backend may serve several devices, and many do not count.
    """
    try:
        backends = {group._get_backend(device) for device in group._device_types}  # noqa: SLF001
    except (AttributeError, RuntimeError):
        return None
    numbers = []
    for backend in backends:
        with suppress(AttributeError, RuntimeError):
            numbers.append(int(backend._get_sequence_number_for_group()))  # noqa: SLF001
    return sum(numbers) if numbers else None
