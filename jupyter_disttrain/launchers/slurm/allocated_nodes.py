"""Obtain nodes for a cluster from Slurm.

Covers: using those of the allocation around the notebook (by salloc, or as a job), or submitting a job and waiting for
it; their addresses; the environment of commands that use them.
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
from ...errors import LaunchError, UsageError
from ...protocol.ranks import counted
from ...sigint import deferred_interrupts
from .batch_script import batch_script, job_name, job_options
from .cancel_on_exit import cancel_on_exit, guard, relieve
from .commands import ask, slurm_environment
from .job import SlurmJob
from .job_state import UNKNOWN
from .user_messages import running_text, waiting_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import ExitStack

    from ...config.slurm import SlurmOptions
    from ..folders import Folders
    from .job_state import JobState

START_FILE = "start_ranks.sh"  # in a folder that is removed with the cluster
LOG = "slurm-%j.log"  # in the folder of logs, which are kept
_CPUS = re.compile(r"(\d+)(?:\(x\d+\))?")
# Variables of the job itself, which srun does not read and programs on its nodes may.
_FACTS = (
    *("SLURM_TMPDIR", "SLURM_CLUSTER_NAME", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_ACCOUNT"),
    *("SLURM_SUBMIT_DIR", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"),
)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The resources of an allocation."""

    job_id: str
    nodes: tuple[str, ...]
    ranks_per_node: int  # ranks per node that it was made for
    most_per_node: int  # largest number of ranks per node
    gpus_per_node: int = 0

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ) -> Allocation | None:
        """Return the allocation around this process; None outside of any.

        Raises
        ------
        LaunchError
            If Slurm does not report its state, or it has ended.
        """
        job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
        if not job_id or not (environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")):
            return None
        state = SlurmJob(job_id).state()
        if state.state == UNKNOWN:
            raise LaunchError(
                f"the notebook is in the allocation {job_id}, whose state Slurm does not report now ({state.reason}); "
                "try again later"
            )
        if not state.runs or not state.nodes:
            raise LaunchError(
                f"the notebook's environment names the allocation {job_id}, but that is {state.state.lower()}"
                f"{f' ({state.reason})' if state.reason else ''}; start it in another, or use --new-job"
            )
        return cls.of(state, environ)

    @classmethod
    def of(cls, state: JobState, environ: Mapping[str, str]) -> Allocation:
        """Determine a job's resources from its state, and from the environment that Slurm has set."""
        count = len(state.nodes)
        cpus = least_cpus(environ.get("SLURM_JOB_CPUS_PER_NODE", "")) or state.cpus // count
        # SLURM_GPUS_ON_NODE is about one node, but at a site that counts no GPUs the job's state has none.
        on_node = environ.get("SLURM_GPUS_ON_NODE", "")
        gpus = state.gpus // count or (int(on_node) if on_node.isdecimal() else 0)
        # One rank per GPU, unless the user has set the number of tasks per node.
        ranks = state.tasks_per_node or gpus or max(1, state.tasks // count)
        return cls(
            job_id=state.job_id,
            nodes=state.nodes,
            ranks_per_node=ranks,
            most_per_node=max(ranks, cpus, 1),
            gpus_per_node=gpus,
        )

    def shape(self, options: SlurmOptions, ranks: int | None = None) -> tuple[int, int]:
        """Return nodes and ranks per node: those requested, ``ranks`` in total, else those that it was made for.

        Raises
        ------
        UsageError
            If the request exceeds the allocation, or has options that can't be changed in it; the message names both.
        """
        if options.lines:
            given = ", ".join(option.partition("=")[0] for option in options.lines)
            raise UsageError(
                f"{given} can't be changed in the allocation {self.job_id}, in which this notebook runs; "
                "leave it out, or submit a job of its own with --new-job"
            )
        per_node = options.ntasks_per_node
        if ranks is None:
            nodes, per_node = options.nodes or len(self.nodes), per_node or self.ranks_per_node
        else:
            # Without both numbers, the most nodes that give each the same number of ranks.
            even = (count for count in range(min(len(self.nodes), ranks), 0, -1) if ranks % count == 0)
            nodes = options.nodes or (ranks // per_node if per_node else next(even))
            per_node = per_node or ranks // max(nodes, 1)
            if nodes * per_node != ranks:
                raise UsageError(
                    f"-n {ranks} can't be spread evenly over {counted(nodes, 'node')} of the allocation "
                    f"{self.job_id}, which has {len(self.nodes)}; set -N and --ntasks-per-node"
                )
        if nodes > len(self.nodes) or per_node > self.most_per_node:
            raise UsageError(
                f"{counted(nodes, 'node')} with {counted(per_node, 'rank')} each {'is' if nodes == 1 else 'are'} "
                f"requested, but the allocation {self.job_id}, in which "
                f"this notebook runs, has {len(self.nodes)} ({', '.join(self.nodes)}) with room for "
                f"{self.most_per_node} each; request less, or submit a job of its own with --new-job"
            )
        return nodes, per_node

    def variables(self, nodes: int, per_node: int, environ: Mapping[str, str] = os.environ) -> list[str]:
        """Return ``NAME=VALUE`` of a command that uses some nodes of the allocation, and ignores any step in it."""
        hosts = ",".join(self.nodes[:nodes])
        values = {
            **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), self.job_id),
            **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), hosts),
            **dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), nodes),
            "SLURM_TASKS_PER_NODE": f"{per_node}(x{nodes})",
            # The notebook itself may be a step that holds all CPUs. A variable also applies to the daemons that mpirun
            # starts by srun.
            "SLURM_OVERLAP": 1,
            **{name: environ[name] for name in _FACTS if name in environ},
        }
        return [f"{name}={value}" for name, value in values.items()]


def least_cpus(text: str) -> int:
    """Return the smallest number in ``"4(x2),2"``; 0 if there is none."""
    return min(map(int, _CPUS.findall(text)), default=0)


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
    own_options = job_options(
        folders.cluster_id,
        nodes,
        per_node,
        folder=str(Path.cwd()),
        log=log,
        survives_nodes=options.start == "srun",
    )
    script = batch_script(folders.cluster_id, start_file)
    has_name = any(name_of(option) == "job-name" for option in options.lines)
    with deferred_interrupts():  # a job whose number was not read could not be cancelled
        cancel_on_exit(folders, start_file)
        taken.callback(relieve, start_file)
        job = SlurmJob.submit(script, own_options + options.lines, "" if has_name else job_name(folders.cluster_id))
        log = log.replace("%j", job.job_id)
        taken.callback(_end, job, log)  # before ``relieve``: if the notebook is killed meanwhile, the job still ends
        guard(start_file, job.job_id)
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
