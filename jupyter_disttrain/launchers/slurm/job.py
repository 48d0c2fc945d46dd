"""Submit, watch and cancel a Slurm job.

Covers: submitting it, its state, its position in the queue, waiting until it runs, cancelling it.
Does not cover: the script (``batch_script``), notices about a running job (``monitor``).
"""

from __future__ import annotations

import getpass
import re
import time
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from ...errors import LaunchError
from ...protocol.time_limits import CANCEL_SECONDS, COMMANDS_STATE_SECONDS, FIRST_POLL_SECONDS, SLOWEST_POLL_SECONDS
from .commands import ask, slurm_environment
from .job_state import GONE, SACCT_FIELDS, UNKNOWN, JobState, from_sacct, from_scontrol
from .user_messages import over_text

if TYPE_CHECKING:
    from collections.abc import Callable

_NO_SUCH_JOB = "Invalid job id"
# Variables with the user's defaults that must not apply, and that no option overrides.
_OVERRIDING = frozenset(f"SBATCH_{name}" for name in ("ARRAY_INX", "CLUSTERS", "ERROR", "INPUT", "NO_KILL", "WAIT"))
_NUMBER = re.compile(r"(\d+)(?:;\S*)?")  # a wrapper of sbatch may print more lines
_SILENT = re.compile(r"timed out|[Uu]nable to contact|[Cc]ommunication connection failure|[Zz]ero [Bb]ytes")
_NOT_QUEUED = {"JobHeldUser", "JobHeldAdmin", "Dependency", "BeginTime"}  # reasons for which a job waits


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job that was submitted, identified by its number."""

    job_id: str

    @classmethod
    def submit(cls, script: str, options: tuple[str, ...] = (), name: str = "") -> SlurmJob:
        """Submit a script by sbatch, with options of the command line.

        Call it with interrupts deferred: a job whose number was not read can be cancelled only by ``name``, which is
        empty if it is not unique.

        Raises
        ------
        LaunchError
            If Slurm rejects it, with Slurm's message, or does not confirm it.
        """
        environment = {key: value for key, value in slurm_environment().items() if key not in _OVERRIDING}
        answer = ask("sbatch", "--parsable", *options, text=script, environment=environment)
        if answer.code is None or _SILENT.search(answer.trouble):
            raise LaunchError(f"Slurm does not respond: {answer.trouble}; {_cancel_by_name(name)}")
        if answer.code:
            raise LaunchError(
                f"Slurm rejected the job: {answer.trouble}; "
                "sinfo shows the partitions, sacctmgr show associations the accounts"
            )
        numbers = [found[1] for line in answer.output.splitlines() if (found := _NUMBER.fullmatch(line.strip()))]
        if not numbers:
            printed = f"{answer.output}{answer.complaint}".strip() or "nothing"
            raise LaunchError(f"sbatch printed no job number, but: {printed}; {_cancel_by_name(name)}")
        return cls(numbers[-1])

    def state(self) -> JobState:
        """Ask Slurm for the state.

        For a job that ended a while ago, the state that Slurm's accounting has kept; ``GONE`` if there is none.
        ``UNKNOWN`` if Slurm does not respond.
        """
        try:
            answer = ask("scontrol", "show", "job", "-o", self.job_id, limit_s=COMMANDS_STATE_SECONDS)
            if answer.code == 0:
                state = from_scontrol(answer.output)
                return replace(state, nodes=expand(state.node_list)) if state.node_list else state
            why = answer.trouble
        except LaunchError as error:
            why = str(error)
        if _NO_SUCH_JOB not in why:
            return JobState(job_id=self.job_id, state=UNKNOWN, reason=why)
        return self._kept_state() or JobState(job_id=self.job_id, state=GONE)

    def _kept_state(self) -> JobState | None:
        """Return the state in Slurm's accounting; None where that is off, late, or does not respond."""
        asked = ("sacct", "-X", "-P", "-n", "-j", self.job_id, "-o", SACCT_FIELDS)
        try:
            state = from_sacct(ask(*asked, limit_s=COMMANDS_STATE_SECONDS).output)
        except LaunchError:  # this host has no sacct
            return None
        return state if state is not None and state.is_over else None

    def position(self, state: JobState) -> int | None:
        """Ask Slurm for the position among the pending jobs of its partition, from 1 on.

        None where it is not queued, or Slurm does not respond: a busy site's queue may be too long to list in time,
        which must not end the wait.
        """
        if not state.waits or state.reason in _NOT_QUEUED or not state.partition:
            return None
        asked = ("--noheader", "--states=PENDING", f"--partition={state.partition}", "--format=%i", "--sort=-p,i")
        try:
            waiting = ask("squeue", *asked, limit_s=COMMANDS_STATE_SECONDS).output.split()
        except LaunchError:  # this host has no squeue
            return None
        return waiting.index(self.job_id) + 1 if self.job_id in waiting else None

    def wait_until_running(self, on_change: Callable[[JobState], None]) -> JobState:
        """Wait until it runs; calls ``on_change`` with each state that differs from the one before.

        Raises
        ------
        LaunchError
            If it ended before it ran, or at once.
        """
        last: JobState | None = None
        pause_s = FIRST_POLL_SECONDS
        while True:
            state = self.state()
            state = replace(state, position=self.position(state))
            if state.is_over:
                raise LaunchError(over_text(state))
            if state.runs:
                return state
            if state != last:
                pause_s = FIRST_POLL_SECONDS
                on_change(state)
            last = state
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, SLOWEST_POLL_SECONDS)

    def cancel(self) -> None:
        """End it, and wait until its nodes are free; does nothing to one that has ended.

        Raises
        ------
        LaunchError
            If Slurm refuses, or does not respond; the message has Slurm's reason and the job's number.
        """
        deadline = time.monotonic() + CANCEL_SECONDS
        pause_s = 0.05
        if not self.state().is_over:
            answer = ask("scancel", self.job_id)
            if answer.code != 0 and _NO_SUCH_JOB not in answer.trouble:
                raise LaunchError(
                    f"job {self.job_id} could not be cancelled: {answer.trouble}; run scancel {self.job_id}"
                )
        while not self.state().is_over and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 1.0)


def _cancel_by_name(name: str) -> str:
    """Cancel a job that Slurm may have accepted despite the error; returns the end of the error message.

    A job that is accepted later ends soon after it starts: its script detects that no notebook waits for it.
    """
    if not name:
        return "squeue --me shows whether Slurm has accepted the job nevertheless; try again later"
    command = ("scancel", f"--user={getpass.getuser()}", f"--name={name}")
    is_done = ask(*command, limit_s=COMMANDS_STATE_SECONDS).code == 0
    effect = "it is cancelled" if is_done else f"{' '.join(command)} cancels it"
    return f"if Slurm has accepted the job nevertheless, {effect}; try again later"


@cache
def expand(node_list: str) -> tuple[str, ...]:
    """Return the hosts of a list such as ``node[1-3]``; raises a LaunchError, and is not cached, without a reply."""
    answer = ask("scontrol", "show", "hostnames", node_list, limit_s=COMMANDS_STATE_SECONDS)
    if answer.code != 0:
        raise LaunchError(answer.trouble)
    return tuple(answer.output.split())
