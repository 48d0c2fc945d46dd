"""Obtain and check the nodes of a Slurm job.

Covers: getting the nodes, probing each before ranks start there, the network between them, the error if one can't be
used.
Does not cover: hosts that are reached by ssh (``host_placement``), the job (``launchers.slurm``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...config.hosts import HostSlots
from ...errors import LaunchError
from ...launchers.hosts.preflight import WITHOUT_MPI, over
from ...launchers.hosts.probe_runner import survey_by
from ...launchers.hosts.report import HostRequirements
from ...launchers.mpi import mpiexec_over_hosts
from ...launchers.slurm.allocated_nodes import obtain, step_command
from ...launchers.slurm.commands import find
from ...launchers.slurm.job_state import UNKNOWN
from ...launchers.slurm.texts import over_text
from ...protocol.time_limits import JOB_PLACEMENT_ANSWER_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from ...config.cluster import ClusterConfig
    from ...launchers.folders import Folders
    from ...launchers.placement import Placement
    from ...launchers.slurm.allocated_nodes import AllocatedNodes


def place_in_job(config: ClusterConfig, folders: Folders, report: Callable[[str], None], taken: ExitStack) -> Placement:
    """Use the nodes of an allocation, or submit a job and wait for its nodes; probe each node.

    The parameters are those of :func:`~.host_placement.place`.

    Raises
    ------
    UsageError
        If the request can't be satisfied as it is.
    LaunchError
        If Slurm does not allocate it, or a node can't be used; the message names each such node and what to do.
    """
    find("srun")
    wanted = HostRequirements.here(  # before a job waits in the queue: this fails if this machine lacks something
        torch=config.backend != "none",
        mpiexec=mpiexec_over_hosts(WITHOUT_MPI["srun"]) if config.sbatch.start == "mpirun" else None,
        forward=config.forward,
        shared_folder=folders.profile,
        interface=config.interface,
        limit_s=JOB_PLACEMENT_ANSWER_SECONDS,
        by="srun",
    )
    allocated = obtain(config.sbatch, config.count, folders, report, taken)
    try:
        reports = survey_by(
            lambda node, command: step_command(allocated, node, command), allocated.nodes, wanted, allocated.addresses()
        )
        between = over(reports, wanted, "slurm")
    except LaunchError as error:
        raise _why(allocated, error) from error
    return replace(
        between,
        hosts=tuple(HostSlots(name=node, slots=allocated.per_node) for node in allocated.nodes),
        gpus=dict.fromkeys(allocated.nodes, allocated.gpus_per_node if config.backend not in ("gloo", "none") else 0),
        description=f"{allocated.label}; {between.description}",
        allocated=allocated,
    )


def _why(allocated: AllocatedNodes, error: LaunchError) -> LaunchError:
    """Return the error to raise: that the job has ended in the meantime, if it has, else ``error`` with the remedy."""
    state = allocated.job.state()
    if state.state not in ("RUNNING", UNKNOWN):
        return LaunchError(over_text(allocated.job.state(), state))  # it may have been completing
    other = "the job was ended; --exclude=HOST" if allocated.is_own else "--new-job --exclude=HOST"
    return LaunchError(f"{allocated.label}: {error}\n  {other} requests other nodes from Slurm")
