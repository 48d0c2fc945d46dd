"""Look at ranks: what each of them does, and who waits for whom.

Covers: asking ranks, and the nannies of those that don't answer; saying what is seen.
Does not cover: what is done about it (``guardian``), what answers mean together (``hang``).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from ..messages import NANNY_REQUEST, RANK_REQUEST
from .hang import PATIENCE_SECONDS, Look, explain, mismatches, waited_for
from .rank_table import ended

if TYPE_CHECKING:
    import threading
    from collections.abc import Collection, Mapping
    from concurrent.futures import Future

    from .link import Message
    from .notes import Notes
    from .recovery import Recovery, Rules
    from .start import Launch

GLANCE_SECONDS = 0.15  # for ranks to say what they do before an interrupt ends it
LONG_SECONDS = 1.0  # in one collective, before it is told of with an interrupt
OUTSIDE_SECONDS = 0.3  # for nannies to say where a rank is that does not answer

log = logging.getLogger(__name__)


class Looking:
    """The part of a guardian that looks."""

    _launch: Launch
    _rules: Rules
    _state: Recovery
    _changed: threading.Condition
    _notes: Notes

    def __init__(self) -> None:
        self.looks: dict[int, Look] = {}  # by rank, what was seen last

    def hang(self) -> list[str]:
        """Say who waits for whom, once ranks have waited in one collective for longer than a person should wonder."""
        with self._changed:
            fresh, running = self._fresh_looks(), self._state.running
            looks = {rank: look for rank, look in fresh.items() if rank in running}
            certain = mismatches(fresh)  # can't end well, however long one waits
            if not certain and not any(look.is_hang(self._rules.hang_after_s) for look in looks.values()):
                return []
            return [*certain, *self._explain(looks)]

    def _fresh_looks(self) -> dict[int, Look]:
        """Return what was seen of all ranks while the cells ran that run now; of a rank that runs one, in that cell."""
        dead = self._state.dead
        found = {rank: look for rank, look in self.looks.items() if rank not in dead}
        return {rank: look for rank, look in found.items() if look.answered_at >= self._state.since(rank)} | {
            rank: Look(asked_at=look.asked_at)
            for rank, look in found.items()
            if look.asked_at >= self._state.since(rank) > look.answered_at
        }

    def _explain(self, looks: Mapping[int, Look]) -> list[str]:
        """Say what those ranks do that run a cell, and those that run none."""
        running = self._state.running
        idle = set(range(len(self._launch.table))) - running - self._state.dead
        return explain(looks, sorted(idle), ended(self._launch.table, running))

    def where(self, timeout_s: float) -> list[str]:
        """Say what each rank is doing at this moment, one line for ranks that do the same."""
        looks = self.look_now(self._state.running, timeout_s)
        with self._changed:
            if waited_for(looks.values()):
                self._ask(set(range(len(self._launch.table))) - self._state.dead, timeout_s)
            return [*mismatches(self._fresh_looks()), *self._explain(looks)]

    def look_now(self, ranks: set[int], timeout_s: float) -> dict[int, Look]:
        """Look at ranks and wait for what they say; one that does not answer in time is in it all the same."""
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
        """Keep who has long waited for whom, when the person interrupts it: afterwards nobody could say."""
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

    # Asking

    def _look_at(self, ranks: Collection[int]) -> None:
        """Ask ranks what they are doing, and whether they have called what others wait in."""
        running = self._state.running
        about = waited_for(look for rank, look in self.looks.items() if rank in running)
        for rank in ranks:
            self._look(rank, about)

    def _look(self, rank: int, about: list[tuple[Any, Any, Any]]) -> None:
        """Ask a rank, unless it still owes an answer."""
        look = self.looks.get(rank)
        if look is not None and look.asked_at > look.answered_at:
            # By a signal, at which C code returns early that does not go on after one: not before somebody has to know.
            patience_s = self._rules.hang_after_s if self._state.is_calm else 0.0
            if look.silent_s > max(patience_s, PATIENCE_SECONDS):
                self._look_from_outside(rank)
            return
        asked_at = time.monotonic()
        self.looks[rank] = Look(asked_at=asked_at) if look is None else look.asked_again(asked_at)
        engine = self._launch.table[rank].engine
        future = self._launch.open_link.request(engine, RANK_REQUEST, {"do": "where", "about": about}, beside=True)
        future.add_done_callback(lambda done: self._on_look(rank, done))

    def _look_from_outside(self, rank: int) -> None:
        """Ask the nanny where a rank is that does not answer."""
        nanny = self._launch.table[rank].nanny
        future = self._launch.open_link.request(nanny, NANNY_REQUEST, {"do": "stack"})

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
