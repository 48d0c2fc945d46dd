"""Decide on which hosts the ranks run.

Covers: this machine, named hosts, the nodes of a Slurm job; the number of ranks per host.
Does not cover: whether hosts can be used, and the network between them (``launchers.hosts.preflight``), the job
(``launchers.slurm``).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...config.hosts import HostSlots, split_command
from ...errors import LaunchError, UsageError
from ...launchers.hosts.report import HostRequirements
from ...launchers.mpi import mpiexec_over_hosts
from ...launchers.placement import Placement
from ...launchers.rank_environment import forwarded
from ...launchers.slurm.allocated_nodes import obtain, step_command
from ...launchers.slurm.commands import find
from ...launchers.slurm.job_state import UNKNOWN
from ...launchers.slurm.user_messages import over_text
from ...protocol.time_limits import JOB_PLACEMENT_ANSWER_SECONDS
from .gpus import check_hosts, shown_gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import ExitStack

    from ...config.cluster import ClusterConfig
    from ...launchers.folders import Folders
    from ...launchers.hosts.report import HostReport
    from ...launchers.slurm.allocated_nodes import AllocatedNodes


def place(config: ClusterConfig, folders: Folders, report: Callable[[str], None], taken: ExitStack) -> Placement:
    """Decide on which hosts the ranks run; check hosts first, and wait for a Slurm job.

    ``report`` is called with a line on what this waits for, each time it changes. ``taken`` receives a callback that
    releases each resource, as soon as it is acquired. Raises a LaunchError if the working directory was deleted, or
    one that names each host which can't be used and what to do there, or a UsageError if the number of ranks per host
    is not defined, or a host has too few GPUs for them.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise LaunchError(
            "the working directory, in which ranks start too, was deleted; change to another, e.g. by %cd ~"
        ) from None
    if config.launcher == "slurm":
        return _in_job(config, folders, report, taken)
    if not config.hosts:
        return Placement()
    return _over_hosts(config, folders)


def _in_job(config: ClusterConfig, folders: Folders, report: Callable[[str], None], taken: ExitStack) -> Placement:
    """Use the nodes of an allocation, or submit a job and wait for its nodes; probe each node."""
    from ...launchers.hosts.preflight import WITHOUT_MPI, over  # noqa: PLC0415  (not needed for one machine)
    from ...launchers.hosts.probe_runner import survey_by  # noqa: PLC0415

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


def _over_hosts(config: ClusterConfig, folders: Folders) -> Placement:
    """Check on all hosts, including spares, whether ranks can be started there, and choose their network."""
    from ...launchers.hosts.preflight import WITHOUT_MPI, over  # noqa: PLC0415  (not needed for one machine)
    from ...launchers.hosts.probe_runner import survey  # noqa: PLC0415

    names = [*(host.name for host in config.hosts), *config.spares]
    ssh = split_command(config.ssh)
    wanted = HostRequirements.here(
        torch=config.backend != "none",
        mpiexec=mpiexec_over_hosts(WITHOUT_MPI["ssh"]) if config.launcher == "mpi" else None,
        forward=config.forward,
        shared_folder=folders.profile,
        interface=config.interface,
    )
    reports = survey(names, ssh, wanted)
    between = over(reports, wanted, config.launcher, ssh)
    gpus = _shown(config, reports)
    hosts = _filled(config, gpus)
    check_hosts(config, hosts, gpus)
    return replace(between, hosts=hosts, gpus={host.name: gpus.get(host.name, 0) for host in hosts})


def _shown(config: ClusterConfig, reports: Sequence[HostReport]) -> dict[str, int]:
    """Return the number of GPUs that are visible to CUDA, by host; empty if the ranks use none."""
    if config.backend in ("gloo", "none"):
        return {}
    chosen = forwarded(os.environ, config.forward).get("CUDA_VISIBLE_DEVICES")
    return {report.name: len(shown_gpus(report.gpus, chosen)) for report in reports}


def _filled(config: ClusterConfig, gpus: Mapping[str, int]) -> tuple[HostSlots, ...]:
    """Set the number of ranks of hosts without one: with -n an equal part of the rest, else the GPUs, else one."""
    without_slots = [host.name for host in config.hosts if host.slots is None]
    equal = 1
    if without_slots and config.n is not None:
        left = config.n - sum(host.slots or 0 for host in config.hosts)
        equal, rest = divmod(left, len(without_slots))
        if rest or equal < 1:
            raise UsageError(
                f"-n {config.n} leaves {left} for {', '.join(without_slots)}, which can't be divided evenly; give each "
                "host its number of ranks, e.g. --hosts node1:4,node2:2"
            )
    usual = gpus if config.n is None else {}
    return tuple(replace(host, slots=host.slots or usual.get(host.name) or equal) for host in config.hosts)
