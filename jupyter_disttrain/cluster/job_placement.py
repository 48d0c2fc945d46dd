"""Where the ranks of a Slurm job go, and the network between them.

Covers: taking the nodes, asking each before ranks start there, the network between them, ending the job if one can't be
used.
Does not cover: hosts that are reached by ssh (``placement``), the job (``slurm``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import LaunchError
from ..hosts import HostSlots
from .host_report import Wanted
from .launchers.mpi import mpiexec_over_hosts
from .placement import over
from .preflight import WITHOUT_MPI
from .slurm.commands import find
from .slurm.grant import obtain, step_command
from .slurm.state import UNKNOWN
from .slurm.words import over_text
from .survey import survey_by

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from ..config import ClusterConfig
    from .folders import Folders
    from .placement import Placement
    from .slurm.grant import Grant
    from .slurm.state import JobState

ANSWER_SECONDS = 60.0  # for a node to answer: a step may wait for the site's prolog


def place_in_job(config: ClusterConfig, folders: Folders, tell: Callable[[str], None], taken: ExitStack) -> Placement:
    """Take the nodes of an allocation, or submit a job and wait for its nodes; ask each what it has.

    Parameters
    ----------
    tell
        Called with a line on the queue, each time it changes.
    taken
        Is told how the job is ended.

    Raises
    ------
    UsageError
        If the request can't be met as it is.
    LaunchError
        If Slurm does not grant it, or a node can't be used; the message names each such node and what to do.
    """
    find("srun")
    wanted = Wanted.here(  # before a job waits in the queue: this machine may lack something itself
        torch=config.backend != "none",
        mpiexec=mpiexec_over_hosts(WITHOUT_MPI["srun"]) if config.sbatch.start == "mpirun" else None,
        forward=config.forward,
        shared_folder=folders.profile,
        interface=config.interface,
        limit_s=ANSWER_SECONDS,
        by="srun",
    )
    grant = obtain(config.sbatch, config.count, folders, tell, taken)
    try:
        between = _between_nodes(grant, wanted)
    except LaunchError as error:
        raise _why(grant, grant.job.state(), error) from error
    return replace(
        between,
        hosts=tuple(HostSlots(name=node, slots=grant.per_node) for node in grant.nodes),
        gpus=dict.fromkeys(grant.nodes, grant.gpus_per_node if config.backend not in ("gloo", "none") else 0),
        words=f"{grant.in_words}; {between.words}",
        grant=grant,
    )


def _between_nodes(grant: Grant, wanted: Wanted) -> Placement:
    reports = survey_by(
        lambda node, command: step_command(grant, node, command), grant.nodes, wanted, grant.addresses()
    )
    return over(reports, wanted, "slurm")


def _why(grant: Grant, state: JobState, error: LaunchError) -> LaunchError:
    """Return what is told: that the job has ended meanwhile, if it has, else what is wrong with which node."""
    if state.state not in ("RUNNING", UNKNOWN):
        return LaunchError(over_text(grant.job.state() if grant.is_own else state, state))
    other = "the job was ended; --exclude=HOST" if grant.is_own else "--new-job --exclude=HOST"
    return LaunchError(f"{grant.in_words}: {error}\n  {other} asks Slurm for other nodes")
