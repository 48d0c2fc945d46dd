"""Collect notes on a session's recovery until they are shown to the user.

Covers: removing repeated notes, one line for ranks that can't be replaced for the same reason.
Does not cover: when they are shown (``client.cells.cell_run``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...protocol.ranks import label_ranks

if TYPE_CHECKING:
    from collections.abc import Collection


class Notes:
    """Notes in order of arrival; not thread-safe, so the owner has to hold a lock."""

    def __init__(self) -> None:
        self._notes: list[str] = []
        self._not_replaced: dict[str, set[int]] = {}  # ranks by reason
        self._lost: set[int] = set()  # ranks that have no host to be started on

    def add(self, *texts: str) -> None:
        """Add texts that are neither empty nor present yet."""
        self._notes += [each for each in dict.fromkeys(texts) if each and each not in self._notes]

    def add_not_replaced(self, rank: int, reason: str) -> None:
        """Add the reason why a rank can't be replaced, with the remedy."""
        self._not_replaced.setdefault(reason, set()).add(rank)

    def add_lost(self, rank: int) -> None:
        """Record that a rank's host is lost; :meth:`take` builds the text, as more hosts may be lost by then."""
        self._lost.add(rank)

    def take(self, why_lost: str, lost: Collection[int]) -> list[str]:
        """Return all notes and clear them.

        Parameters
        ----------
        why_lost
            Which hosts are lost now, and the remedy; empty: all are back.
        lost
            The ranks that died with them; no replacement was tried for those of a host that was lost later.
        """
        if self._lost and why_lost:
            self._not_replaced.setdefault(why_lost, set()).update(self._lost, lost)
        refused = [f"{label_ranks(ranks)} can't be replaced: {reason}" for reason, ranks in self._not_replaced.items()]
        notes, self._notes = self._notes + refused, []
        self._not_replaced.clear()
        self._lost.clear()
        return notes
