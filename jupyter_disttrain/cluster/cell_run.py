"""One cell on its ranks.

Covers: waiting for it, what came back, interrupts, time-outs.
Does not cover: sending (``cells``), who runs and who failed (``cell_state``), releasing stuck ranks (``guardian``),
drawing (``notebook.screen``).

Events wait in a queue for the thread that waits for the cell.
Interrupts wait for their turn as well (``interrupts``): raised in the midst of an event, KeyboardInterrupt would lose
it, and with a lost reply the cell never ends.
"""

from __future__ import annotations

import queue
import time
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import CellTimeoutError, ClusterClosedError, GivenUpError, RankFailure, UnserializableValueError
from ..ranks import label_ranks
from .cell_state import CellState
from .events import Died, Elided, Event, Replied, Said, Silent
from .interrupts import PATIENT_INTERRUPTS, Held, held_interrupts
from .variables import load_from

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ..messages import CellFailure
    from .guardian import Guardian

INTERRUPT_GRACE_SECONDS = 5.0
SPACE_SECONDS = 0.1  # between two interrupts: a rank would take closer ones for one, or lose the first one's traceback
LAST_SECONDS = 1.0  # for ranks to end after the third, before the prompt comes back without them
GIVE_UP_SECONDS = 5.0  # for the same after the first: an import or a long call in C code ends before it hears a signal
SETTLE_SECONDS = 120.0  # for the session to come back before the prompt does
SETTLE_LOOK_SECONDS = 0.1


class Listener(Protocol):
    """Sees a cell while it runs."""

    def on_events(self, events: Sequence[Event], run: CellRun) -> None:
        """Take what happened since the last call; called also without events, as time passes."""

    def on_end(self, run: CellRun) -> None:
        """Take note that the cell has ended on every rank."""

    def on_late(self, event: Event) -> Event | None:
        """Take what comes after that, e.g. of a thread, on another thread; returns what is for the next cell."""


class CellRun:
    """A cell that was sent to ranks.

    Attributes
    ----------
    number : int
        Counted from 1 in each cluster.
    ranks : tuple of int
        Where it runs.
    notes : list of str
        What a person should know of how the session came back.
    stdout, stderr : dict of int to str
        What each rank printed so far.
    """

    def __init__(
        self,
        number: int,
        ranks: tuple[int, ...],
        hosts: Mapping[int, str],
        interrupt: Callable[..., None],
        guardian: Guardian,
        listener: Listener | None = None,
        stuck_remedy: Callable[[Collection[int]], str] = lambda _ranks: "",
    ) -> None:
        self.number = number
        self.ranks = ranks
        self.started_s = time.time()
        self.ended_s: float | None = None
        self.state = CellState(ranks, hosts)
        self._arrived = CellState(ranks, hosts)  # ahead of `state`, which is as far as the listener has seen
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None only wakes who waits
        self._abandoned: ClusterClosedError | None = None
        self._interrupt = interrupt
        self._guardian = guardian
        self._stuck_remedy = stuck_remedy
        self.notes: list[str] = []
        self._listener = listener
        self._said: dict[tuple[str, int], list[str]] = {}
        self._values: dict[int, Any] | None = None
        self._held = Held()
        self.interrupts = 0  # that the ranks were told of
        self._next_interrupt = 0.0  # before which they are told of none
        self._interrupted_at = 0.0  # for the first time
        self._gives_up_at: float | None = None
        self.given_up: set[int] = set()  # the ranks that ran it when the wait for it was given up
        self._deadline: float | None = None
        self.timed_out = False
        self._is_forced = False  # interrupted for the second time after its time-out

    def put(self, event: Event) -> None:
        """Hand in an event, from any one thread at a time."""
        if self.ended_s is None:  # else it belongs to the next cell
            self._note(event)
        was_done = self._arrived.done
        self._arrived.apply(event)
        if self._arrived.done and not was_done and self.ended_s is not None:  # nothing else is shown of it any more
            for words in self._arrived.cut_imports(self._stuck_remedy):
                self._guardian.note(words)
        self._events.put(event)

    def abandon(self, reason: str) -> None:
        """Say that the cluster is gone, from any thread."""
        self._abandoned = ClusterClosedError(reason)
        self._events.put(None)

    def take_rest(self) -> list[Event]:
        """Return what was said after the last look at an ended cell: it belongs to the next."""
        rest = []
        while self.ended_s and not self._events.empty():
            event = self._events.get()
            if isinstance(event, (Replied, Silent, Died)):
                self.state.apply(event)  # who waits again after giving up has to know
            elif event is not None:
                rest.append(event)
        return rest

    @property
    def listener(self) -> Listener | None:
        """What sees it."""
        return self._listener

    def listen(self, listener: Listener) -> None:
        """Have a listener see what happens from now on, and what has not been looked at yet."""
        self._listener = listener

    # What came of it

    @property
    def done(self) -> bool:
        """Whether it has ended on every rank; true also before :meth:`wait` has looked."""
        return self._arrived.done

    @property
    def errors(self) -> set[str]:
        """The names of the errors with which it has failed so far; ahead of what :meth:`wait` has looked at."""
        return {failure.ename for failure in self._arrived.failures.values()}

    @property
    def running_now(self) -> set[int]:
        """The ranks that have not ended it; ahead of what :meth:`wait` has looked at."""
        return set(self._arrived.running)

    @property
    def failures(self) -> tuple[CellFailure, ...]:
        """Each distinct failure once, the root cause first."""
        return self._known.distinct_failures()

    @property
    def _known(self) -> CellState:
        """What may be told: all, once it has ended, whether anybody waits for it or not."""
        return self._arrived if self.done else self.state

    @property
    def stdout(self) -> dict[int, str]:
        """What each rank printed."""
        return self._text("stdout")

    @property
    def stderr(self) -> dict[int, str]:
        """What each rank printed on stderr."""
        return self._text("stderr")

    def _text(self, stream: str) -> dict[int, str]:
        return {rank: "".join(self._said.get((stream, rank), ())) for rank in self.ranks}

    @property
    def durations_s(self) -> dict[int, float]:
        """How long the cell ran on each rank that replied, in seconds."""
        replies = self._known.replies.items()
        return {rank: reply.content["duration_s"] for rank, reply in replies if "duration_s" in reply.content}

    @property
    def results(self) -> dict[int, Any]:
        """The value of the cell's last expression by rank; None where it has none.

        Raises
        ------
        UnserializableValueError
            If a rank's value can't be sent; the message names the ranks and the reason.
        """
        if self._values is not None:
            return self._values
        is_whole = self.done
        values = self._load_values()
        if is_whole:
            self._values = values
        return values

    def _load_values(self) -> dict[int, Any]:
        values: dict[int, Any] = {}
        refused: dict[str, list[int]] = {}
        for rank, reply in sorted(self._known.replies.items()):
            told = reply.content.get("value", {"kind": "none"})
            if told["kind"] == "pickle":
                values[rank] = load_from(rank, reply.buffers)
            elif told["kind"] == "unserializable":
                refused.setdefault(told["reason"], []).append(rank)
            else:
                values[rank] = None
        if refused:
            reasons = "; ".join(f"{label_ranks(ranks)}: {reason}" for reason, ranks in refused.items())
            raise UnserializableValueError(f"the cell's value stays on its rank: {reasons}")
        return values

    # Waiting

    def wait(self, timeout_s: float | None = None) -> CellRun:
        """Wait until the cell has ended on every rank.

        Parameters
        ----------
        timeout_s
            After this many seconds the ranks that still run are interrupted.

        Raises
        ------
        RankFailure
            If the cell failed on a rank.
        CellTimeoutError
            If it ran longer than ``timeout_s``.
        KeyboardInterrupt
            If it was interrupted when its ranks had ended.
        GivenUpError
            If it was interrupted for the third time: the first interrupt reaches the ranks, the second releases them
            from whatever they wait for.
        ClusterClosedError
            If the cluster was shut down meanwhile.
        """
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self.given_up and not self.done:  # who waits again after giving up does wait
            self.interrupts, self._gives_up_at, self.ended_s = 0, None, None
        self.given_up = set()
        with held_interrupts() as held:
            self._held = held
            held.wake = lambda: self._events.put(None)
            try:
                self._wait_for_ranks()
            finally:
                held.wake = lambda: None
            too_late = held.waiting  # one came when there was nothing left to interrupt
            held.obeyed = held.pressed
        self._raise(timeout_s)
        if too_late:
            raise KeyboardInterrupt
        return self

    def _wait_for_ranks(self) -> None:
        while not self.state.done:
            try:
                self._step()
            except GivenUpError:
                raise
            except KeyboardInterrupt:  # another handler's, or an impatient person's
                self._held.pressed += 1
                self._obey_interrupts(at_once=self._held.pressed - self._held.obeyed > PATIENT_INTERRUPTS)
        if self.ended_s is None:
            self._settle()
            self._end()

    def _step(self) -> None:
        abandoned = self._abandoned  # what ranks said before it has been put by now
        events = self._take_events()
        for event in events:
            self.state.apply(event)
        if self._listener is not None:
            self._listener.on_events(events, self)
        if self.state.done:
            return
        if abandoned is not None:
            self._give_up(abandoned)
        self._obey_interrupts()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._on_deadline()

    @property
    def hang(self) -> list[str]:
        """Who waits for whom, in words, once that takes longer than it should; else empty."""
        return self._guardian.hang()

    @property
    def remarks(self) -> list[str]:
        """What a person should know of its metrics and of the ranks' speed while it runs."""
        remarks = self._guardian.remarks
        return remarks.of_job() + remarks.of_values(self.number) + remarks.of_speed(self.running_now)

    @property
    def progress(self) -> str:
        """How far the loop has come that the ranks run, in words; empty where nobody knows."""
        return self._guardian.remarks.of_progress(self.running_now, self.number)

    @property
    def coming_back(self) -> str:
        """What is done for the session to come back, in words; empty if nothing is."""
        return self._guardian.doing

    def _settle(self) -> None:
        """Wait until the session has come back from what this cell did to it; an interrupt ends the wait."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while not self._guardian.wait_until_settled(SETTLE_LOOK_SECONDS) and time.monotonic() < deadline:
            if self._listener is not None:
                self._listener.on_events((), self)
            if self._held.waiting:
                break
        self.notes += self._guardian.take_notes() + ([] if self.state.failures else self._guardian.out_of_step())
        self.notes += self.state.cut_imports(self._stuck_remedy) + self._guardian.remarks.of_values(self.number)
        if any(failure.of_group for failure in self.state.failures.values()) and self._guardian.waits_for:
            self.notes.append(self._guardian.waits_for)

    def _take_events(self) -> list[Event]:
        """Return what has come; waits a moment for the first event."""
        events: list[Event] = []
        pause = 0.05 if self._listener is not None else 0.5
        if self._deadline is not None:
            pause = max(0.0, min(pause, self._deadline - time.monotonic()))
        if self._held.waiting:
            pause = max(0.0, min(pause, self._next_interrupt - time.monotonic()))
        if self._gives_up_at is not None:
            pause = max(0.0, min(pause, self._gives_up_at - time.monotonic()))
        try:
            event = self._events.get(timeout=pause)
            while True:
                if event is not None:
                    events.append(event)
                event = self._events.get_nowait()
        except queue.Empty:
            return events

    def _note(self, event: Event) -> None:
        if isinstance(event, Said):
            self._said.setdefault((event.stream, event.rank), []).append(event.text)
        elif isinstance(event, Elided):
            self._said.setdefault((event.record.stream, event.rank), []).append(event.record.tail)

    def _obey_interrupts(self, *, at_once: bool = False) -> None:
        self._held.heard()
        while self._held.waiting and (at_once or time.monotonic() >= self._next_interrupt):
            self._next_interrupt = time.monotonic() + SPACE_SECONDS
            self._held.obeyed += 1
            self.interrupts += 1
            if self.interrupts == 1:
                self._interrupted_at = time.monotonic()
            if self.interrupts == PATIENT_INTERRUPTS:
                self._gives_up_at = max(time.monotonic() + LAST_SECONDS, self._interrupted_at + GIVE_UP_SECONDS)
            self._interrupt(sorted(self.state.running), forced=self.interrupts > 1)
        if at_once or (self._gives_up_at is not None and time.monotonic() >= self._gives_up_at):
            self._give_up(GivenUpError(self._still_running("interrupted three times"), self.failures, self))

    def _on_deadline(self) -> None:
        if self._is_forced:
            self._give_up(CellTimeoutError(self._still_running("interrupted after its time-out"), run=self))
        self._is_forced, self.timed_out = self.timed_out, True
        self._deadline = time.monotonic() + INTERRUPT_GRACE_SECONDS
        self._interrupt(sorted(self.state.running), forced=self._is_forced)

    def _still_running(self, what: str) -> str:
        return f"{what}; {not_back(self.state.running, self._stuck_remedy(self.state.running))}"

    def _give_up(self, error: BaseException) -> None:
        self.given_up = set(self.state.running)
        self._end()
        raise error

    def _end(self) -> None:
        self.ended_s = time.time()
        if self._listener is None:
            return
        self._listener.on_end(self)
        for event in self.take_rest() if self.state.done else ():
            following = self._listener.on_late(event)
            if following is not None:
                self._events.put(following)

    def _raise(self, timeout_s: float | None) -> None:
        failures = self.failures
        if self.timed_out:
            causes = [failure.headline for failure in failures if failure.ename != "KeyboardInterrupt"]
            also = f"; before that {'; '.join(causes)}" if causes else ""
            what = f"the cell ran longer than {timeout_s:g} s and was interrupted{also}"
            raise CellTimeoutError(what, self.notes, self)
        if failures:
            raise RankFailure(failures, self.state.failures, self.state.waited, self.notes, self)


def not_back(ranks: Collection[int], last_resort: str) -> str:
    """Say of ranks that go on in spite of interrupts what can be done."""
    has, it_is = ("has", "it is") if len(ranks) == 1 else ("have", "they are")
    return (
        f"{label_ranks(ranks)} {has} not come back yet: the code there has reacted neither to the interrupt nor to the "
        f"end of its process group, but an import or a long call in C code may still end; %dist_where shows where "
        f"{it_is}, %dist_wait waits, %dist_interrupt interrupts again; the last resort, which loses variables: "
        f"{last_resort}"
    )
