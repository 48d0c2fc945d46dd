"""Publish the start of a cell within its rank.

Covers: the event and its subscribers, which keep state per cell.
Does not cover: the start as the nanny learns of it (``rank.nanny.ipc``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class CellStarted:
    """A cell starts on this rank."""

    number: int  # the cluster's number of the cell
    execution_count: int  # its prompt number
    header: dict[str, Any]  # of its request
    is_typed: bool  # whether the user has written the code


class CellStarts:
    """Passes each :class:`CellStarted` to its subscribers, in the order in which they subscribed."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[[CellStarted], None]] = []

    def subscribe(self, *subscribers: Callable[[CellStarted], None]) -> None:
        """Call these with each cell from now on, on the main thread, before the cell's code runs."""
        self._subscribers += subscribers

    def publish(self, cell: CellStarted) -> None:
        """Call the subscribers."""
        for subscriber in self._subscribers:
            subscriber(cell)
