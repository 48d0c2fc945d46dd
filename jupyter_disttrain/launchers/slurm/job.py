"""Submit, watch and cancel a Slurm job.

Covers: submitting it, its state while Slurm has it and afterwards, waiting until it runs, cancelling it.
Does not cover: the script (``batch_script``), notices about a running job (``monitor``).
"""

from __future__ import annotations

import getpass
import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...errors import LaunchError
from ...protocol.time_limits import CANCEL_SECONDS, COMMANDS_STATE_SECONDS, FIRST_POLL_SECONDS, SLOWEST_POLL_SECONDS
from ..batch_environment import slurm_environment
from .commands import Answer, SilentError, ask
from .job_state import GONE, UNKNOWN, JobState, from_sacct, from_scontrol
from .queue import ask_position
from .texts import over_text

if TYPE_CHECKING:
    from collections.abc import Callable

SACCT_FIELDS = "JobID,State,ExitCode,Start,End,NodeList,Partition,Reason"
_NO_SUCH_JOB = "Invalid job id"
# A user's SBATCH_ variables override the script's options, and are overridden by the command line. None of these may
# apply.
_OVERRIDING = frozenset(
    {
        "SBATCH_ARRAY_INX",
        "SBATCH_CLUSTERS",
        "SBATCH_EXPORT",
        "SBATCH_INPUT",
        "SBATCH_JOB_NAME",
        "SBATCH_NO_KILL",
        "SBATCH_NO_REQUEUE",
        "SBATCH_OPEN_MODE",
        "SBATCH_OUTPUT",
        "SBATCH_ERROR",
        "SBATCH_REQUEUE",
        "SBATCH_WAIT",
    }
)
_NUMBER = re.compile(r"(\d+)(?:;\S*)?")  # a wrapper of sbatch may print more lines
_SILENT = re.compile(r"timed out|[Uu]nable to contact|[Cc]ommunication connection failure|[Zz]ero [Bb]ytes")


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
        try:
            answer = ask("sbatch", "--parsable", *options, text=script, environment=submit_environment())
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

    def state(self, *, with_position: bool = False) -> JobState:
        """Ask Slurm for the state.

        For a job that ended a while ago, the state that Slurm's accounting has kept; ``GONE`` if there is none.
        ``UNKNOWN`` if Slurm does not respond.
        """
        try:
            answer = ask("scontrol", "show", "job", "-o", self.job_id, limit_s=COMMANDS_STATE_SECONDS)
            if answer.code:
                return self._state_afterwards(answer)
            state = from_scontrol(answer.output)
            if state.node_list:
                state = replace(state, nodes=expand(state.node_list))
        except LaunchError:
            return JobState(job_id=self.job_id, state=UNKNOWN, reason="Slurm does not respond")
        return replace(state, position=ask_position(state)) if with_position and state.waits else state

    def _state_afterwards(self, answer: Answer) -> JobState:
        if _NO_SUCH_JOB not in answer.complaint + answer.output:
            return JobState(job_id=self.job_id, state=UNKNOWN, reason=answer.trouble)
        try:
            kept = ask("sacct", "-X", "-P", "-n", "-j", self.job_id, "-o", SACCT_FIELDS, limit_s=COMMANDS_STATE_SECONDS)
        except LaunchError:  # a host without sacct, or an accounting database that does not respond
            return JobState(job_id=self.job_id, state=GONE)
        found = from_sacct(kept.output) if kept.code == 0 else None
        if found is None or found.waits or found.runs:  # accounting is late, or is off
            return JobState(job_id=self.job_id, state=GONE)
        return found

    def wait_until_running(self, on_change: Callable[[JobState], None]) -> JobState:
        """Wait while it is in the queue.

        Parameters
        ----------
        on_change
            Called with each state that differs from the one before.

        Raises
        ------
        LaunchError
            If it ended before it ran, or at once.
        """
        last: JobState | None = None
        pause_s = FIRST_POLL_SECONDS
        while True:
            state = self.state(with_position=True)
            if state != last:
                pause_s = FIRST_POLL_SECONDS
                on_change(state)
            if state.is_over:
                raise LaunchError(over_text(state))
            if state.runs:
                return state
            last = state
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, SLOWEST_POLL_SECONDS)

    def cancel(self, patience_s: float = CANCEL_SECONDS) -> JobState:
        """End it, and wait until its nodes are free; does nothing to one that has ended.

        Raises
        ------
        LaunchError
            If Slurm refuses, or does not respond; the message has Slurm's reason and the job's number.
        """
        deadline = time.monotonic() + patience_s
        pause_s = 0.05
        state = self.state()
        if not state.is_over:
            try:
                answer = ask("scancel", self.job_id)
            except SilentError as error:
                raise LaunchError(
                    f"job {self.job_id} may not be cancelled: {error}; run scancel {self.job_id}"
                ) from error
            if answer.code and _NO_SUCH_JOB not in answer.complaint:
                raise LaunchError(
                    f"job {self.job_id} could not be cancelled: {answer.trouble}; run scancel {self.job_id}"
                )
        while not (state := self.state()).is_over and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 1.0)
        return state


def _cancel_by_name(name: str) -> str:
    """Cancel a job that Slurm may have accepted despite the error; returns the end of the error message.

    A job that is accepted later ends as soon as it starts: its script detects that no notebook waits for it.
    """
    if not name:
        return "squeue --me shows whether Slurm has accepted the job nevertheless; try again later"
    command = ("scancel", f"--user={getpass.getuser()}", f"--name={name}")
    try:
        is_done = not ask(*command, limit_s=COMMANDS_STATE_SECONDS).code
    except LaunchError:
        is_done = False
    if is_done:
        return "if Slurm has accepted the job nevertheless, it is cancelled; try again later"
    return f"if Slurm has accepted the job nevertheless, {' '.join(command)} cancels it; try again later"


def submit_environment() -> dict[str, str]:
    """Return this process's environment for sbatch, without variables that would override the script."""
    return {name: value for name, value in slurm_environment().items() if name not in _OVERRIDING}


_expanded: dict[str, tuple[str, ...]] = {}  # node lists that Slurm has parsed


def expand(node_list: str) -> tuple[str, ...]:
    """Return the hosts of a list such as ``node[1-3]``; the list itself where Slurm can't parse it."""
    if node_list not in _expanded:
        answer = ask("scontrol", "show", "hostnames", node_list, limit_s=COMMANDS_STATE_SECONDS)
        if answer.code != 0:
            return (node_list,)
        _expanded[node_list] = tuple(answer.output.split())
    return _expanded[node_list]
