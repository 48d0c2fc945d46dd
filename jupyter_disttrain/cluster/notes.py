"""What a person should know of how a session came back, until it is asked for.

Covers: each thing once, ranks that can't be replaced for one reason in one line.
Does not cover: when it is told (``cell_run``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ranks import label_ranks

if TYPE_CHECKING:
    from collections.abc import Collection


class Notes:
    """Sentences in the order in which they came; whoever uses it has a lock."""

    def __init__(self) -> None:
        self._said: list[str] = []
        self._not_replaced: dict[str, set[int]] = {}  # ranks, by the reason
        self._lost: set[int] = set()  # ranks that have no host to be started on

    def add(self, *words: str) -> None:
        """Keep what is not empty and not there yet."""
        self._said += [each for each in dict.fromkeys(words) if each and each not in self._said]

    def add_not_replaced(self, rank: int, reason: str) -> None:
        """Keep why a rank has no new process, and what helps."""
        self._not_replaced.setdefault(reason, set()).add(rank)

    def add_lost(self, rank: int) -> None:
        """Keep that a rank's host is lost; what of it is told is asked for then, as another may be lost meanwhile."""
        self._lost.add(rank)

    def take(self, why_lost: str, lost: Collection[int]) -> list[str]:
        """Return all and forget it.

        Parameters
        ----------
        why_lost
            Which hosts are lost by now, and what helps; empty: all are back.
        lost
            The ranks that died with them: for those of a host that was lost later nobody has tried.
        """
        if self._lost and why_lost:
            self._not_replaced.setdefault(why_lost, set()).update(self._lost, lost)
        refused = [f"{label_ranks(ranks)} can't be replaced: {reason}" for reason, ranks in self._not_replaced.items()]
        said, self._said = self._said + refused, []
        self._not_replaced.clear()
        self._lost.clear()
        return said
