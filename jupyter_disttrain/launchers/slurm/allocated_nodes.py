"""Obtain nodes for a cluster from Slurm.

Covers: using those of the allocation around the notebook, or submitting a job and waiting for it; their addresses.
Does not cover: starting ranks on them (``launcher``).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config.slurm import gpu_count, name_of
from ...sigint import deferred_interrupts
from .allocation import Allocation
from .batch_script import batch_script, job_name
from .cancel_on_exit import cancelled_on_exit
from .commands import ask, slurm_environment
from .job import SlurmJob
from .texts import running_text, waiting_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import ExitStack

    from ...config.slurm import SlurmOptions
    from ..folders import Folders
    from .job_state import JobState

START_FILE = "start_ranks.sh"  # in a folder that is removed with the cluster
LOG = "slurm-%j.log"  # in the folder of logs, which are kept
_NODE_ADDRESS = re.compile(r"\bNodeName=(\S+).*?\bNodeAddr=(\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedNodes:
    """Nodes that ranks may be started on."""

    job_id: str
    nodes: tuple[str, ...]  # the nodes in use, in the order of the ranks
    per_node: int  # ranks per node
    start_file: str  # the script that starts the ranks
    log: str = ""  # the job's log file; empty: the job is not ours
    starts_with: str = "mpirun"
    gpus_per_node: int = 0
    prefix: tuple[str, ...] = ()  # NAME=VALUE, of the allocation around the notebook; empty: the job is ours

    @classmethod
    def load(cls, fields: Mapping[str, Any]) -> AllocatedNodes:
        """Load it from the dict that was written as JSON."""
        return cls(**{**fields, "nodes": tuple(fields["nodes"]), "prefix": tuple(fields["prefix"])})

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
        """The ``env`` prefix of a command that has to use these nodes, and no other job around the notebook."""
        others = sorted(os.environ.keys() - slurm_environment().keys())
        return ["env", *(argument for name in others for argument in ("-u", name)), *self.prefix]

    @property
    def label(self) -> str:
        """Name of the job or allocation, for messages."""
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
        """Return the address at which Slurm reaches each node, for nodes whose names this host can resolve."""
        names = dict(_NODE_ADDRESS.findall(ask("scontrol", "show", "node", "-o", ",".join(self.nodes)).output))
        addresses: dict[str, str] = {}
        for node in self.nodes:
            with contextlib.suppress(OSError):  # without it, the network is chosen from the nodes' reports only
                addresses[node] = socket.gethostbyname(names.get(node, node))
        return addresses


def obtain(
    options: SlurmOptions, ranks: int | None, folders: Folders, report: Callable[[str], None], taken: ExitStack
) -> AllocatedNodes:
    """Use the nodes of the allocation around this process, or submit a job and wait until it has nodes.

    ``ranks`` is their total number, if the user has set it. ``report`` is called with one line about the queue each
    time it changes; ``taken`` receives the callback that ends a job, as soon as there is one.

    Raises
    ------
    UsageError
        If the request contradicts itself, or exceeds the allocation.
    LaunchError
        If Slurm rejects the job, or ends it before it runs.
    """
    start_file = str(folders.profile / START_FILE)
    around = None if options.new_job else Allocation.find()
    if around is not None:
        nodes, per_node = around.shape(options, ranks)
        return AllocatedNodes(
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
    script = batch_script(
        folders.cluster_id,
        nodes,
        per_node,
        folder=str(Path.cwd()),
        log=log,
        start_file=start_file,
        survives_nodes=options.start == "srun",
    )
    has_name = any(name_of(option) == "job-name" for option in options.lines)
    guard = taken.enter_context(cancelled_on_exit(folders, start_file))
    with deferred_interrupts():  # a job whose number was not read could not be cancelled
        job = SlurmJob.submit(script, options.lines, "" if has_name else job_name(folders.cluster_id))
        log = log.replace("%j", job.job_id)
        taken.callback(_end, job, log)  # while ``guard`` still runs: if the notebook is killed, that cancels the job
        guard(job.job_id)
    state = job.wait_until_running(lambda state: report(waiting_text(state)))
    report(running_text(state))
    return AllocatedNodes(
        job_id=state.job_id,
        nodes=state.nodes,
        per_node=per_node,
        start_file=start_file,
        log=log,
        starts_with=options.start,
        gpus_per_node=_gpus_of_each(state, options, report),
    )


def _gpus_of_each(state: JobState, options: SlurmOptions, report: Callable[[str], None]) -> int:
    """Return the number of GPUs of each node: those that Slurm reports, else those that were requested."""
    found = state.gpus // max(1, len(state.nodes))
    found = found or (gpu_count(options.gpus_per_node) if options.gpus_per_node else 0)
    if options.gpu_option and not found:
        report(
            f"job {state.job_id}: {options.gpu_option} requests GPUs, but Slurm reports none, so the ranks use CPUs; "
            "set their number per node with --gpus-per-node"
        )
    return found


def _end(job: SlurmJob, log: str) -> None:
    """End a job that is ours, and wait until its nodes are free; an empty log is removed."""
    job.cancel()
    written = Path(log)
    if written.exists() and not written.stat().st_size:
        written.unlink()


def step_command(allocated: AllocatedNodes, host: str, command: list[str]) -> list[str]:
    """Return the command that starts one more rank on a node, beside those that are there."""
    one = ("--overlap", "--mpi=none", "--cpu-bind=none", "--nodes=1", "--ntasks=1", f"--nodelist={host}")
    return [*allocated.env, "srun", f"--jobid={allocated.job_id}", *one, *command]
