"""Use the Slurm allocation that the notebook runs in, if any: by salloc, or as a job.

Covers: finding it, its resources, whether a request fits, the variables for steps in it.
Does not cover: starting ranks in it (``launcher``).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import LaunchError, UsageError
from ...protocol.ranks import counted
from .job import SlurmJob
from .job_state import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...config.slurm import SlurmOptions
    from .job_state import JobState

_CPUS = re.compile(r"(\d+)(?:\(x\d+\))?")
# Variables of the job itself, which srun does not read and programs on its nodes may.
_FACTS = (
    *("SLURM_TMPDIR", "SLURM_CLUSTER_NAME", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_ACCOUNT"),
    *("SLURM_SUBMIT_DIR", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"),
)


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
