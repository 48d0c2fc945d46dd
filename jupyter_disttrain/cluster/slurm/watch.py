"""Remarks on a job that runs.

Covers: which are due (a state machine without I/O), and asking Slurm from time to time.
Does not cover: their words (``words``), what is done when the job is over (whoever ticks).

Nothing here has a thread or waits: whoever has a loop calls :meth:`Poller.tick` in it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .words import lost_nodes_text, over_text, preempt_text, requeued_text, time_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from .job import SlurmJob
    from .state import JobState

WARN_AT_S = (600.0, 300.0, 60.0)  # before the end
POLL_SECONDS = 5.0
HURRIED_POLL_SECONDS = 0.25  # while somebody waits for a change
SILENCE_SECONDS = 120.0  # without an answer from Slurm, before that is said
SLACK_SECONDS = 5.0  # by which Slurm may move the end without anybody having changed the limit


@dataclass(frozen=True, slots=True)
class Notice:
    """Something to be told."""

    text: str
    is_over: bool = False  # the job's ranks are gone, and it is of no use any more


class Watcher:
    """What is to be said of a job, from one look at its state to the next.

    Parameters
    ----------
    warn_at_s
        How long before the time limit to warn, in seconds, the longest first.
    """

    def __init__(self, warn_at_s: tuple[float, ...] = WARN_AT_S) -> None:
        self._warn_at_s = warn_at_s
        self._ran: JobState | None = None  # the last state in which it did
        self._is_over = False
        self._warned_s: float | None = None  # the shortest of the warnings that were given
        self._warned_of_preemption = False
        self._silent_since_s: float | None = None
        self._told_silence = False

    @property
    def ran(self) -> JobState | None:
        """The last state in which it ran; None if it never did."""
        return self._ran

    def look(self, state: JobState, now_s: float) -> list[Notice]:
        """Return what is to be said now.

        Parameters
        ----------
        state
            The job's, as it has just been told.
        now_s
            Seconds since the epoch.
        """
        if self._is_over:
            return []
        if state.state == "UNKNOWN":
            return self._on_silence(state, now_s)
        self._silent_since_s, self._told_silence = None, False
        was = self._ran
        if state.is_over or (was is not None and (state.waits or state.requeued > was.requeued)):
            self._is_over = True
            text = over_text(state, was) if state.is_over else requeued_text(state, was)
            return [Notice(text, is_over=True)]
        if not state.runs:
            return []
        self._ran = state
        return [*self._lost_nodes(state, was), *self._preemption(state, now_s), *self._time(state, now_s)]

    def _on_silence(self, state: JobState, now_s: float) -> list[Notice]:
        if self._silent_since_s is None:
            self._silent_since_s = now_s
        if self._told_silence or now_s - self._silent_since_s < SILENCE_SECONDS:
            return []
        self._told_silence = True
        return [Notice(f"job {state.job_id}: Slurm has not answered for a while ({state.reason}); the ranks go on")]

    @staticmethod
    def _lost_nodes(state: JobState, was: JobState | None) -> list[Notice]:
        lost = tuple(host for host in was.nodes if host not in state.nodes) if was is not None and state.nodes else ()
        return [Notice(lost_nodes_text(state, lost))] if lost else []

    def _preemption(self, state: JobState, now_s: float) -> list[Notice]:
        if state.preempt_s is None or self._warned_of_preemption:
            return []
        self._warned_of_preemption = True
        return [Notice(preempt_text(state, now_s))]

    def _time(self, state: JobState, now_s: float) -> list[Notice]:
        left_s = state.time_left_s(now_s)
        if left_s is None or state.state == "COMPLETING":
            return []
        if self._warned_s is not None and left_s > self._warned_s + SLACK_SECONDS:
            self._warned_s = None  # somebody has given it more time
        whole_s = None if state.start_s is None or state.end_s is None else state.end_s - state.start_s
        due = [
            each
            for each in self._warn_at_s
            if left_s <= each
            and (self._warned_s is None or each < self._warned_s)
            and (whole_s is None or each < whole_s)  # who asks for five minutes knows that they are short
        ]
        if not due:
            return []
        self._warned_s = min(due)
        return [Notice(time_text(state, now_s))]


class Poller:
    """Ask Slurm now and then, and return what is to be said.

    Parameters
    ----------
    job
        It was submitted, or is the one around us.
    clock
        For the time between two questions, in seconds; the time limit goes by the time of day.
    """

    def __init__(
        self, job: SlurmJob, watcher: Watcher | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.job = job
        self._watcher = watcher or Watcher()
        self._clock = clock
        self._asked_s = -POLL_SECONDS
        self._every_s = POLL_SECONDS
        self.state: JobState | None = None  # as it was last told
        self.over = ""  # why the job is over, once it is

    def hurry(self) -> None:
        """Ask more often from now on: somebody waits for the end."""
        self._every_s = HURRIED_POLL_SECONDS

    def tick(self, *, now: bool = False) -> list[Notice]:
        """Return what is to be said; asks only if the last answer is old, or if ``now``."""
        if self.over or (not now and self._clock() - self._asked_s < self._every_s):
            return []
        self.state = self.job.state()
        self._asked_s = self._clock()
        notices = self._watcher.look(self.state, time.time())
        self.over = next((notice.text for notice in notices if notice.is_over), "")
        return notices
