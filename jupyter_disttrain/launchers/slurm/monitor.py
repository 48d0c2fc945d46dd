"""Watch a running Slurm job.

Covers: querying Slurm from time to time, which notices are due.
Does not cover: their texts (``user_messages``), what follows when the job is over (the caller of ``tick``).

Nothing here has a thread or waits: a caller with a loop calls :meth:`JobMonitor.tick` in it.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ...protocol.time_limits import SILENCE_SECONDS, SLACK_SECONDS, WARN_AT_SECONDS, WATCH_POLL_SECONDS
from .job_state import UNKNOWN
from .user_messages import lost_nodes_text, over_text, preempt_text, requeued_text, time_text

if TYPE_CHECKING:
    from .allocated_nodes import AllocatedNodes
    from .job_state import JobState


class JobMonitor:
    """Query Slurm periodically about a job that runs: one that was submitted and has begun, or the one around us."""

    def __init__(self, allocated: AllocatedNodes) -> None:
        self.job = allocated.job
        self._nodes = allocated.nodes  # for a job that ends before Slurm's first reply
        self.state: JobState | None = None  # the last reply
        self.over = ""  # why the job is over, once it is
        self._asked_s = -math.inf
        self._ran: JobState | None = None  # the last state in which it ran
        self._lost: tuple[str, ...] = ()  # the nodes that it has lost last
        self._silent_since_s = math.inf
        self._due: dict[object, str] = {}  # the notices that hold now, by what they are about

    @property
    def standing(self) -> list[str]:
        """The notices that hold now."""
        return list(self._due.values())

    def tick(self, every_s: float = WATCH_POLL_SECONDS) -> list[str]:
        """Return new notices; queries Slurm only if the last reply is ``every_s`` seconds old."""
        if self.over or time.monotonic() - self._asked_s < every_s:
            return []
        self.state = self.job.state()
        self._asked_s = time.monotonic()
        return self.look(self.state, time.time())

    def look(self, state: JobState, now_s: float) -> list[str]:
        """Return the notices that are new at ``now_s``, in seconds since the epoch, for the job's current state."""
        was = self._ran
        known = was or replace(state, nodes=self._nodes, node_list=",".join(self._nodes))
        if state.state == UNKNOWN:
            self._silent_since_s = min(self._silent_since_s, now_s)
        else:
            self._silent_since_s = math.inf
            if state.is_over:
                self.over = over_text(state, known)
            elif state.waits or (was is not None and state.requeued > was.requeued):
                self.over = requeued_text(known)
            elif state.runs and state.state != "COMPLETING":  # which lists only those nodes that are not free yet
                self._ran = state
                if was is not None and state.nodes:
                    self._lost = tuple(host for host in was.nodes if host not in state.nodes) or self._lost
        due = {} if self.over else self._find_due(state, now_s)
        new = [text for what, text in due.items() if what not in self._due]
        self._due = due
        return new

    def _find_due(self, state: JobState, now_s: float) -> dict[object, str]:
        due: dict[object, str] = {}
        ran = self._ran
        if ran is not None:
            if self._lost:
                due["lost", self._lost] = lost_nodes_text(ran, self._lost)
            if ran.preempt_s is not None:
                due["preempt"] = preempt_text(ran, now_s)
            left_s = ran.time_left_s(now_s)
            # A user who requests five minutes knows that they are short.
            whole_s = math.inf if ran.start_s is None or ran.end_s is None else ran.end_s - ran.start_s
            reached = [
                each
                for each in WARN_AT_SECONDS
                if each < whole_s
                and left_s is not None
                and left_s <= each + (SLACK_SECONDS if each in self._due else 0.0)
            ]
            if reached:
                due[min(reached)] = time_text(ran, now_s)
        if now_s - self._silent_since_s >= SILENCE_SECONDS:
            due["silent"] = (
                f"job {state.job_id}: Slurm has not responded for a while ({state.reason}); the ranks continue"
            )
        return due
