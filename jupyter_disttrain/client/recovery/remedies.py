"""Format messages on ranks that can't be reached or replaced any more.

Covers: ranks that the notebook started, ranks of a job, ranks behind a tunnel; the remedies.
Does not cover: detecting the loss (``client.transport.link``, ``heartbeat``), what follows from it
(``client.session_messages``, ``supervisor``).
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import DisttrainError
from ...private_files import read_own
from ...protocol.connection_file import JobTrace
from ...protocol.ranks import format_ranks, label_ranks
from ...protocol.states import RankState
from ..transport.ssh_tunnel import tunnel_of

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ...config.cluster import ClusterConfig
    from ...launchers.folders import Folders
    from ..startup.rank_table import RankEntry


def why_lost(
    config: ClusterConfig, folders: Folders, table: Sequence[RankEntry], *, cut_s: float, controller_fate: str
) -> str:
    """Return why no rank can be reached once the controller is lost, and what to do.

    Call this before ranks are marked as dead: the message lists ranks that died before, as a job may end with the first
    rank that dies.

    Parameters
    ----------
    cut_s
        Seconds for which no host of a job has replied; 0.0 while they reply.
    controller_fate
        How the controller ended; empty if unknown.
    """
    tunnel = tunnel_of(folders.profile)
    if tunnel is not None and not cut_s and tunnel.why_ended:
        return tunnel.why_ended
    if cut_s:
        return (
            f"no host of {config.job_file} has replied for {cut_s:.1f} s, so the network is probably down; the "
            "ranks continue without this notebook; %dist_attach connects to them again"
        )
    if config.job and tunnel is None and _goes_on(config.job_file, folders.cluster_id):
        return (
            f"the connection to the ranks of {config.job_file} was lost; they continue without this notebook; "
            f"%dist_attach {config.job_file} connects to them again"
        )
    if config.job:
        dead = [entry.info.rank for entry in table if entry.state == RankState.DEAD]
        after = f" after {label_ranks(dead)} died" if dead else ""
        return f"the job of {config.job_file} has ended{after}; start it again and attach to it with %dist_attach"
    return (
        f"the controller of cluster {config.name!r} on {socket.gethostname()} {controller_fate or 'has ended'}; "
        "no rank can be reached without it, so all ranks end; %dist_reset starts them again"
    )


def _goes_on(file: str, cluster_id: str) -> bool:
    """Whether a job's controller still runs: the network may break a connection too."""
    try:
        there = JobTrace.parse(read_own(Path(file)))
    except (OSError, ValueError):
        return False
    return there.cluster_id == cluster_id and there.answer() == "there"


def error_text(error: BaseException) -> str:
    """Return an error's message, with its type's name unless it is one of this package."""
    if isinstance(error, DisttrainError):
        return str(error)
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def stuck_remedy(config: ClusterConfig, ranks: Collection[int], *, mpi_heals: bool) -> str:
    """Return the remedy for ranks that don't respond to interrupts and releases."""
    if not config.job:
        return f"%dist_reset -r {format_ranks(ranks)} replaces just {'that rank' if len(ranks) == 1 else 'those ranks'}"
    text = "only %dist_shutdown can end them; it ends the job"
    if config.has_mpi and not mpi_heals:
        text += "; MPI calls can be ended in a job that is started with mpirun --with-ft ulfm --continuous (Open MPI 5)"
    return text


def remedy(config: ClusterConfig, ranks: Collection[int] = ()) -> str:
    """Return the remedy once ranks can't be replaced."""
    if config.job:
        return "start a new job to get all ranks again (%dist_shutdown ends this one)"
    if config.launcher == "slurm" and ranks:  # the reason may pass, and a new job would have to wait in the queue
        return f"%dist_reset -r {format_ranks(ranks)} tries again, and %dist_reset starts all ranks again"
    return "%dist_reset starts the ranks again"
