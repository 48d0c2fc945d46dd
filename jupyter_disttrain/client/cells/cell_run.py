"""Wait for a cell on its ranks and collect its results.

Covers: waiting for the cell, results and output, questions to the user, interrupts, the cell's timeout.
Does not cover: sending (``executor``), which ranks run or failed (``cell_state``), releasing stuck ranks
(``client.recovery.supervisor``), drawing (``notebook.output.renderer``).

An event changes the cell's state when it arrives, once, and is then queued for the listener, which the waiting thread
calls. So a KeyboardInterrupt on that thread can't keep a cell from ending. A thread of its own enforces the timeout,
whether another thread waits for the cell or not.
"""

from __future__ import annotations

import queue
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ...errors import (
    CellTimeoutError,
    ClusterClosedError,
    GivenUpError,
    InputRefusedError,
    RankFailure,
    UnserializableValueError,
    UsageError,
)
from ...protocol.ranks import label_ranks
from ...protocol.requests import AnswerQuestion
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
from .events import Asked, AskingEnded, Died, Elided, Event, OutputEnded, Printed, Replied
from .open_questions import OpenQuestions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ...protocol.messages import CellFailure
    from ..recovery.supervisor import Supervisor

# Events that a cell still needs after the wait for it was given up.
_NEEDED = Replied, OutputEnded, Died, Asked, AskingEnded


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


@runtime_checkable
class AskingListener(Listener, Protocol):
    """A listener that can ask the user what ranks ask."""

    def before_question(self, hint: str) -> None:
        """Show what ranks printed before a question, and a hint below it, if there is one."""

    def ask(self, question: Asked) -> str:
        """Ask the user what a rank asks, on the thread that waits for the cell, and return the answer.

        An interrupt may raise a KeyboardInterrupt at any point. Raises an InputRefusedError if the user can't be asked
        here, an EOFError if the user ends the input.
        """


class ToRanks(Protocol):
    """What a cell sends to its ranks while they run it."""

    def interrupt(self, ranks: Collection[int], *, forced: bool) -> None:
        """Interrupt those of the ranks that run the cell; ``forced`` aborts what they wait for."""

    def answer(self, rank: int, answer: AnswerQuestion) -> None:
        """Answer a question of a rank."""


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
        to_ranks: ToRanks,
        supervisor: Supervisor,
        listener: Listener | None,
        stuck_remedy: Callable[[Collection[int]], str],
        on_done: Callable[[CellRun], None],
    ) -> None:
        self.number = number
        self.runs_program = False  # see ``history.Origin``
        self.ranks = ranks
        self.started_s = time.time()
        self.ended_s: float | None = None
        self._lock = threading.Lock()  # guards the state, the queue of events and the end of the wait
        self.state = CellState(ranks, hosts)  # may be ahead of the events that the listener has had
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None only wakes the waiting thread
        self._abandoned: ClusterClosedError | None = None
        self._to_ranks = to_ranks
        self._supervisor = supervisor
        self._stuck_remedy = stuck_remedy
        self._on_done = on_done
        self._questions = OpenQuestions()
        self._asking: Asked | None = None  # what the user is asked now
        self.notes: list[str] = []
        self.listener = listener  # also receives the events that are queued when it is set
        self._printed: dict[tuple[str, int], list[str]] = {}
        self._values: dict[int, Any] | None = None
        self._held = DeferredSigint()
        self.interrupts = 0  # interrupts sent to the ranks
        self._next_interrupt = 0.0  # earliest time of the next one
        self._gives_up_at = 0.0  # time at which the wait ends after ``PATIENT_INTERRUPTS``
        self.given_up: set[int] = set()  # ranks that still ran the cell when the wait for it was given up
        self._limit_ends = threading.Event()  # set to end the thread that enforces the timeout
        self._exceeded_s: float | None = None  # the timeout after which the ranks were interrupted
        self._is_overdue = False  # ranks still run it after the interrupts that followed its timeout

    def put(self, event: Event) -> bool:
        """Add an event; return False if it came after the end and the cell does not need it any more.

        May be called from any thread.
        """
        with self._lock:
            is_late = self.ended_s is not None
            if is_late and not isinstance(event, _NEEDED):
                return False
            self._note(event)
            was_done = self.done
            self.state.apply(event)
            self._questions.apply(event)
            if self._asking is not None and not self._questions.is_open(self._asking):
                self._withdraw()
            self._events.put(event)
            is_end = self.done and not was_done
        if is_end:
            self._limit_ends.set()
            if is_late:  # its own notes are shown no more
                for text in self.state.cut_imports(self._stuck_remedy):
                    self._supervisor.note(text)
            self._on_done(self)
        return True

    def abandon(self, reason: str) -> None:
        """End the wait for the cell with a :class:`ClusterClosedError`; may be called from any thread."""
        with self._lock:
            self._abandoned = self._abandoned or ClusterClosedError(reason)  # the first reason caused the others
            self._withdraw()
            self._limit_ends.set()
        self._events.put(None)

    def _queued(self) -> list[Event]:
        """Return the events that the listener has not had yet."""
        events = []
        with suppress(queue.Empty):
            while True:
                events.append(self._events.get_nowait())
        return [event for event in events if event is not None]

    def __repr__(self) -> str:
        """Return the cell's number, its ranks and whether they have ended it."""
        state = f"{label_ranks(self.running_now)} running" if self.running_now else "done"
        return f"<CellRun {self.number} on {label_ranks(self.ranks)}: {state}>"

    # Results

    @property
    def done(self) -> bool:
        """Whether the cell has ended on every rank."""
        return self.state.done

    @property
    def running_now(self) -> frozenset[int]:
        """The ranks that still run the cell."""
        return self.state.running

    @property
    def timed_out(self) -> bool:
        """Whether the ranks were interrupted because the cell ran longer than its timeout."""
        return self._exceeded_s is not None

    @property
    def failures(self) -> tuple[CellFailure, ...]:
        """Each distinct failure once, the root cause first."""
        return self.state.distinct_failures()

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
        replies = self.state.replies.items()
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
        values: dict[int, Any] = {}
        refused: dict[str, list[int]] = {}
        for rank, reply in sorted(self.state.replies.items()):
            value = reply.content.get("value", {"kind": "none"})
            if value["kind"] == "pickle":
                values[rank] = load_from(rank, reply.buffers)
            elif value["kind"] == "unserializable":
                refused.setdefault(value["reason"], []).append(rank)
            else:
                values[rank] = None
        if refused:
            reasons = "; ".join(f"{label_ranks(ranks)}: {reason}" for reason, ranks in refused.items())
            raise UnserializableValueError(f"the cell's value can't be sent to the notebook: {reasons}")
        if is_whole:
            self._values = values
        return values

    # Timeout

    def limit(self, timeout_s: float) -> None:
        """Interrupt the ranks that still run the cell after this many seconds from now; replaces an earlier limit.

        Ranks that still run it after ``INTERRUPT_GRACE_SECONDS`` are interrupted again, which releases them from
        whatever they wait for. If that does not end the cell either, the wait for it is given up.
        """
        with self._lock:
            self._limit_ends.set()
            if not self.done and self._abandoned is None:
                self._is_overdue, self._limit_ends = False, threading.Event()
                threading.Thread(
                    target=self._enforce, args=(timeout_s, self._limit_ends), name="disttrain cell timeout", daemon=True
                ).start()

    def _enforce(self, timeout_s: float, limit_ends: threading.Event) -> None:
        if limit_ends.wait(timeout_s):
            return
        with self._lock:
            if limit_ends.is_set() or self.done:
                return
            self._exceeded_s = timeout_s
        for forced in (False, True):
            self._interrupt_running(forced=forced)
            if limit_ends.wait(INTERRUPT_GRACE_SECONDS):
                return
        with self._lock:
            self._is_overdue = not limit_ends.is_set()
            self._withdraw()
        self._events.put(None)

    # Waiting

    def wait(self, timeout_s: float | None = None) -> CellRun:
        """Wait until the cell has ended on every rank.

        Parameters
        ----------
        timeout_s
            After this many seconds from now, 0 for at once, the ranks that still run are interrupted; in place of an
            earlier timeout of the cell, which applies if this is None.

        Raises
        ------
        RankFailure
            If the cell failed on a rank.
        CellTimeoutError
            If it ran longer than its timeout.
        KeyboardInterrupt
            If it was interrupted when its ranks had ended.
        GivenUpError
            If it was interrupted for the third time and ranks still run it. The first interrupt is sent to the ranks,
            the second also releases them from whatever they wait for.
        ClusterClosedError
            If the cluster was shut down in the meantime.
        """
        if timeout_s is not None:
            check_timeout(timeout_s, may_be_0=True)
            self.limit(timeout_s)
        with self._lock:
            if self.given_up and not self.done:  # a new wait after one that was given up starts with no interrupts
                self.interrupts, self.ended_s = 0, None
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
        self._raise()
        if too_late:
            raise KeyboardInterrupt
        return self

    def _wait_for_ranks(self) -> None:
        is_done = False
        while not is_done:
            try:
                is_done = self._step()
            except GivenUpError:
                raise
            except KeyboardInterrupt:  # from another handler, or an interrupt that `Held.on_sigint` does not defer
                self._held.pressed += 1
                self._obey_interrupts(at_once=self._held.pressed - self._held.obeyed > PATIENT_INTERRUPTS)
        if self.ended_s is None:
            self._settle()
            self._end()

    def _step(self) -> bool:
        """Pass on the events that have arrived; return whether the cell had ended on every rank by then."""
        events = self._wait_for_event()
        with self._lock:  # all events up to this state are in the queue
            is_done, abandoned = self.done, self._abandoned
        events += self._queued()
        if self.listener is not None:
            self.listener.on_events(events, self)
        if is_done:
            return True
        if abandoned is not None:
            self._give_up(lambda _running: abandoned)
        self._obey_interrupts()
        if not self._held.waiting:
            self._ask_next()
        if self._is_overdue:
            self._is_overdue = False  # a further wait waits for ranks that may yet come back
            what = "interrupted after its timeout"
            self._give_up(lambda running: CellTimeoutError(self._still_running(what, running), run=self))
        return False

    def _ask_next(self) -> None:
        """Ask the user what a rank asks, if one does."""
        with self._lock:
            question = self._asking = self._questions.next(time.monotonic(), self.state.running)
            if question is None:
                return
            hint, earlier = self._questions.hint(question), self._queued()
        if earlier and self.listener is not None:  # what ranks printed before they asked
            self.listener.on_events(earlier, self)
        pressed = self._held.pressed
        text, answer = "", AnswerQuestion(number=question.record.number)
        try:
            if not isinstance(self.listener, AskingListener):
                raise InputRefusedError("no notebook shows the output of this cell")  # noqa: TRY301
            self.listener.before_question(hint)
            with self._held.raising():
                if self._asking is None:  # from here on a withdrawal raises
                    return
                text = self.listener.ask(question)
        except KeyboardInterrupt:
            with self._lock:
                is_withdrawn, self._asking = self._asking is None, None
            if not is_withdrawn and self._held.pressed == pressed:
                self._held.pressed += 1  # another handler has raised it
            return
        except EOFError:
            answer = replace(answer, is_end=True)
        except InputRefusedError as refusal:
            answer = replace(answer, refusal=f"{refusal}; {_instead_of(question)}")
        with self._lock:
            self._asking = None
            answers = self._questions.take_answer(question, text, time.monotonic())
        for rank, (number, each) in answers.items():
            self._to_ranks.answer(rank, replace(answer, number=number, text=each))

    def _withdraw(self) -> None:
        """End the prompt that the user sees, if there is one; call it with the lock."""
        if self._asking is not None:
            self._asking = None
            self._held.withdraw()

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
            if self.listener is not None:
                self.listener.on_events((), self)
            if self._held.waiting:
                break
        self.notes += self._supervisor.take_notes() + ([] if self.state.failures else self._supervisor.out_of_step())
        self.notes += self.state.cut_imports(self._stuck_remedy) + self._supervisor.remarks.of_values(self.number)
        if any(failure.of_group for failure in self.state.failures.values()) and self._supervisor.waits_for:
            self.notes.append(self._supervisor.waits_for)

    def _wait_for_event(self) -> list[Event]:
        """Return the first event in the queue; wait a moment for it, or less if an interrupt is due before."""
        now = time.monotonic()
        pause = 0.05 if self.listener is not None else 0.5
        if self.done or self._abandoned is not None:
            pause = 0.0  # the event that reports it may have been read already
        if self._held.waiting:
            pause = min(pause, self._next_interrupt - now)
        if self.interrupts >= PATIENT_INTERRUPTS:
            pause = min(pause, self._gives_up_at - now)
        try:
            event = self._events.get(timeout=max(0.0, pause))
        except queue.Empty:
            return []
        return [] if event is None else [event]

    def _note(self, event: Event) -> None:
        if isinstance(event, Printed):
            self._printed.setdefault((event.stream, event.rank), []).append(event.text)
        elif isinstance(event, Elided):
            self._printed.setdefault((event.record.stream, event.rank), []).append(event.record.tail)

    def _obey_interrupts(self, *, at_once: bool = False) -> None:
        self._held.mark_checked()
        if self.done:
            return  # `wait` raises what is left
        while self._held.waiting and (at_once or time.monotonic() >= self._next_interrupt):
            now = time.monotonic()
            self._next_interrupt = now + SPACE_SECONDS
            self._held.obeyed += 1
            self.interrupts += 1
            if self.interrupts == 1:
                self._gives_up_at = now + GIVE_UP_SECONDS
            elif self.interrupts == PATIENT_INTERRUPTS:
                self._gives_up_at = max(self._gives_up_at, now + LAST_SECONDS)
            self._interrupt_running(forced=self.interrupts > 1)
        if at_once or (self.interrupts >= PATIENT_INTERRUPTS and time.monotonic() >= self._gives_up_at):
            what = "interrupted three times"
            self._give_up(lambda running: GivenUpError(self._still_running(what, running), self.failures, self))

    def _still_running(self, what: str, running: Collection[int]) -> str:
        return f"{what}; {not_back(running, self._stuck_remedy(running))}"

    def _interrupt_running(self, *, forced: bool) -> None:
        with self._lock:
            self._questions.on_interrupt(time.monotonic())
        try:
            self._to_ranks.interrupt(self.state.running, forced=forced)
        except ClusterClosedError as error:
            self.abandon(str(error))

    def _give_up(self, error: Callable[[Collection[int]], BaseException]) -> None:
        """Raise the error for the ranks that still run; return if there are none any more."""
        with self._lock:
            running = self.state.running
            if not running:
                return
            self.given_up = set(running)
            self._limit_ends.set()
            self._close()
        self._show_end()
        raise error(running)

    def _end(self) -> None:
        with self._lock:
            self._close()
        self._show_end()

    def _close(self) -> None:
        """Take no more output, and show what came before; call it with the lock, so that late output waits."""
        self.ended_s = time.time()
        rest = self._queued()
        if rest and self.listener is not None:
            self.listener.on_events(rest, self)

    def _show_end(self) -> None:
        if self.listener is not None:
            self.listener.on_end(self)

    def _raise(self) -> None:
        failures = self.failures
        if self.timed_out:
            causes = [failure.headline for failure in failures if failure.ename != "KeyboardInterrupt"]
            also = f"; before that {'; '.join(causes)}" if causes else ""
            what = f"the cell ran longer than {self._exceeded_s:g} s and was interrupted{also}"
            raise CellTimeoutError(what, self.notes, self)
        if failures:
            after_death = self._supervisor.after_death
            raise RankFailure(failures, self.state.failures, self.state.waited, self.notes, self, after_death)


def _instead_of(question: Asked) -> str:
    """Return what to do where a question can't be answered."""
    if question.record.is_debugger:
        return "print what you need, or call the function in the notebook after %dist_pull of its arguments"
    return "read it in a notebook cell and send it with %dist_push"


def check_timeout(timeout_s: float, *, may_be_0: bool = False) -> None:
    """Raise a UsageError for a timeout that is not a positive number of seconds, or with ``may_be_0`` for one below."""
    if not 0 <= timeout_s <= threading.TIMEOUT_MAX or not (timeout_s or may_be_0):
        raise UsageError(f"the timeout of a cell is a positive number of seconds, not {timeout_s:g}")


def not_back(ranks: Collection[int], last_resort: str) -> str:
    """Return a message on ranks that still run after interrupts, and what the user can do."""
    has, it_is = ("has", "it is") if len(ranks) == 1 else ("have", "they are")
    return (
        f"{label_ranks(ranks)} {has} not ended the cell: the code there did not react to the interrupt or to the abort "
        f"of its process group, but an import or a long call in C code may still return; %dist_where shows where "
        f"{it_is}, %dist_wait waits, %dist_interrupt interrupts again; the last resort, which loses variables: "
        f"{last_resort}"
    )
