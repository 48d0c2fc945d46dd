"""Report that a rank is used, so that an unused cluster can end.

Covers: one message per period in which there was a cell or a request.
Does not cover: ending the cluster (``client.transport.controller``).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ...protocol.environment import REPORT_USE

if TYPE_CHECKING:
    from collections.abc import Callable

    from .ipc import NannyEnd


class ActivityReporter:
    """Reports, in the nanny, whether the rank was used since the last report."""

    def __init__(self, wire: NannyEnd, report: Callable[[], None]) -> None:
        self._wire = wire
        self._report = report
        self._reported = 0
        self._pause = float(os.environ.get(REPORT_USE, "0"))
        self.due = time.monotonic() + self._pause if self._pause else None

    def report_due(self) -> None:
        """Report use, if a report is due and there was any."""
        if self.due is None or time.monotonic() < self.due:
            return
        self.due = time.monotonic() + self._pause
        in_use, count = self._wire.uses()
        if in_use or count != self._reported:
            self._reported = count
            self._report()
