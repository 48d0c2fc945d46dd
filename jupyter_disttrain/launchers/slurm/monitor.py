"""Watch a running Slurm job.

Covers: which notices are due (a state machine without I/O), and querying Slurm from time to time.
Does not cover: their texts (``texts``), what follows when the job is over (the caller of ``tick``).

Nothing here has a thread or waits: a caller with a loop calls :meth:`Poller.tick` in it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...protocol.time_limits import (
    HURRIED_POLL_SECONDS,
    SILENCE_SECONDS,
    SLACK_SECONDS,
    WARN_AT_SECONDS,
    WATCH_POLL_SECONDS,
)
from .texts import lost_nodes_text, over_text, preempt_text, requeued_text, time_text

if TYPE_CHECKING:
    from .job import SlurmJob
    from .job_state import JobState


@dataclass(frozen=True, slots=True)
class Notice:
    """A notice for the user."""

    text: str
    is_over: bool = False  # the job's ranks have ended, and the job is of no further use


class Watcher:
    """Decide which notices follow from a job's successive states."""

    def __init__(self) -> None:
        self._ran: JobState | None = None  # the last state in which it ran
        self._is_over = False
        self._warned_s: float | None = None  # the shortest warning time used so far
        self._warned_of_preemption = False
        self._silent_since_s: float | None = None
        self._reported_silence = False
        self._silence_text = ""
        self._lost_text = ""  # the nodes that the job has lost

    def standing(self, now_s: float) -> list[str]:
        """Return the notices that hold now; see :meth:`look` for ``now_s``."""
        ran = self._ran  # another thread sets it
        if self._is_over or ran is None:
            return []
        texts = [
            self._lost_text,
            preempt_text(ran, now_s) if self._warned_of_preemption and ran.preempt_s is not None else "",
            time_text(ran, now_s) if self._warned_s is not None and ran.end_s is not None else "",
            self._silence_text if self._reported_silence else "",
        ]
        return [text for text in texts if text]

    def look(self, state: JobState, now_s: float) -> list[Notice]:
        """Return the notices that are due at ``now_s``, in seconds since the epoch, for the job's current state."""
        if self._is_over:
            return []
        if state.state == "UNKNOWN":
            return self._on_silence(state, now_s)
        self._silent_since_s, self._reported_silence = None, False
        was = self._ran
        if state.is_over or (was is not None and (state.waits or state.requeued > was.requeued)):
            self._is_over = True
            text = over_text(state, was) if state.is_over else requeued_text(state, was)
            return [Notice(text, is_over=True)]
        if not state.runs or (was is not None and state.state == "COMPLETING"):
            return []  # a job that completes lists only those of its nodes that are not free yet
        self._ran = state
        return [*self._lost_nodes(state, was), *self._preemption(state, now_s), *self._time(state, now_s)]

    def _on_silence(self, state: JobState, now_s: float) -> list[Notice]:
        if self._silent_since_s is None:
            self._silent_since_s = now_s
        if self._reported_silence or now_s - self._silent_since_s < SILENCE_SECONDS:
            return []
        self._reported_silence = True
        self._silence_text = (
            f"job {state.job_id}: Slurm has not responded for a while ({state.reason}); the ranks continue"
        )
        return [Notice(self._silence_text)]

    def _lost_nodes(self, state: JobState, was: JobState | None) -> list[Notice]:
        lost = tuple(host for host in was.nodes if host not in state.nodes) if was is not None and state.nodes else ()
        if not lost:
            return []
        self._lost_text = lost_nodes_text(state, lost)
        return [Notice(self._lost_text)]

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
            self._warned_s = None  # its time limit was extended
        whole_s = None if state.start_s is None or state.end_s is None else state.end_s - state.start_s
        due = [
            each
            for each in WARN_AT_SECONDS
            if left_s <= each
            and (self._warned_s is None or each < self._warned_s)
            and (whole_s is None or each < whole_s)  # a user who requests five minutes knows that they are short
        ]
        if not due:
            return []
        self._warned_s = min(due)
        return [Notice(time_text(state, now_s))]


class Poller:
    """Query Slurm periodically about a job that was submitted, or the one around us, and return notices."""

    def __init__(self, job: SlurmJob) -> None:
        self.job = job
        self._watcher = Watcher()
        self._asked_s = -WATCH_POLL_SECONDS
        self._every_s = WATCH_POLL_SECONDS
        self.state: JobState | None = None  # the last reply
        self.over = ""  # why the job is over, once it is

    def hurry(self) -> None:
        """Query more often from now on: the caller waits for the end."""
        self._every_s = HURRIED_POLL_SECONDS

    @property
    def standing(self) -> list[str]:
        """The notices that hold now."""
        return self._watcher.standing(time.time())

    def tick(self, *, now: bool = False) -> list[Notice]:
        """Return due notices; queries Slurm only if the last reply is old, or if ``now``."""
        if self.over or (not now and time.monotonic() - self._asked_s < self._every_s):
            return []
        self.state = self.job.state()
        self._asked_s = time.monotonic()
        notices = self._watcher.look(self.state, time.time())
        self.over = next((notice.text for notice in notices if notice.is_over), "")
        return notices
