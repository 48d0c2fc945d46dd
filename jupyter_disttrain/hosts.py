"""The hosts that ranks run on, as people name them.

Covers: one host and how many ranks it takes.
Does not cover: whether they can be used (``cluster.preflight``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSlots:
    """A host and its places for ranks."""

    name: str  # as ssh takes it
    slots: int | None  # ranks; None: as many as it has GPUs


def total_slots(hosts: Sequence[HostSlots]) -> int | None:
    """Return how many ranks the hosts take; None where that is not settled, or there are no hosts."""
    counts = [host.slots for host in hosts]
    return sum(count or 0 for count in counts) or None if None not in counts else None
