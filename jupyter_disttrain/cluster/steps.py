"""Ranks in step: whether all members of a process group have called equally many of its collectives.

Covers: the totals that ranks report with each reply, which ranks are ahead, when the group has to be formed again.
Does not cover: counting (``engine.counts``), forming the group (``recovery``, ``guardian``).

A rank that is one collective ahead stays so, whatever cells run meanwhile: it never meets the others again. So the
totals since the group was made are compared, and over all ranks, not only those of one cell. A rank that runs a cell
may be about to call what the others have called; it is compared once it has replied.

:class:`Steps` has no I/O: what ranks report goes in, what that means comes out.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from ..ranks import label_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DEFAULT_GROUPS = ("0", "horovod")  # their names; that of a subgroup names its ranks, as in "1 of ranks 0-1"


class Steps:
    """How many collectives each rank has called, by group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the link's thread, which takes replies, and those that send cells
        self._totals: dict[int, dict[tuple[str, str], int]] = {}  # of ranks that run no cell, by generation and group
        self._counts: dict[tuple[str, str], Counter[int]] = {}  # how many ranks have which total
        self._uneven: set[tuple[str, str]] = set()  # the groups whose totals differ
        self._running: set[int] = set()
        self._unjudged: set[int] = set()  # ranks that ran a cell when another failed
        self._noted: list[str] = []

    # What happens

    def formed(self, totals: Mapping[int, Mapping[str, int]], generation: str) -> None:
        """Take what ranks report once they have formed their groups: whatever was before is over."""
        with self._lock:
            for rank, report in totals.items():
                self._put(rank, generation, report)
            self._unjudged.clear()
            self._noted = []

    def sent(self, ranks: Iterable[int]) -> None:
        """Note that ranks are about to run a cell."""
        with self._lock:
            for rank in ranks:
                self._remove(rank)
                self._running.add(rank)

    def replied(self, rank: int, generation: str, totals: Mapping[str, int], *, failed: bool) -> bool:
        """Take what a rank reports at the end of its cell; returns whether its groups have to be formed again.

        That is so if the cell failed on it and ranks are out of step, whichever cell has left them so; and once this
        rank shows what could not be known when another's cell failed.
        """
        with self._lock:
            self._running.discard(rank)
            self._put(rank, generation, totals)
            judged = failed or rank in self._unjudged
            self._unjudged.discard(rank)
            if failed:
                self._unjudged |= self._running
            return judged and bool(self._uneven)

    def died(self, rank: int) -> None:
        """Note that a rank's process has ended; the group is formed again with a new one."""
        with self._lock:
            self._remove(rank)
            self._running.discard(rank)
            self._unjudged.discard(rank)

    # What is so

    def notes(self) -> list[str]:
        """Return which ranks are ahead, a sentence per group; nothing if that is what the last call returned."""
        with self._lock:
            notes = [self._note(group) for group in sorted(self._uneven)]
            new = [note for note in notes if note not in self._noted]
            self._noted = notes
            return new

    def _note(self, group: tuple[str, str]) -> str:
        by_total: dict[int, list[int]] = {}
        for rank, totals in sorted(self._totals.items()):
            if group in totals:
                by_total.setdefault(totals[group], []).append(rank)
        least = min(by_total)
        ahead = [
            f"{label_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} "
            f"{total - least} {'collective' if total == least + 1 else 'collectives'} ahead"
            for total, ranks in sorted(by_total.items(), reverse=True)
            if total > least
        ]
        where = "" if group[1] in DEFAULT_GROUPS else f" in group {group[1]}"
        return (
            f"out of step{where}: {', '.join(ahead)} of {label_ranks(by_total[least])}, so the next one that all ranks "
            "call will hang, unless the others call it first (stop it then, and all are in step again)"
        )

    # The totals

    def _put(self, rank: int, generation: str, totals: Mapping[str, int]) -> None:
        self._remove(rank)
        own = self._totals[rank] = {(generation, name): total for name, total in totals.items()}
        for group, total in own.items():
            counts = self._counts.setdefault(group, Counter())
            counts[total] += 1
            if len(counts) > 1:
                self._uneven.add(group)

    def _remove(self, rank: int) -> None:
        for group, total in self._totals.pop(rank, {}).items():
            counts = self._counts[group]
            counts[total] -= 1
            if not counts[total]:
                del counts[total]
            if not counts:
                del self._counts[group]
            if len(counts) <= 1:
                self._uneven.discard(group)
