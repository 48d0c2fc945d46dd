"""The nodes of a cluster, as Slurm has granted them.

Covers: taking those of the allocation around the notebook, or submitting a job and waiting for it; their addresses.
Does not cover: starting ranks on them (``launchers.slurm``).
"""

from __future__ import annotations

import contextlib
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...slurm_options import gpu_count, name_of
from ..interrupts import deferred_interrupts
from .allocation import Allocation
from .batch_script import BatchScript
from .commands import ask
from .environment import clean_env
from .job import SlurmJob
from .sentry import SIGN, Sentry, relieve
from .words import no_gpus_text, running_text, waiting_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import ExitStack

    from ...slurm_options import SlurmOptions
    from ..folders import Folders
    from .state import JobState

START_FILE = "start_ranks.sh"  # in a folder that goes with the cluster
LOG = "slurm-%j.log"  # in the folder of logs that are kept
_NODE_FIELD = re.compile(r"\b(NodeName|NodeAddr)=(\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Nodes that ranks may be started on."""

    job_id: str
    nodes: tuple[str, ...]  # those that are used, in the order of the ranks
    per_node: int  # ranks
    start_file: str  # the script that starts them
    log: str = ""  # what the job says; empty: it is not ours
    starts_with: str = "mpirun"
    gpus_per_node: int = 0
    prefix: tuple[str, ...] = ()  # NAME=VALUE, of the allocation around the notebook; empty: the job is ours

    @classmethod
    def load(cls, told: Mapping[str, Any]) -> Grant:
        """Read what was written as JSON."""
        return cls(**{**told, "nodes": tuple(told["nodes"]), "prefix": tuple(told["prefix"])})

    @property
    def job(self) -> SlurmJob:
        """The job."""
        return SlurmJob(self.job_id)

    @property
    def is_own(self) -> bool:
        """Whether the job was submitted for this cluster, and ends with it."""
        return not self.prefix

    @property
    def env(self) -> list[str]:
        """What a command begins with that is to find these nodes, and no other job that may be around the notebook."""
        return [*clean_env(), *self.prefix]

    @property
    def in_words(self) -> str:
        """Whose nodes they are, in a few words."""
        return f"job {self.job_id}" if self.is_own else f"allocation {self.job_id}"

    def release(self) -> None:
        """End the job, if it is ours, and wait until its nodes are free.

        Raises
        ------
        LaunchError
            If Slurm refuses.
        """
        if self.is_own:
            _end(self.job, self.log)

    def addresses(self) -> dict[str, str]:
        """Return the address at which Slurm reaches each node, of those that this host knows by name."""
        answer = ask("scontrol", "show", "node", "-o", ",".join(self.nodes))
        found = [dict(_NODE_FIELD.findall(line)) for line in answer.said.splitlines()]
        names = {node.get("NodeName", ""): node.get("NodeAddr", "") for node in found}
        addresses: dict[str, str] = {}
        for node in self.nodes:
            with contextlib.suppress(OSError):  # without it, the network is chosen by what the nodes say alone
                addresses[node] = socket.gethostbyname(names.get(node) or node)
        return addresses


def obtain(
    options: SlurmOptions, ranks: int | None, folders: Folders, tell: Callable[[str], None], taken: ExitStack
) -> Grant:
    """Take the nodes of the allocation around this process, or submit a job and wait until it has some.

    Parameters
    ----------
    options
        What is asked for.
    ranks
        All of them, where a person has said so.
    folders
        Of the cluster; the nodes must see them too.
    tell
        Called with one line about the queue each time it changes.
    taken
        Is told how to end a job, as soon as there is one.

    Raises
    ------
    UsageError
        If the request contradicts itself, or an allocation has less.
    LaunchError
        If Slurm does not take the job, or ends it before it runs.
    """
    start_file = str(folders.profile / START_FILE)
    around = None if options.new_job else Allocation.find()
    if around is not None:
        nodes, per_node = around.shape(options, ranks)
        return Grant(
            job_id=around.job_id,
            nodes=around.nodes[:nodes],
            per_node=per_node,
            start_file=start_file,
            starts_with=options.start,
            gpus_per_node=around.gpus_per_node,
            prefix=tuple(around.variables(nodes, per_node)),
        )
    nodes, per_node = options.shape(ranks)
    log = str(folders.run / LOG)
    script = BatchScript(
        cluster_id=folders.cluster_id,
        nodes=nodes,
        per_node=per_node,
        folder=str(Path.cwd()),
        log=log,
        start_file=start_file,
        sign_file=str(folders.profile / SIGN),
        survives_nodes=options.start == "srun",
    )
    has_name = any(name_of(option) == "job-name" for option in options.lines)
    sentry = Sentry(folders)
    taken.callback(sentry.leave)
    with deferred_interrupts():  # a job whose number nobody has read could not be cancelled
        job = SlurmJob.submit(script.render(), options.lines, "" if has_name else script.name)
        taken.callback(_end, job, log.replace("%j", job.job_id))
        sentry.guard(job.job_id)
    state = job.wait_until_running(lambda state: _tell_waiting(state, tell))
    tell(running_text(state))
    return Grant(
        job_id=state.job_id,
        nodes=state.nodes,
        per_node=per_node,
        start_file=start_file,
        log=state.log or log.replace("%j", state.job_id),
        starts_with=options.start,
        gpus_per_node=_gpus_of_each(state, options, tell),
    )


def _gpus_of_each(state: JobState, options: SlurmOptions, tell: Callable[[str], None]) -> int:
    """Return how many GPUs each node has for the job: those that Slurm tells of, else those that were asked for."""
    found = state.gpus // max(1, len(state.nodes))
    found = found or (gpu_count(options.gpus_per_node) if options.gpus_per_node else 0)
    if options.gpu_option and not found:
        tell(no_gpus_text(state, options.gpu_option))
    return found


def _end(job: SlurmJob, log: str) -> None:
    """End a job that is ours, and wait until its nodes are free; a log in which it says nothing need not be kept."""
    job.cancel()
    relieve(job.job_id)  # not before: who kills the notebook meanwhile leaves the job to the sentry
    written = Path(log)
    if written.exists() and not written.stat().st_size:
        written.unlink()


def _tell_waiting(state: JobState, tell: Callable[[str], None]) -> None:
    if not (state.runs or state.is_over):
        tell(waiting_text(state))


def step_command(grant: Grant, host: str, command: list[str]) -> list[str]:
    """Return the command that starts one more rank on a node, beside those that are there."""
    return [
        *grant.env,
        "srun",
        f"--jobid={grant.job_id}",
        "--overlap",
        "--mpi=none",
        "--cpu-bind=none",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={host}",
        *command,
    ]
