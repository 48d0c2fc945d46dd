"""Receive the events of a cell: a base class whose methods do nothing.

Covers: the interface that ``Cluster.run`` expects of a listener.
Does not cover: what a benchmark does with events (compare.public_scripts, faults.kinds).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jupyter_disttrain import CellRun
    from jupyter_disttrain.client.cells.events import Event


class CellListener:
    """A listener that ignores every event."""

    def on_events(self, events: Sequence[Event], run: CellRun) -> None:
        """Ignore the events."""

    def on_end(self, run: CellRun) -> None:
        """Ignore the end of the cell."""

    def on_late(self, event: Event) -> Event | None:
        """Pass an event after the end on to the next cell."""
        return event
