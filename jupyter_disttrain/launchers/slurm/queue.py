"""Find a job's position in the queue.

Covers: its position among the pending jobs of its partition.
Does not cover: the job itself (``job``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import LaunchError
from ...protocol.time_limits import COMMANDS_STATE_SECONDS
from .commands import ask

if TYPE_CHECKING:
    from .job_state import JobState

HELD = {"JobHeldUser", "JobHeldAdmin", "Dependency", "BeginTime"}  # reasons for which a job is not queued


def ask_position(state: JobState) -> int | None:
    """Ask Slurm for a job's position, from 1 on; None where it is not queued, or Slurm does not respond."""
    if not state.waits or state.reason in HELD or not state.partition:
        return None
    asked = ("--noheader", "--states=PENDING", f"--partition={state.partition}", "--format=%Q %i")
    try:
        waiting = ask("squeue", *asked, limit_s=COMMANDS_STATE_SECONDS)
    except LaunchError:  # a busy site's queue may be too long to list in time, which must not end the wait
        return None
    return position(waiting.output, state) if waiting.code == 0 else None


def position(waiting: str, state: JobState) -> int:
    """Return a job's position: one plus the number of jobs with higher priority, or with the same and a lower number.

    Parameters
    ----------
    waiting
        Lines of priority and number, such as ``"4294901755 123"``; of an array's part ``"4294901755 123_[1-9]"``.
    """
    own = (-state.priority, _number(state.job_id))
    before = 0
    for line in waiting.splitlines():
        priority, _, number = line.strip().partition(" ")
        if priority.isdecimal():
            before += (-int(priority), _number(number)) < own
    return before + 1


def _number(job_id: str) -> int:
    digits = job_id.strip().partition("_")[0].partition("+")[0]
    return int(digits) if digits.isdecimal() else 0
