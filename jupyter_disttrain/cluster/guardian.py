"""The thread that brings a session back.

Covers: doing what ``recovery`` decides: looking at ranks, releasing them, replacing dead ones, forming the group.
Does not cover: deciding (``recovery``), starting processes (``start``).

One thread per cluster. What happens is told to it from any thread and it never waits for a rank itself: replies come
back as events, and what takes long runs in a thread of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from ..errors import DisttrainError
from ..messages import RANK_REQUEST
from ..ranks import label_ranks
from .hang import Look, explain
from .recovery import Do, Phase, Recovery

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from .link import Message
    from .recovery import Action, Rules
    from .start import Launch

log = logging.getLogger(__name__)


class Guardian:
    """Look after one started cluster until it is closed."""

    def __init__(self, launch: Launch, rules: Rules, reset: Callable[[], None], stop: Callable[[], None]) -> None:
        self._launch = launch
        self._rules = rules
        self._reset, self._stop = reset, stop
        self._state = Recovery(len(launch.table), rules)
        self._changed = threading.Condition()
        self._closed = False
        self._sleeps_long = True  # until it is woken
        self._notes: list[str] = []
        self._helpers: list[threading.Thread] = []
        self.looks: dict[int, Look] = {}  # by rank, what was seen last
        self._thread = threading.Thread(target=self._run, name="disttrain guardian", daemon=True)
        self._thread.start()

    # What happens

    def on_sent(self, rank: int) -> None:
        """Note that a cell is sent to a rank."""
        with self._changed:
            self._state.on_sent(rank, time.monotonic())
            self._wake_if(self._sleeps_long)

    def on_reply(self, rank: int, *, failed: bool, broken: bool) -> None:
        """Note that a rank has ended its cell."""
        with self._changed:
            self._state.on_reply(rank, time.monotonic(), failed=failed, broken=broken)
            self._wake_if(not self._state.is_calm)

    def on_death(self, rank: int) -> None:
        """Note that a rank's process has ended."""
        self._tell(lambda state, now: state.on_death(rank, now))

    def on_interrupt(self, *, forced: bool) -> None:
        """Note that the person has interrupted the cell."""
        self._tell(lambda state, now: state.on_interrupt(now, forced=forced))

    def _wake_if(self, needed: bool) -> None:
        """Wake the thread only if there is something for it: cells that end well should cost nothing."""
        if needed:
            self._sleeps_long = False
            self._changed.notify_all()

    def _tell(self, event: Callable[[Recovery, float], None]) -> None:
        with self._changed:
            event(self._state, time.monotonic())
            self._changed.notify_all()

    # What people ask

    def wait_until_settled(self, timeout_s: float) -> bool:
        """Wait until nothing is left to be done that can be done now; returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or self._state.settled, timeout_s)

    @property
    def is_lost(self) -> bool:
        """Whether the process group can't be formed any more."""
        return self._state.phase is Phase.LOST

    def take_notes(self) -> list[str]:
        """Return what a person should know of what was done since the last call."""
        with self._changed:
            notes, self._notes = self._notes, []
            return notes

    def hang(self) -> list[str]:
        """Say who waits for whom, once ranks have waited in one collective for longer than a person should wonder."""
        with self._changed:
            running = self._state.running
            looks = {rank: self.looks[rank] for rank in running if rank in self.looks}
            waits = [look.waits_s or look.silent_s for look in looks.values()]
            if not waits or max(waits) < self._rules.hang_after_s:
                return []
            idle = set(range(len(self._launch.table))) - running - self._state.dead
            return explain(looks, sorted(idle))

    def look_now(self, ranks: set[int], timeout_s: float) -> dict[int, Look]:
        """Look at ranks and wait for what they say; one that does not answer in time is in it all the same."""
        with self._changed:
            began = time.monotonic()
            for rank in ranks:
                self._look(rank)
            self._changed.wait_for(lambda: all(self.looks[rank].answered_at >= began for rank in ranks), timeout_s)
            return {rank: self.looks[rank] for rank in ranks}

    # The thread

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                actions = self._state.actions(now)
                if not actions:
                    due = self._state.next_time(now)
                    self._sleeps_long = due is None
                    self._changed.wait(None if due is None else max(0.0, due - now))
                    continue
            for action in actions:
                try:
                    self._do(action)
                except DisttrainError:
                    log.debug("the cluster was closed meanwhile", exc_info=True)

    def _do(self, action: Action) -> None:
        if action.do is Do.LOOK:
            with self._changed:
                for rank in self._state.running:
                    self._look(rank)
        elif action.do is Do.RELEASE:
            request = {"do": "release", "generation": self._launch.generation}
            for entry in self._launch.table:
                if entry.state != "dead":
                    self._launch.open_link.request(entry.engine, RANK_REQUEST, request, beside=True)
        elif action.do is Do.REPLACE:
            assert action.rank is not None
            self._help(self._replace, action.rank)
        elif action.do is Do.FORM:
            self._help(self._form)
        elif action.do is Do.RESET:
            self._help(self._end, self._reset)
        elif action.do is Do.STOP:
            self._help(self._end, self._stop)

    def _look(self, rank: int) -> None:
        """Ask a rank what it is doing, unless it still owes an answer."""
        look = self.looks.get(rank)
        if look is not None and look.asked_at > look.answered_at:
            return
        asked_at = time.monotonic()
        self.looks[rank] = Look(asked_at=asked_at) if look is None else look.asked_again(asked_at)
        engine = self._launch.table[rank].engine
        future = self._launch.open_link.request(engine, RANK_REQUEST, {"do": "where"}, beside=True)
        future.add_done_callback(lambda done: self._on_look(rank, done))

    def _on_look(self, rank: int, done: Future[Message]) -> None:
        if done.exception() is not None:
            return  # the cluster was closed
        content: dict[str, Any] | None = done.result()["content"]
        assert content is not None
        if content["status"] != "ok":
            log.warning("rank %d could not say what it does: %s", rank, content)
            content = None
        with self._changed:
            now = time.monotonic()
            look = self.looks[rank] = self.looks[rank].answered(now, content)
            self._state.on_look(rank, now, look.waits_s)
            self._changed.notify_all()

    def _help(self, work: Callable[..., None], *args: Any) -> None:
        helper = threading.Thread(target=work, args=args, name="disttrain recovery", daemon=True)
        self._helpers = [*(each for each in self._helpers if each.is_alive()), helper]
        helper.start()

    def _replace(self, rank: int) -> None:
        try:
            self._launch.replace(rank)
        except DisttrainError as error:
            note = f"rank {rank} can't be replaced: {error}; %dist_reset starts all ranks anew"
            self._finish(lambda state, _now: state.on_replaced(rank, well=False), note)
            return
        self.looks.pop(rank, None)
        source = 0 if rank else 1
        note = (
            f"rank {rank} was replaced by a new process with fresh variables; "
            f"%dist_copy --from {source} --to {rank} NAME... fills it"
        )
        self._finish(lambda state, _now: state.on_replaced(rank, well=True), note)

    def _end(self, how: Callable[[], None]) -> None:
        try:
            how()
        except DisttrainError:
            log.warning("a rank died, and what was to follow failed", exc_info=True)

    def _form(self) -> None:
        try:
            lost = self._launch.form()
        except DisttrainError as error:
            with self._changed:
                died = bool(self._state.dead)
            note = "" if died else f"the process group can't be formed anew: {error}; %dist_reset starts the ranks anew"
            self._finish(lambda state, _now: state.on_formed(well=False), note)
            return
        notes = [f"gone with the old process group on {label_ranks(ranks)}: {line}" for line, ranks in lost.items()]
        self._finish(lambda state, _now: state.on_formed(well=True), *notes)

    def _finish(self, event: Callable[[Recovery, float], None], *notes: str) -> None:
        with self._changed:
            self._notes += filter(None, notes)
        self._tell(event)

    def close(self) -> None:
        """End the thread; what was begun is not waited for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
