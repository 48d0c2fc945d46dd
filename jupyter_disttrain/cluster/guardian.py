"""The thread that brings a session back.

Covers: doing what ``recovery`` decides: looking at ranks, releasing them, replacing dead ones, forming the group.
Does not cover: deciding (``recovery``), starting processes (``start``).

One thread per cluster. What happens is told to it from any thread and it never waits for a rank itself: replies come
back as events, and what takes long runs in a thread of its own.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

from ..errors import DisttrainError, LaunchError
from ..messages import NANNY_REQUEST, RANK_REQUEST
from ..ranks import label_ranks
from .hang import PATIENCE_SECONDS, Look, explain, mismatches, waited_for
from .loss import remedy
from .rank_table import ended
from .recovery import LOOK_SECONDS, Do, Phase, Recovery

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from concurrent.futures import Future

    from ..ranks import RankInfo
    from .link import Message
    from .recovery import Action, Rules
    from .remarks import Remarks
    from .start import Launch

FORM_SECONDS = 120.0  # for the process group to be formed
GLANCE_SECONDS = 0.15  # for ranks to say what they do before an interrupt ends it
LONG_SECONDS = 1.0  # in one collective, before it is told of with an interrupt
RELEASE_SECONDS = 10.0  # for ranks to leave a group that is being formed
OUTSIDE_SECONDS = 0.3  # for nannies to say where a rank is that does not answer

log = logging.getLogger(__name__)


class Guardian:
    """Look after one started cluster until it is closed."""

    def __init__(
        self, launch: Launch, rules: Rules, remarks: Remarks, reset: Callable[[], None], stop: Callable[[], None]
    ) -> None:
        self._launch = launch
        launch.on_note = self.note
        self._rules = rules
        self.remarks = remarks
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

    def on_sent(self, rank: int, cell: int) -> None:
        """Note that a cell is sent to a rank."""
        with self._changed:
            self._state.on_sent(rank, time.monotonic(), cell)
            self._wake_if(self._sleeps_long)

    def on_reply(self, rank: int, *, failed: bool, broken: bool) -> None:
        """Note that a rank has ended its cell."""
        with self._changed:
            self._state.on_reply(rank, time.monotonic(), failed=failed, broken=broken)
            self._wake_if(not self._state.is_calm)

    def on_death(self, rank: int) -> None:
        """Note that a rank's process has ended."""
        self._tell(lambda state, now: state.on_death(rank, now))

    def on_interrupt(self, ranks: Collection[int] | None, *, forced: bool) -> None:
        """Note that the person has interrupted what ranks run; None: all."""
        self._tell(lambda state, now: state.on_interrupt(now, forced=forced, ranks=ranks))

    def on_asked(self, rank: int) -> None:
        """Note that the person wants a new process for a rank."""
        self._tell(lambda state, _now: state.on_asked(rank))

    def change(self, rules: Rules) -> None:
        """Go by other rules from now on."""
        self._rules = rules
        self._tell(lambda state, _now: state.change(rules))

    def form(self) -> None:
        """Have all ranks form a process group in place of the one that cells have ended, and wait for it.

        Raises
        ------
        LaunchError
            If they can't.
        """
        self._tell(lambda state, _now: state.on_group_ended())
        self.wait_until_settled(FORM_SECONDS)
        if self._state.phase is not Phase.FORMED:
            raise LaunchError("; ".join(self.take_notes()) or "the process group could not be formed anew")

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
    def doing(self) -> str:
        """What is being done for the session to come back, in words; empty if nothing is."""
        with self._changed:
            replacing = [rank for rank, member in enumerate(self._state.members) if member.replacing]
            if replacing:
                return f"starting a new process for {label_ranks(replacing)}"
            return "forming the process group anew" if self._state.phase is Phase.FORMING else ""

    @property
    def waits_for(self) -> str:
        """What has to happen before the process group can be formed anew, in words; empty if nothing has to."""
        with self._changed:
            running = self._state.running
            if self._state.phase is not Phase.BROKEN or not running:
                return ""
            verb = "ends its cell" if len(running) == 1 else "end their cell"
            return f"the process group is formed anew once {label_ranks(running)} {verb}"

    def note(self, words: str) -> None:
        """Keep something that a person should know."""
        with self._changed:
            self._notes.append(words)

    def take_notes(self) -> list[str]:
        """Return what a person should know of what was done since the last call."""
        with self._changed:
            notes, self._notes = self._notes, []
            return notes

    def hang(self) -> list[str]:
        """Say who waits for whom, once ranks have waited in one collective for longer than a person should wonder."""
        with self._changed:
            fresh = self._fresh_looks()
            looks = {rank: look for rank, look in fresh.items() if rank in self._state.running}
            certain = mismatches(fresh)  # can't end well, however long one waits
            if not certain and not any(look.is_hang(self._rules.hang_after_s) for look in looks.values()):
                return []
            return [*certain, *self._explain(looks)]

    def _fresh_looks(self) -> dict[int, Look]:
        """Return what was seen of all ranks while the cells ran that run now; of a rank that runs one, in that cell."""
        found = {rank: look for rank, look in self.looks.items() if rank not in self._state.dead}
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
        for rank in ranks:
            self._look(rank)
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
            self._notes.append(f"when it was interrupted: {'; '.join(lines)}")

    def _silent(self, ranks: set[int], began: float) -> list[int]:
        return [rank for rank in ranks if self.looks[rank].answered_at < began]

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
                ranks = self._state.running
                if waited_for(self.looks[rank] for rank in ranks if rank in self.looks):
                    ranks = set(range(len(self._launch.table))) - self._state.dead  # what did they call there?
                for rank in ranks:
                    self._look(rank)
        elif action.do is Do.RELEASE:
            self.release(forced=action.forced)
        elif self._launch.is_being_stopped:
            return
        elif action.do is Do.REPLACE:
            assert action.rank is not None
            self._help(self._replace, action.rank)
        elif action.do is Do.FORM:
            self._help(self._form)
        elif action.do is Do.RESET:
            self._help(self._end, self._reset)
        elif action.do is Do.STOP:
            self._help(self._end, self._stop)

    def release(self, *, forced: bool = False) -> None:
        """Have whoever waits in a collective, or for the group to be formed, get an error."""
        request = {"do": "release", "generation": self._launch.generation, "forced": forced}
        for entry in self._launch.table:
            if entry.state != "dead":
                future = self._launch.open_link.request(entry.engine, RANK_REQUEST, request, beside=True)
                future.add_done_callback(functools.partial(self._on_released, entry.info))

    def _on_released(self, info: RankInfo, done: Future[Message]) -> None:
        content = {"status": "ok"} if done.exception() is not None else done.result()["content"]
        if content["status"] != "ok":
            why = f"{content['ename']}: {content['evalue']}"
            rank = info.rank
            self.note(f"rank {rank} on {info.host} could not be released: {why}; %dist_reset -r {rank} replaces it")

    def _look(self, rank: int) -> None:
        """Ask a rank what it is doing, unless it still owes an answer."""
        look = self.looks.get(rank)
        if look is not None and look.asked_at > look.answered_at:
            if look.silent_s > PATIENCE_SECONDS:
                self._look_from_outside(rank)
            return
        asked_at = time.monotonic()
        self.looks[rank] = Look(asked_at=asked_at) if look is None else look.asked_again(asked_at)
        engine = self._launch.table[rank].engine
        about = waited_for(look for other, look in self.looks.items() if other in self._state.running)
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
            self._state.on_look(rank, look.asked_at, look.waits_s, in_program=bool(look.program))
            self._changed.notify_all()

    def _help(self, work: Callable[..., None], *args: Any) -> None:
        helper = threading.Thread(target=work, args=args, name="disttrain recovery", daemon=True)
        self._helpers = [*(each for each in self._helpers if each.is_alive()), helper]
        helper.start()

    def _replace(self, rank: int) -> None:
        host = self._launch.table[rank].info.host
        try:
            self._launch.replace(rank)
        except Exception as error:  # noqa: BLE001  (whatever it was, who waits for the session has to hear of it)
            note = f"rank {rank} can't be replaced: {_words(error)}; {remedy(self._launch.config)}"
            self._finish(lambda state, _now: state.on_replaced(rank, well=False), note)
            return
        self._write_down()
        with self._changed:
            self.looks[rank] = Look(asked_at=-1.0)  # nobody has asked the new process yet
        where = "" if (now := self._launch.table[rank].info.host) == host else f" on {now}"
        note = f"rank {rank} was replaced by a new process{where} with fresh variables"
        if (source := self._state.survivor) is not None:
            note += f"; %dist_copy --from {source} --to {rank} NAME... fills it"
        table = self._launch.table
        self._finish(lambda state, _now: state.on_replaced(rank, well=table[rank].state != "dead"), note)

    def _end(self, how: Callable[[], None]) -> None:
        try:
            how()
        except Exception as error:  # noqa: BLE001  (as above)
            self.note(f"a rank died, and what was to follow failed: {_words(error)}")

    def _form(self) -> None:
        try:
            lost = self._launch.form()
        except Exception as error:  # noqa: BLE001  (as above)
            with self._changed:
                died = bool(self._state.dead)
            words = f"the process group can't be formed anew: {_words(error)}; %dist_reset starts the ranks anew"
            try:
                self._release_who_forms()
            except DisttrainError:
                log.debug("the cluster was closed meanwhile", exc_info=True)
            self._finish(lambda state, _now: state.on_formed(well=False), "" if died else words)
            return
        self._write_down()
        notes = [f"gone with the old process group on {label_ranks(ranks)}: {line}" for line, ranks in lost.items()]
        self._finish(lambda state, _now: state.on_formed(well=True), *notes)

    def _release_who_forms(self) -> None:
        """Release those that wait for a rank which could not: again and again, as a release may fall between waits."""
        deadline = time.monotonic() + RELEASE_SECONDS
        while not self._closed and time.monotonic() < deadline:
            asked = [entry.forming for entry in self._launch.table if entry.state != "dead"]
            pending = [future for future in asked if future is not None and not future.done()]
            if not pending:
                return
            self.release()
            wait(pending, LOOK_SECONDS)

    def _write_down(self) -> None:
        try:
            self._launch.write()
        except OSError as error:
            self.note(f"%dist_attach would not find the ranks as they are now: {error}")

    def _finish(self, event: Callable[[Recovery, float], None], *notes: str) -> None:
        with self._changed:
            self._notes += [note for note in notes if note and note not in self._notes]
        self._tell(event)

    def close(self) -> None:
        """End the thread; what was begun is not waited for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)


def _words(error: Exception) -> str:
    """Return what an error says; one of ours speaks for itself."""
    return str(error) if isinstance(error, DisttrainError) else f"{type(error).__name__}: {error}"
