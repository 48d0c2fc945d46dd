"""Track whether all members of a process group have called equally many of its collectives.

Covers: the totals that ranks report with each reply, which ranks are ahead, when the group has to be formed again.
Does not cover: counting (``rank.process_group.collective_counts``), forming the group (``state_machine``,
``supervisor``).

A rank that is one collective ahead stays ahead, whatever cells run later: it never matches the others again. So the
comparison uses the totals since the group was formed, over all ranks and not only those of one cell. A rank that runs a
cell may be about to call what the others have called; it is compared once it has replied.

Messages between two ranks concern only those two, and one cell may send what a later one receives. But a later cell
would receive a message that a failed cell has sent or awaits, so after a failure the groups are formed again as well.

:class:`Steps` has no I/O: it takes the reports of ranks and returns what follows from them.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from ...protocol.ranks import NEW_GROUP, label_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

DEFAULT_GROUPS = ("0", "horovod")  # groups of all ranks; a subgroup's name lists its ranks, as in "1 of ranks 0-1"


class Steps:
    """Number of collectives that each rank has called, by group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # shared by the link's thread, which takes replies, and threads that send cells
        self._totals: dict[int, dict[tuple[str, str], int]] = {}  # for ranks that run no cell, by generation and group
        self._running: set[int] = set()
        self._unjudged: set[int] = set()  # ranks that ran a cell when another rank's cell failed
        self._noted: list[str] = []
        # Messages sent or received by ranks that run no cell: the generation, and counts by sender and receiver as in
        # "0>1".
        self._messages: dict[int, tuple[str, Mapping[str, int]]] = {}
        self._pairs: dict[int, set[str]] = {}  # sender and receiver pairs, by each of both ranks
        self._under_way: dict[str, int] = {}  # messages that successful cells left sent and not received, by pair

    # Events

    def formed(self, reports: Mapping[int, Mapping[str, Any]], generation: str) -> None:
        """Take the reports of ranks that have formed their groups; earlier counts are discarded."""
        with self._lock:
            self._under_way.clear()
            self._pairs.clear()
            for rank, report in reports.items():
                self._put(rank, generation, report)
            self._unjudged.clear()
            self._noted = []

    def sent(self, ranks: Iterable[int]) -> None:
        """Record that ranks are about to run a cell."""
        with self._lock:
            for rank in ranks:
                self._remove(rank)
                self._running.add(rank)

    def replied(self, rank: int, generation: str, report: Mapping[str, Any], *, failed: bool) -> bool:
        """Take a rank's report at the end of its cell; return whether its groups have to be formed again.

        They do if the cell failed on this rank and ranks are out of step, whichever cell caused that. They also do once
        this rank's report shows it after another rank's cell had failed while this one still ran.
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
                return bool(self._uneven()) or any(self._under_way.get(pair, 0) != n for pair, n in under_way.items())
            self._under_way |= under_way
            return False

    def died(self, rank: int) -> None:
        """Record that a rank's process has ended; the group is formed again with a new one."""
        with self._lock:
            self._remove(rank)
            self._running.discard(rank)
            self._unjudged.discard(rank)

    # State

    def notes(self) -> list[str]:
        """Return which ranks are ahead, one sentence per group, without sentences that the last call found as well."""
        with self._lock:
            notes = [_note(group, by_total) for (_, group), by_total in sorted(self._uneven().items())]
            new = [note for note in notes if note not in self._noted]
            self._noted = notes
            return new

    # Totals

    def _uneven(self) -> dict[tuple[str, str], dict[int, list[int]]]:
        """Return the groups whose members have different totals, with the ranks of each total."""
        found: dict[tuple[str, str], dict[int, list[int]]] = {}
        for rank, totals in sorted(self._totals.items()):
            for group, total in totals.items():
                found.setdefault(group, {}).setdefault(total, []).append(rank)
        return {group: by_total for group, by_total in found.items() if len(by_total) > 1}

    def _count_under_way(self, rank: int) -> Iterator[tuple[str, int]]:
        """Yield the number of messages to and from a rank that were sent and not received; both ranks run no cell."""
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
        self._totals[rank] = {(generation, name): total for name, total in report.get("collectives", {}).items()}

    def _remove(self, rank: int) -> None:
        self._messages.pop(rank, None)
        self._totals.pop(rank, None)


def _note(group: str, by_total: Mapping[int, Sequence[int]]) -> str:
    least = min(by_total)
    one, several = ("call", "calls") if group == NEW_GROUP else ("collective", "collectives")
    ahead = [
        f"{label_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} "
        f"{total - least} {one if total == least + 1 else several} ahead"
        for total, ranks in sorted(by_total.items(), reverse=True)
        if total > least
    ]
    where = "" if group in DEFAULT_GROUPS else f" in {NEW_GROUP}" if group == NEW_GROUP else f" in group {group}"
    return (
        f"out of step{where}: {', '.join(ahead)} of {label_ranks(by_total[least])}, so the next one that all ranks "
        "call will hang, unless the others call it first (if it hangs, interrupt it: all are in step again "
        "afterwards)"
    )


def _ranks_of(pair: str) -> tuple[int, int]:
    sender, _, receiver = pair.partition(">")
    return int(sender), int(receiver)
