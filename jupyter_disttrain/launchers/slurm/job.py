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
from .commands import SilentError, ask, slurm_environment
from .job_state import GONE, UNKNOWN, JobState, from_scontrol
from .texts import over_text

if TYPE_CHECKING:
    from collections.abc import Callable

_NO_SUCH_JOB = "Invalid job id"
# A user's SBATCH_ variables override the script's options, and are overridden by the command line. None of these may
# apply.
_OVERRIDING = frozenset(
    f"SBATCH_{name}"
    for name in (
        *("ARRAY_INX", "CLUSTERS", "EXPORT", "INPUT", "JOB_NAME", "NO_KILL", "NO_REQUEUE", "OPEN_MODE", "OUTPUT"),
        *("ERROR", "REQUEUE", "WAIT"),
    )
)
_NUMBER = re.compile(r"(\d+)(?:;\S*)?")  # a wrapper of sbatch may print more lines
_SILENT = re.compile(r"timed out|[Uu]nable to contact|[Cc]ommunication connection failure|[Zz]ero [Bb]ytes")
_NOT_QUEUED = {"JobHeldUser", "JobHeldAdmin", "Dependency", "BeginTime"}  # reasons for which a job waits


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job that was submitted, identified by its number."""

    job_id: str

    @classmethod
    def submit(cls, script: str, options: tuple[str, ...] = (), name: str = "") -> SlurmJob:
        """Submit a script with sbatch.

        Parameters
        ----------
        script
            The script, with its ``#SBATCH`` lines.
        options
            The user's options, which override variables such as SBATCH_PARTITION.
        name
            The job's name, by which it is cancelled if its number is unknown; empty: it has no unique name.

        Call it with interrupts deferred: a job whose number was not read can't be cancelled.

        Raises
        ------
        LaunchError
            If Slurm rejects it, with Slurm's message, or does not confirm it.
        """
        environment = {key: value for key, value in slurm_environment().items() if key not in _OVERRIDING}
        try:
            answer = ask("sbatch", "--parsable", *options, text=script, environment=environment)
        except SilentError as error:
            raise LaunchError(f"{error}; {_cancel_by_name(name)}") from error
        if answer.code and _SILENT.search(answer.trouble):
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
        """Ask Slurm for the state: ``UNKNOWN`` if Slurm does not respond, ``GONE`` if it has no record of the job."""
        try:
            answer = ask("scontrol", "show", "job", "-o", self.job_id, limit_s=COMMANDS_STATE_SECONDS)
            if answer.code and _NO_SUCH_JOB in answer.complaint + answer.output:
                return JobState(job_id=self.job_id, state=GONE)
            if answer.code:
                return JobState(job_id=self.job_id, state=UNKNOWN, reason=answer.trouble)
            state = from_scontrol(answer.output)
            return replace(state, nodes=expand(state.node_list)) if state.node_list else state
        except LaunchError:
            return JobState(job_id=self.job_id, state=UNKNOWN, reason="Slurm does not respond")

    def position(self, state: JobState) -> int | None:
        """Ask Slurm for the position among the pending jobs of its partition, from 1 on.

        None where it is not queued, or Slurm does not respond: a busy site's queue may be too long to list in time,
        which must not end the wait.
        """
        if not state.waits or state.reason in _NOT_QUEUED or not state.partition:
            return None
        command = ("squeue", "--noheader", "--states=PENDING", f"--partition={state.partition}", "--format=%i")
        try:
            waiting = ask(*command, "--sort=-p,i", limit_s=COMMANDS_STATE_SECONDS).output.split()
        except LaunchError:
            return None
        return waiting.index(self.job_id) + 1 if self.job_id in waiting else None

    def wait_until_running(self, on_change: Callable[[JobState], None]) -> JobState:
        """Wait while it is in the queue.

        Parameters
        ----------
        on_change
            Called with each state before it runs that differs from the one before.

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
            by_hand = f"run scancel {self.job_id}"
            try:
                answer = ask("scancel", self.job_id)
            except SilentError as error:
                raise LaunchError(f"job {self.job_id} may not be cancelled: {error}; {by_hand}") from error
            if answer.code and _NO_SUCH_JOB not in answer.complaint:
                raise LaunchError(f"job {self.job_id} could not be cancelled: {answer.trouble}; {by_hand}")
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
    try:
        is_done = not ask(*command, limit_s=COMMANDS_STATE_SECONDS).code
    except LaunchError:
        is_done = False
    effect = "it is cancelled" if is_done else f"{' '.join(command)} cancels it"
    return f"if Slurm has accepted the job nevertheless, {effect}; try again later"


@cache
def expand(node_list: str) -> tuple[str, ...]:
    """Return the hosts of a list such as ``node[1-3]``.

    Raises
    ------
    LaunchError
        If Slurm does not reply; the next call asks again.
    """
    answer = ask("scontrol", "show", "hostnames", node_list, limit_s=COMMANDS_STATE_SECONDS)
    if answer.code:
        raise LaunchError(f"Slurm did not list the nodes of {node_list}: {answer.trouble}")
    return tuple(answer.output.split())
