"""Request the state of ranks and report which ranks wait for which.

Covers: requests to ranks, and to the nannies of those that don't reply; the lines for the user.
Does not cover: acting on the state (``supervisor``), explaining it (``hang_detection``).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from ...protocol.requests import Stack, Where
from ...protocol.time_limits import GLANCE_SECONDS, HANG_PATIENCE_SECONDS, LONG_SECONDS, OUTSIDE_SECONDS
from ..startup.rank_table import ended
from .hang_detection import Look, explain, mismatches, waited_for

if TYPE_CHECKING:
    import threading
    from collections.abc import Collection, Mapping
    from concurrent.futures import Future

    from ..startup.launch import Launch
    from ..transport.link import Message
    from .notes import Notes
    from .state_machine import Recovery, Rules


log = logging.getLogger(__name__)


class Looking:
    """The part of a guardian that requests the state of ranks."""

    _launch: Launch
    _rules: Rules
    _state: Recovery
    _changed: threading.Condition
    _notes: Notes

    def __init__(self) -> None:
        self.looks: dict[int, Look] = {}  # latest known state, by rank

    def hang(self) -> list[str]:
        """Return lines on which ranks wait for which, once one has waited ``hang_after_s``; a mismatch at once."""
        with self._changed:
            fresh, running = self._fresh_looks(), self._state.running
            looks = {rank: look for rank, look in fresh.items() if rank in running}
            certain = mismatches(fresh)  # these can't succeed, however long they wait
            if not certain and not any(look.is_hang(self._rules.hang_after_s) for look in looks.values()):
                return []
            return [*certain, *self._explain(looks)]

    def _fresh_looks(self) -> dict[int, Look]:
        """Return the ranks' states that were reported since the running cells began; without dead ranks.

        For a rank that runs a cell, that is since its own cell began. Ranks that owe a reply get a state without one.
        """
        dead = self._state.dead
        found = {rank: look for rank, look in self.looks.items() if rank not in dead}
        return {rank: look for rank, look in found.items() if look.answered_at >= self._state.since(rank)} | {
            rank: Look(asked_at=look.asked_at)
            for rank, look in found.items()
            if look.asked_at >= self._state.since(rank) > look.answered_at
        }

    def _explain(self, looks: Mapping[int, Look]) -> list[str]:
        """Return lines on the state of ranks that run a cell, and of those that run none."""
        running = self._state.running
        idle = set(range(len(self._launch.table))) - running - self._state.dead
        return explain(looks, sorted(idle), ended(self._launch.table, running))

    def where(self, timeout_s: float) -> list[str]:
        """Return lines on what each rank is doing now; ranks in the same state share a line."""
        looks = self.look_now(self._state.running, timeout_s)
        with self._changed:
            if waited_for(looks.values()):
                self._ask(set(range(len(self._launch.table))) - self._state.dead, timeout_s)
            return [*mismatches(self._fresh_looks()), *self._explain(looks)]

    def look_now(self, ranks: set[int], timeout_s: float) -> dict[int, Look]:
        """Request the state of ranks and wait for the replies; ranks that don't reply in time are included."""
        with self._changed:
            began = time.monotonic()
            self._ask(ranks, timeout_s)
            for rank in self._silent(ranks, began):
                self._look_from_outside(rank)
            self._changed.wait_for(
                lambda: all(self.looks[rank].outside for rank in self._silent(ranks, began)), OUTSIDE_SECONDS
            )
            return {rank: self.looks[rank] for rank in ranks}

    def _ask(self, ranks: set[int], timeout_s: float) -> None:
        began = time.monotonic()
        self._look_at(ranks)
        self._changed.wait_for(lambda: not self._silent(ranks, began), timeout_s)

    def note_waits(self, ranks: set[int]) -> None:
        """Add a note on which ranks have waited long, when the user interrupts them: afterwards it would be unknown."""
        with self._changed:
            self._ask(ranks, GLANCE_SECONDS)
            fresh = self._fresh_looks()
            looks = {rank: look for rank, look in fresh.items() if rank in ranks}
            if max((look.waits_s or 0.0 for look in looks.values()), default=0.0) < LONG_SECONDS:
                return
            lines = [*mismatches(fresh), *self._explain(looks)]
            self._notes.add(f"when it was interrupted: {'; '.join(lines)}")

    def _silent(self, ranks: set[int], began: float) -> list[int]:
        return [rank for rank in ranks if self.looks[rank].answered_at < began]

    # Requests

    def _look_at(self, ranks: Collection[int]) -> None:
        """Ask ranks what they are doing, and whether they have called the collectives that others wait in."""
        running = self._state.running
        about = waited_for(look for rank, look in self.looks.items() if rank in running)
        for rank in ranks:
            self._look(rank, about)

    def _look(self, rank: int, about: list[tuple[Any, Any, Any]]) -> None:
        """Send a request to a rank, unless it still owes a reply; then ask its nanny after a while."""
        look = self.looks.get(rank)
        if look is not None and look.asked_at > look.answered_at:
            # The nanny sends a signal, which makes C code return early that does not resume: only if it is needed.
            patience_s = self._rules.hang_after_s if self._state.is_calm else 0.0
            if look.silent_s > max(patience_s, HANG_PATIENCE_SECONDS):
                self._look_from_outside(rank)
            return
        asked_at = time.monotonic()
        self.looks[rank] = Look(asked_at=asked_at) if look is None else look.asked_again(asked_at)
        engine = self._launch.table[rank].engine
        future = self._launch.open_link.request(engine, Where(about=about))
        future.add_done_callback(lambda done: self._on_look(rank, done))

    def _look_from_outside(self, rank: int) -> None:
        """Ask the nanny for the stack of a rank that does not reply."""
        nanny = self._launch.table[rank].nanny
        future = self._launch.open_link.request(nanny, Stack())

        def on_stack(done: Future[Message]) -> None:
            if done.exception() is None:
                with self._changed:
                    self.looks[rank] = self.looks[rank].seen_from_outside(done.result()["content"].get("stack", ""))
                    self._changed.notify_all()

        future.add_done_callback(on_stack)

    def _on_look(self, rank: int, done: Future[Message]) -> None:
        if done.exception() is not None:
            return  # the cluster was closed
        content: dict[str, Any] | None = done.result()["content"]
        assert content is not None
        if content["status"] != "ok":
            log.warning("rank %d could not say what it does: %s", rank, content)
            content = None
        with self._changed:
            look = self.looks[rank] = self.looks[rank].answered(time.monotonic(), content)
            in_mpi = content is not None and bool(content.get("mpi"))
            self._state.on_look(rank, look.asked_at, look.waits_s, in_program=bool(look.program), in_mpi=in_mpi)
            self._changed.notify_all()
