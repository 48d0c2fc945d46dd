"""Ranks in step: whether all members of a process group have called equally many of its collectives.

Covers: the totals that ranks report with each reply, which ranks are ahead, when the group has to be formed again.
Does not cover: counting (``engine.counts``), forming the group (``recovery``, ``guardian``).

A rank that is one collective ahead stays so, whatever cells run meanwhile: it never meets the others again. So the
totals since the group was made are compared, and over all ranks, not only those of one cell. A rank that runs a cell
may be about to call what the others have called; it is compared once it has replied.

Messages between two ranks concern those alone, and one cell may send what a later one receives. But a message that a
failed cell has sent, or awaits, would be taken for a later one's, so then the groups are formed again as well.

:class:`Steps` has no I/O: what ranks report goes in, what that means comes out.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from ..ranks import label_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

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
        # Sent or received by ranks that run no cell: with the generation, by sender and receiver as in "0>1".
        self._messages: dict[int, tuple[str, Mapping[str, int]]] = {}
        self._pairs: dict[int, set[str]] = {}  # the senders and receivers that there are, by each of both ranks
        self._under_way: dict[str, int] = {}  # what cells that ended well have left

    # What happens

    def formed(self, reports: Mapping[int, Mapping[str, Any]], generation: str) -> None:
        """Take what ranks report once they have formed their groups: whatever was before is over."""
        with self._lock:
            self._under_way.clear()
            self._pairs.clear()
            for rank, report in reports.items():
                self._put(rank, generation, report)
            self._unjudged.clear()
            self._noted = []

    def sent(self, ranks: Iterable[int]) -> None:
        """Note that ranks are about to run a cell."""
        with self._lock:
            for rank in ranks:
                self._remove(rank)
                self._running.add(rank)

    def replied(self, rank: int, generation: str, report: Mapping[str, Any], *, failed: bool) -> bool:
        """Take what a rank reports at the end of its cell; returns whether its groups have to be formed again.

        That is so if the cell failed on it and ranks are out of step, whichever cell has left them so; and once this
        rank shows what could not be known when another's cell failed.
        """
        with self._lock:
            self._running.discard(rank)
            self._put(rank, generation, report)
            judged = failed or rank in self._unjudged
            self._unjudged.discard(rank)
            if failed:
                self._unjudged |= self._running
            under_way = dict(self._count_under_way(rank))
            if judged:
                return bool(self._uneven) or any(self._under_way.get(pair, 0) != under_way[pair] for pair in under_way)
            self._under_way |= under_way
            return False

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

    def _count_under_way(self, rank: int) -> Iterator[tuple[str, int]]:
        """Yield how many messages to and from a rank were sent and not received, where both ranks run no cell."""
        for pair in self._pairs.get(rank, ()):
            sender, receiver = _ranks_of(pair)
            if sender != receiver and sender in self._messages and receiver in self._messages:
                (of_sender, sent), (of_receiver, received) = self._messages[sender], self._messages[receiver]
                if of_sender == of_receiver:
                    yield pair, sent.get(pair, 0) - received.get(pair, 0)

    def _put(self, rank: int, generation: str, report: Mapping[str, Any]) -> None:
        self._remove(rank)
        messages: Mapping[str, int] | None = report.get("messages")
        if messages is not None:
            self._messages[rank] = generation, messages
            for pair in messages:
                for each in _ranks_of(pair):
                    self._pairs.setdefault(each, set()).add(pair)
        totals: Mapping[str, int] = report.get("collectives", {})
        own = self._totals[rank] = {(generation, name): total for name, total in totals.items()}
        for group, total in own.items():
            counts = self._counts.setdefault(group, Counter())
            counts[total] += 1
            if len(counts) > 1:
                self._uneven.add(group)

    def _remove(self, rank: int) -> None:
        self._messages.pop(rank, None)
        for group, total in self._totals.pop(rank, {}).items():
            counts = self._counts[group]
            counts[total] -= 1
            if not counts[total]:
                del counts[total]
            if not counts:
                del self._counts[group]
            if len(counts) <= 1:
                self._uneven.discard(group)


def _ranks_of(pair: str) -> tuple[int, int]:
    sender, _, receiver = pair.partition(">")
    return int(sender), int(receiver)
