"""Request the state of ranks and report which ranks wait for which.

Covers: requests to ranks, and to the nannies of those that don't reply; the lines for the user.
Does not cover: acting on the state (``supervisor``), explaining it (``hang_explanation``).
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...protocol.messages import RankVitals
from ...protocol.requests import Stack, Where
from ...protocol.time_limits import GLANCE_SECONDS, HANG_PATIENCE_SECONDS, LONG_SECONDS, OUTSIDE_SECONDS
from ..startup.rank_table import ended
from .hang_explanation import HangReport, explain, mismatches, waited_for

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Mapping
    from concurrent.futures import Future

    from ..startup.launch import Launch
    from ..transport.link import Message
    from .state_machine import Recovery


log = logging.getLogger(__name__)


class StackCollector:
    """Requests what the ranks of one cluster are doing, and keeps their latest reports.

    ``state`` receives each report as well; ``changed`` guards both, and is notified of each report.
    """

    def __init__(
        self, launch: Launch, state: Recovery, changed: threading.Condition, note: Callable[[str], None]
    ) -> None:
        self._launch = launch
        self._state = state
        self._changed = changed
        self._note = note
        self.reports: dict[int, HangReport] = {}  # the latest of each rank

    def hang(self) -> list[str]:
        """Return lines on which ranks wait for which, once one has waited ``hang_after_s``; a mismatch at once.

        While a rank waits for the user, e.g. in a debugger, the others are expected to wait.
        """
        with self._changed:
            fresh, running = self.fresh(), self._state.running
            reports = {rank: report for rank, report in fresh.items() if rank in running}
            certain = mismatches(fresh)  # these can't succeed, however long they wait
            is_expected = any(report.asks for report in reports.values())
            is_hang = any(report.is_hang(self._state.config.hang_after_s) for report in reports.values())
            if not certain and (is_expected or not is_hang):
                return []
            return [*certain, *self._explain(reports)]

    def fresh(self) -> dict[int, HangReport]:
        """Return the ranks' states that were reported since the running cells began; without dead ranks.

        For a rank that runs a cell, that is since its own cell began. Ranks that owe a reply get a state without one.
        """
        found = {}
        for rank in self.reports.keys() - self._state.dead:
            report, since = self.reports[rank], self._state.since(rank)
            if report.answered_at >= since:
                found[rank] = report
            elif report.asked_at >= since:
                found[rank] = HangReport(asked_at=report.asked_at)
        return found

    def _explain(self, reports: Mapping[int, HangReport]) -> list[str]:
        """Return lines on the state of ranks that run a cell, and of those that run none."""
        running = self._state.running
        idle = set(range(len(self._launch.table))) - running - self._state.dead
        return explain(reports, sorted(idle), ended(self._launch.table, running))

    def where(self, timeout_s: float) -> list[str]:
        """Return lines on what each rank is doing now; ranks in the same state share a line."""
        reports = self.collect(self._state.running, timeout_s)
        with self._changed:
            if waited_for(reports.values()):
                self._ask(set(range(len(self._launch.table))) - self._state.dead, timeout_s)
            return [*mismatches(self.fresh()), *self._explain(reports)]

    def collect(self, ranks: set[int], timeout_s: float) -> dict[int, HangReport]:
        """Request the state of ranks and wait for the replies; ranks that don't reply in time are included."""
        with self._changed:
            began = time.monotonic()
            self._ask(ranks, timeout_s)
            for rank in self._silent(ranks, began):
                self._ask_nanny(rank)
            self._changed.wait_for(
                lambda: all(self.reports[rank].outside for rank in self._silent(ranks, began)), OUTSIDE_SECONDS
            )
            return {rank: self.reports[rank] for rank in ranks}

    def _ask(self, ranks: set[int], timeout_s: float) -> None:
        began = time.monotonic()
        self.request(ranks)
        self._changed.wait_for(lambda: not self._silent(ranks, began), timeout_s)

    def note_waits(self, ranks: set[int]) -> None:
        """Add a note on which ranks have waited long, when the user interrupts them: afterwards it would be unknown."""
        with self._changed:
            self._ask(ranks, GLANCE_SECONDS)
            fresh = self.fresh()
            reports = {rank: report for rank, report in fresh.items() if rank in ranks}
            if max((report.waits_s or 0.0 for report in reports.values()), default=0.0) < LONG_SECONDS:
                return
            lines = [*mismatches(fresh), *self._explain(reports)]
            self._note("\n  ".join(("when it was interrupted:", *lines)))

    def _silent(self, ranks: set[int], began: float) -> list[int]:
        return [rank for rank in ranks if self.reports[rank].answered_at < began]

    # Requests

    def request(self, ranks: Collection[int]) -> None:
        """Ask ranks what they are doing, and whether they have called the collectives that others wait in."""
        running = self._state.running
        about = waited_for(report for rank, report in self.reports.items() if rank in running)
        for rank in ranks:
            self._request(rank, about)

    def _request(self, rank: int, about: list[tuple[Any, Any, Any, str]]) -> None:
        """Send a request to a rank, unless it still owes a reply; then ask its nanny after a while."""
        report = self.reports.get(rank)
        if report is not None and report.asked_at > report.answered_at:
            # The nanny sends a signal, which makes C code return early that does not resume: only if it is needed.
            patience_s = self._state.config.hang_after_s if self._state.is_calm else 0.0
            if report.silent_s > max(patience_s, HANG_PATIENCE_SECONDS):
                self._ask_nanny(rank)
            return
        asked_at = time.monotonic()
        self.reports[rank] = HangReport(asked_at=asked_at) if report is None else replace(report, asked_at=asked_at)
        engine = self._launch.table[rank].engine
        future = self._launch.open_link.request(engine, Where(about=about))
        future.add_done_callback(lambda done: self._on_reply(rank, done))

    def _ask_nanny(self, rank: int) -> None:
        """Ask the nanny for the stack of a rank that does not reply."""
        nanny = self._launch.table[rank].nanny
        future = self._launch.open_link.request(nanny, Stack())

        def on_stack(done: Future[Message]) -> None:
            if done.exception() is None:
                with self._changed:
                    content = done.result()["content"]
                    vitals = RankVitals.from_content(content["vitals"]) if content.get("vitals") else None
                    stack = content.get("stack", "")
                    self.reports[rank] = replace(self.reports[rank], outside=stack, vitals=vitals)
                    self._changed.notify_all()

        future.add_done_callback(on_stack)

    def _on_reply(self, rank: int, done: Future[Message]) -> None:
        if done.exception() is not None:
            return  # the cluster was closed
        content: dict[str, Any] = done.result()["content"]
        is_ok = content["status"] == "ok"
        if not is_ok:
            log.warning("rank %d could not report its state: %s", rank, content)
        with self._changed:
            report = self.reports[rank] = self.reports[rank].answered(time.monotonic(), content if is_ok else None)
            in_mpi = is_ok and bool(content.get("mpi"))
            self._state.on_inspected(
                rank, report.asked_at, report.waits_s, in_program=bool(report.program), in_mpi=in_mpi
            )
            self._changed.notify_all()
