"""Listeners of a cell for tests: ignore its events, or interrupt the notebook's process at a condition."""

from __future__ import annotations

import math
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jupyter_disttrain import CellRun
    from jupyter_disttrain.client.cells.events import Event


class IgnoringListener:
    """A listener that does nothing."""

    def on_events(self, events: Sequence[Event], run: CellRun) -> None: ...

    def on_end(self, run: CellRun) -> None: ...

    def on_late(self, event: Event) -> None: ...


class Interrupter(IgnoringListener):
    """Send this process SIGINT whenever ``when`` holds, at most ``times``; counts signals and ends of the cell."""

    def __init__(self, when: Callable[[CellRun], object], times: float = math.inf) -> None:
        self.sent = self.ends = 0
        self._when = when
        self._times = times

    def on_events(self, events: Sequence[Event], run: CellRun) -> None:  # noqa: ARG002
        if self.sent < self._times and self._when(run):
            self.sent += 1
            signal.raise_signal(signal.SIGINT)

    def on_end(self, run: CellRun) -> None:  # noqa: ARG002
        self.ends += 1
