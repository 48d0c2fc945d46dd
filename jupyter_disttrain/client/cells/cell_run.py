"""Wait for a cell on its ranks and collect its results.

Covers: waiting for the cell, results and output, interrupts, timeouts.
Does not cover: sending (``executor``), which ranks run or failed (``cell_state``), releasing stuck ranks
(``client.recovery.supervisor``), drawing (``notebook.output.renderer``).

Events are queued for the thread that waits for the cell. Interrupts are deferred as well (``sigint``): a
KeyboardInterrupt raised while an event is handled would lose that event, and with a lost reply the cell never ends.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import CellTimeoutError, ClusterClosedError, GivenUpError, RankFailure, UnserializableValueError
from ...protocol.ranks import label_ranks
from ...protocol.serialization import load_from
from ...protocol.time_limits import (
    CELL_RUN_SETTLE_SECONDS,
    GIVE_UP_SECONDS,
    INTERRUPT_GRACE_SECONDS,
    LAST_SECONDS,
    SETTLE_CHECK_SECONDS,
    SPACE_SECONDS,
)
from ...sigint import PATIENT_INTERRUPTS, DeferredSigint, held_interrupts
from .cell_state import CellState
from .events import Died, Elided, Event, OutputEnded, Printed, Replied

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ...protocol.messages import CellFailure
    from ..recovery.supervisor import Supervisor

_ENDS = Replied, OutputEnded, Died  # events that a cell still needs after the wait for it was given up


class Listener(Protocol):
    """Receives the events of a cell."""

    def on_events(self, events: Sequence[Event], run: CellRun) -> None:
        """Handle the events since the last call; also called without events, as time passes."""

    def on_end(self, run: CellRun) -> None:
        """Handle the end: the cell has ended on every rank, or the wait for it was given up."""

    def on_late(self, event: Event) -> Event | None:
        """Handle an event after the end, e.g. output of a thread; return what the next cell should get.

        May be called on another thread than the methods above.
        """


class CellRun:
    """A cell that was sent to ranks.

    Attributes
    ----------
    number : int
        Counted from 1 in each cluster.
    ranks : tuple of int
        The ranks on which the cell runs.
    notes : list of str
        Messages for the user on how the session recovered.
    stdout, stderr : dict of int to str
        What each rank printed so far.
    """

    def __init__(
        self,
        number: int,
        ranks: tuple[int, ...],
        hosts: Mapping[int, str],
        interrupt: Callable[..., None],
        supervisor: Supervisor,
        listener: Listener | None = None,
        stuck_remedy: Callable[[Collection[int]], str] = lambda _ranks: "",
    ) -> None:
        self.number = number
        self.ranks = ranks
        self.started_s = time.time()
        self.ended_s: float | None = None
        self._ending = threading.Lock()  # guards the end against `put`: an event that is put later is not read any more
        self.state = CellState(ranks, hosts)
        self._arrived = CellState(ranks, hosts)  # ahead of `state`, which covers the events that the listener has had
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None only wakes the waiting thread
        self._abandoned: ClusterClosedError | None = None
        self._interrupt = interrupt
        self._supervisor = supervisor
        self._stuck_remedy = stuck_remedy
        self.notes: list[str] = []
        self._listener = listener
        self._printed: dict[tuple[str, int], list[str]] = {}
        self._values: dict[int, Any] | None = None
        self._held = DeferredSigint()
        self.interrupts = 0  # interrupts sent to the ranks
        self._next_interrupt = 0.0  # earliest time of the next one
        self._interrupted_at = 0.0  # time of the first one
        self._gives_up_at: float | None = None
        self.given_up: set[int] = set()  # ranks that still ran the cell when the wait for it was given up
        self._deadline: float | None = None
        self.timed_out = False
        self._is_forced = False  # whether it was interrupted a second time after its timeout

    def put(self, event: Event) -> bool:
        """Add an event; return False if it came after the end and is no reply, idle message or death.

        May be called from any thread, by one at a time.
        """
        with self._ending:
            if self.ended_s is None:
                self._note(event)
            elif not isinstance(event, _ENDS):
                return False
            was_done = self._arrived.done
            self._arrived.apply(event)
            if self._arrived.done and not was_done and self.ended_s is not None:  # its own notes are shown no more
                for text in self._arrived.cut_imports(self._stuck_remedy):
                    self._supervisor.note(text)
            self._events.put(event)
        return True

    def abandon(self, reason: str) -> None:
        """End the wait for the cell with a :class:`ClusterClosedError`; may be called from any thread."""
        self._abandoned = ClusterClosedError(reason)
        self._events.put(None)

    def take_rest(self) -> list[Event]:
        """Return the output that arrived after the wait for an ended cell: it goes to the next cell."""
        rest = []
        while self.ended_s and not self._events.empty():
            event = self._events.get()
            if isinstance(event, _ENDS):
                self.state.apply(event)  # a second wait, after the first was given up, needs it
            elif event is not None:
                rest.append(event)
        return rest

    @property
    def listener(self) -> Listener | None:
        """The listener that receives the cell's events."""
        return self._listener

    def listen(self, listener: Listener) -> None:
        """Send events to this listener from now on, those that are still queued included."""
        self._listener = listener

    # Results

    @property
    def done(self) -> bool:
        """Whether the cell has ended on every rank, even if :meth:`wait` has not handled the last events yet."""
        return self._arrived.done

    @property
    def errors(self) -> set[str]:
        """The names of the cell's errors so far; includes events that :meth:`wait` has not handled yet."""
        return {failure.ename for failure in self._arrived.failures.values()}

    @property
    def running_now(self) -> set[int]:
        """The ranks that still run the cell; takes account of events that :meth:`wait` has not handled yet."""
        return set(self._arrived.running)

    @property
    def failures(self) -> tuple[CellFailure, ...]:
        """Each distinct failure once, the root cause first."""
        return self._known.distinct_failures()

    @property
    def _known(self) -> CellState:
        """The state to report: with all events once the cell has ended, whether a thread waits for it or not."""
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
        return {rank: "".join(self._printed.get((stream, rank), ())) for rank in self.ranks}

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
            value = reply.content.get("value", {"kind": "none"})
            if value["kind"] == "pickle":
                values[rank] = load_from(rank, reply.buffers)
            elif value["kind"] == "unserializable":
                refused.setdefault(value["reason"], []).append(rank)
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
            If it was interrupted for the third time and ranks still run it. The first interrupt is sent to the ranks,
            the second also releases them from whatever they wait for.
        ClusterClosedError
            If the cluster was shut down in the meantime.
        """
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self.given_up and not self.done:  # a new wait after one that was given up starts with no interrupts
            self.interrupts, self._gives_up_at, self.ended_s = 0, None, None
        self.given_up = set()
        with held_interrupts() as held:
            self._held = held
            held.wake = lambda: self._events.put(None)
            try:
                self._wait_for_ranks()
            finally:
                held.wake = lambda: None
            too_late = held.waiting  # an interrupt came when there was nothing left to interrupt
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
            except KeyboardInterrupt:  # from another handler, or an interrupt that `Held.on_sigint` does not defer
                self._held.pressed += 1
                self._obey_interrupts(at_once=self._held.pressed - self._held.obeyed > PATIENT_INTERRUPTS)
        if self.ended_s is None:
            self._settle()
            self._end()

    def _step(self) -> None:
        abandoned = self._abandoned  # read first: events that arrived before it was set are in the queue by now
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
        """Lines that state which ranks wait for which, once they have waited too long; else empty."""
        return self._supervisor.stacks.hang()

    @property
    def remarks(self) -> list[str]:
        """Messages on the job, the cell's metrics and the ranks' speed while it runs."""
        remarks = self._supervisor.remarks
        return remarks.of_job() + remarks.of_values(self.number) + remarks.of_speed(self.running_now)

    @property
    def progress(self) -> str:
        """A text on the progress of the loop that the ranks run; empty if unknown."""
        return self._supervisor.remarks.of_progress(self.running_now, self.number)

    @property
    def coming_back(self) -> str:
        """A text on the recovery that is in progress; empty if none is."""
        return self._supervisor.doing

    def _settle(self) -> None:
        """Wait until the session has recovered from what this cell did to it; an interrupt ends the wait."""
        deadline = time.monotonic() + CELL_RUN_SETTLE_SECONDS
        while not self._supervisor.wait_until_settled(SETTLE_CHECK_SECONDS) and time.monotonic() < deadline:
            if self._listener is not None:
                self._listener.on_events((), self)
            if self._held.waiting:
                break
        self.notes += self._supervisor.take_notes() + ([] if self.state.failures else self._supervisor.out_of_step())
        self.notes += self.state.cut_imports(self._stuck_remedy) + self._supervisor.remarks.of_values(self.number)
        if any(failure.of_group for failure in self.state.failures.values()) and self._supervisor.waits_for:
            self.notes.append(self._supervisor.waits_for)

    def _take_events(self) -> list[Event]:
        """Return the queued events; wait a moment for the first one."""
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
        if isinstance(event, Printed):
            self._printed.setdefault((event.stream, event.rank), []).append(event.text)
        elif isinstance(event, Elided):
            self._printed.setdefault((event.record.stream, event.rank), []).append(event.record.tail)

    def _obey_interrupts(self, *, at_once: bool = False) -> None:
        self._held.mark_checked()
        while self._held.waiting and (at_once or time.monotonic() >= self._next_interrupt):
            self._next_interrupt = time.monotonic() + SPACE_SECONDS
            self._held.obeyed += 1
            self.interrupts += 1
            if self.interrupts == 1:
                self._interrupted_at = time.monotonic()
            if self.interrupts == PATIENT_INTERRUPTS:
                self._gives_up_at = max(time.monotonic() + LAST_SECONDS, self._interrupted_at + GIVE_UP_SECONDS)
            self._interrupt_running(forced=self.interrupts > 1)
        if at_once or (self._gives_up_at is not None and time.monotonic() >= self._gives_up_at):
            self._give_up(GivenUpError(self._still_running("interrupted three times"), self.failures, self))

    def _on_deadline(self) -> None:
        if self._is_forced:
            self._give_up(CellTimeoutError(self._still_running("interrupted after its time-out"), run=self))
        self._is_forced, self.timed_out = self.timed_out, True
        self._deadline = time.monotonic() + INTERRUPT_GRACE_SECONDS
        self._interrupt_running(forced=self._is_forced)

    def _interrupt_running(self, *, forced: bool) -> None:
        try:
            self._interrupt(sorted(self.state.running), forced=forced)
        except ClusterClosedError as error:  # the ranks have ended, or end now
            self._give_up(self._abandoned or error)

    def _still_running(self, what: str) -> str:
        return f"{what}; {not_back(self.state.running, self._stuck_remedy(self.state.running))}"

    def _give_up(self, error: BaseException) -> None:
        self.given_up = set(self.state.running)
        self._end()
        raise error

    def _end(self) -> None:
        with self._ending:
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
            after_death = self._supervisor.after_death
            raise RankFailure(failures, self.state.failures, self.state.waited, self.notes, self, after_death)


def not_back(ranks: Collection[int], last_resort: str) -> str:
    """Return a message on ranks that still run after interrupts, and what the user can do."""
    has, it_is = ("has", "it is") if len(ranks) == 1 else ("have", "they are")
    return (
        f"{label_ranks(ranks)} {has} not come back yet: the code there has reacted neither to the interrupt nor to the "
        f"end of its process group, but an import or a long call in C code may still end; %dist_where shows where "
        f"{it_is}, %dist_wait waits, %dist_interrupt interrupts again; the last resort, which loses variables: "
        f"{last_resort}"
    )
