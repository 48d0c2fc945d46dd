"""Where a job stands in the queue.

Covers: its position among the jobs of its partition that wait.
Does not cover: the job itself (``job``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import LaunchError
from .commands import STATE_SECONDS, ask

if TYPE_CHECKING:
    from .state import JobState

HELD = {"JobHeldUser", "JobHeldAdmin", "Dependency", "BeginTime"}  # reasons for which it takes no part in the queue


def ask_position(state: JobState) -> int | None:
    """Ask Slurm for a job's position, from 1 on; None where it does not queue, or Slurm does not say."""
    if not state.waits or state.reason in HELD or not state.partition:
        return None
    asked = ("--noheader", "--states=PENDING", f"--partition={state.partition}", "--format=%Q %i")
    try:
        waiting = ask("squeue", *asked, limit_s=STATE_SECONDS)
    except LaunchError:  # the whole queue of a busy site is much to tell, and no reason to leave it
        return None
    return position(waiting.said, state) if waiting.code == 0 else None


def position(waiting: str, state: JobState) -> int:
    """Count the jobs that come before one: those of higher priority, and of the same those that were there earlier.

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
