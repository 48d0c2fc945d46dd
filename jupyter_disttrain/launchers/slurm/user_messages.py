"""Format messages about a Slurm job for the user.

Covers: the line while it waits, warnings while it runs, why it has ended and what to do then.
Does not cover: when a message is shown (``monitor``).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .job_state import JobState

DAY = 24 * 3600.0
NO_LOG = 53  # Slurm's "signal" for a job whose output could not be opened
_ENDS = {  # by Slurm's state: what happened, and what to do
    "TIMEOUT": (
        "was ended by Slurm, because it reached its time limit{limit}",
        "set a longer --time, and run %dist_save before the end",
    ),
    "PREEMPTED": (
        "was ended by Slurm, because a job of higher priority took its nodes",
        "choose a --partition or --sbatch '--qos=...' that is not preempted; %dist_save saves the training state",
    ),
    "CANCELLED": ("was cancelled by a user or the site", "if you did not cancel it, ask your site"),
    "NODE_FAIL": (
        "was ended by Slurm, because one of its nodes failed",
        "--sbatch '--exclude=HOST' avoids a node, and with --ranks-by srun the other ranks continue",
    ),
    "OUT_OF_MEMORY": (
        "was ended by Slurm, because it used more memory than it had requested",
        "request more with --sbatch '--mem=...'",
    ),
    "DEADLINE": ("was ended by Slurm, because it reached its deadline", "set a later --deadline"),
    "BOOT_FAIL": ("was ended by Slurm, because a node did not boot", "--sbatch '--exclude=HOST' avoids a node"),
    "FAILED": ("failed{code}", "check {log} for the reason"),
    "COMPLETED": ("has ended by itself", "check {log} for the reason"),
    "GONE": ("has ended, and Slurm has no record of it any more", "check {log} for the reason"),
}
_REASONS = {  # hints for reasons of waiting whose name alone gives no remedy
    "PartitionNodeLimit": "it requests more nodes or time than the partition allows: interrupt, and request less",
    "PartitionConfig": "no nodes of the partition can run it: interrupt, and request fewer nodes, or less on each",
    "PartitionTimeLimit": "it requests more time than the partition allows: interrupt, and set a shorter --time",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "BadConstraints": "no node has what it requests: interrupt, and request less",
    "InvalidAccount": "the account is not valid: interrupt, and set another with --account",
    "InvalidQOS": "the quality of service is not valid: interrupt, and set another with --sbatch '--qos=...'",
    "JobHeldUser": "held by you: run scontrol release {job}",
    "JobHeldAdmin": "held by the site",
    "ReqNodeNotAvail": "a node that it needs is down or reserved",
}


def waiting_text(state: JobState, now_s: float | None = None) -> str:
    """Return one line on a job that does not run yet.

    Parameters
    ----------
    now_s
        Seconds since the epoch; None: now.
    """
    if state.state == "UNKNOWN":
        return f"job {state.job_id}: {state.reason}; trying again"
    if not state.waits:
        return f"job {state.job_id} has its nodes, which Slurm is preparing: {hosts_text(state)}"
    where = [] if state.position is None else [f"position {state.position} in partition {state.partition}"]
    parts = [f"job {state.job_id} is pending: {' '.join([*where, *_reason_of(state)])}".removesuffix(": ")]
    if state.requeued:
        parts.append("it was requeued")
    if state.start_s is not None:
        parts.append(f"expected to start {clock_text(state.start_s, now_s)}")
    return ", ".join(parts)


def running_text(state: JobState, now_s: float | None = None) -> str:
    """Return one line on a job that runs: where, and until when."""
    now_s = time.time() if now_s is None else now_s
    left_s = state.time_left_s(now_s)
    until = "" if state.end_s is None else f", until {clock_text(state.end_s, now_s)}"
    left = "" if left_s is None else f"{until}, {_left_text(left_s)} from now"
    return f"job {state.job_id} runs on {hosts_text(state)}{left}"


def over_text(state: JobState, was: JobState | None = None) -> str:
    """Return one line on a job that has ended: which, where, why, and what to do.

    Parameters
    ----------
    was
        A state from when it ran, with its nodes and its limit, which Slurm may have forgotten.
    """
    known = was or state
    job = _job(state if state.nodes else known)
    log = state.log or known.log or "the job's log"
    if state.exit_signal == NO_LOG:
        return (
            f"{job} could not start, most likely because its first node can't write {log}; put that folder on a file "
            "system that all nodes share with this machine, or name another with JUPYTER_DATA_DIR"
        )
    limit = state.time_limit or known.time_limit
    code = f" with exit code {state.exit_code}" if state.exit_code else ""
    code = f" by signal {state.exit_signal}" if state.exit_signal else code
    what, remedy = _ENDS.get(state.state, (f"has ended ({state.state})", "check {log} for the reason"))
    return f"{job} {what.format(limit=f' of {limit}' if limit else '', code=code)}; {remedy.format(log=log)}"


def requeued_text(was: JobState) -> str:
    """Return one line on a job that Slurm has put back into the queue; ``was``: its state from when it ran."""
    return (
        f"{_job(was)} was put back into the queue by Slurm (preempted, or requeued by a user); "
        "its ranks and their variables are lost, so it is cancelled; %dist_save saves the training state"
    )


def time_text(state: JobState, now_s: float) -> str:
    """Return one line on a job whose time limit is near."""
    assert state.end_s is not None
    left = state.end_s - now_s
    return (
        f"job {state.job_id} ends at {clock_text(state.end_s, now_s)}, in {_left_text(left)}, at its time limit; "
        f"run %dist_save now, or ask your site for scontrol update JobId={state.job_id} TimeLimit=+60"
    )


def preempt_text(state: JobState, now_s: float) -> str:
    """Return one line on a job that is about to be preempted."""
    assert state.preempt_s is not None
    return (
        f"job {state.job_id} is to be preempted at {clock_text(state.preempt_s, now_s)}: "
        "a job of higher priority takes its nodes; run %dist_save now"
    )


def lost_nodes_text(state: JobState, lost: tuple[str, ...]) -> str:
    """Return one line on nodes that Slurm has taken from a job because they failed."""
    left = f"; it continues with {hosts_text(state)}" if state.nodes else ""
    they = "it" if len(lost) == 1 else "they"
    return f"job {state.job_id} has lost {', '.join(lost)}: Slurm reports that {they} failed{left}"


def hosts_text(state: JobState) -> str:
    """Return a job's hosts, in Slurm's short form if there are more than four."""
    few = 4
    return ", ".join(state.nodes) if 0 < len(state.nodes) <= few else state.node_list or "its nodes"


def clock_text(time_s: float, now_s: float | None = None) -> str:
    """Return a time of day, with the date if it is more than half a day away."""
    now_s = time.time() if now_s is None else now_s
    shape = "%H:%M" if abs(time_s - now_s) < DAY / 2 else "%Y-%m-%d %H:%M"
    return time.strftime(shape, time.localtime(time_s))


def _job(state: JobState) -> str:
    return f"job {state.job_id} ({hosts_text(state)})" if state.node_list else f"job {state.job_id}"


def _reason_of(state: JobState) -> list[str]:
    if not state.reason:
        return []
    # Slurm appends details after a comma.
    hint = _REASONS.get(state.reason.partition(",")[0], "").format(job=state.job_id)
    return [f"({state.reason}: {hint})" if hint else f"({state.reason})"]


def _left_text(seconds: float) -> str:
    minute = 60.0
    return f"{max(0.0, seconds):.0f} s" if seconds < 1.5 * minute else f"{round(seconds / minute)} min"
