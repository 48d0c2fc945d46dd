"""What a person is told when ranks can't be reached any more, or can't be replaced.

Covers: the words for ranks of a notebook's own, of a job, and behind a tunnel.
Does not cover: noticing it (``link``, ``reach``), what is done then (``hearing``, ``guardian``).
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DisttrainError
from ..job_file import JobTrace
from ..private_files import read_own
from ..ranks import format_ranks, label_ranks
from .tunnel import tunnel_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from ..config import ClusterConfig
    from .start import Launch


def why_lost(launch: Launch) -> str:
    """Return why nobody can be reached once the controller is lost, and what to do; asked before ranks count as dead.

    A job may end with the first rank that dies.
    """
    tunnel = tunnel_of(launch.folders.profile)
    if tunnel is not None and not launch.cut_s and tunnel.why_ended:
        return tunnel.why_ended
    config = launch.config
    if launch.cut_s:
        return (
            f"no host of {config.job_file} has answered for {launch.cut_s:.1f} s, as if the network was cut; the ranks "
            "go on without this notebook, and %dist_attach brings them back"
        )
    if config.job and tunnel is None and _goes_on(config.job_file, launch.folders.cluster_id):
        return (
            f"the connection to the ranks of {config.job_file} broke; they go on without this notebook, and "
            f"%dist_attach {config.job_file} brings them back"
        )
    if config.job:
        dead = [entry.info.rank for entry in launch.table if entry.state == "dead"]
        after = f" after {label_ranks(dead)} died" if dead else ""
        return f"the job of {config.job_file} has ended{after}; start it again and %dist_attach its file"
    return (
        f"the controller of cluster {config.name!r} on {socket.gethostname()} {launch.controller_fate or 'has ended'}; "
        "nobody can be reached without it, so all ranks end; %dist_reset starts them anew"
    )


def _goes_on(file: str, cluster_id: str) -> bool:
    """Whether a job's controller is still there: what lies between may break a connection too."""
    try:
        there = JobTrace.parse(read_own(Path(file)))
    except (OSError, ValueError):
        return False
    return there.cluster_id == cluster_id and there.answer() == "there"


def words_of(error: Exception) -> str:
    """Return what an error says; one of ours speaks for itself."""
    return str(error) if isinstance(error, DisttrainError) else f"{type(error).__name__}: {error}"


def stuck_remedy(launch: Launch, ranks: Collection[int]) -> str:
    """Return what helps with ranks that hear nothing any more."""
    if not launch.config.job:
        return f"%dist_reset -r {format_ranks(ranks)} replaces just {'that rank' if len(ranks) == 1 else 'those ranks'}"
    words = "only %dist_shutdown, which ends the job, ends that"
    if launch.config.has_mpi and not launch.mpi_heals:
        words += "; calls of MPI can be ended where the job begins with mpirun --with-ft ulfm --continuous (Open MPI 5)"
    return words


def remedy(config: ClusterConfig, ranks: Collection[int] = ()) -> str:
    """Return what helps once ranks can't be replaced."""
    if config.job:
        return "a new job has all ranks again (%dist_shutdown ends this one)"
    if config.launcher == "slurm" and ranks:  # there the reason may pass, and a new job would wait in the queue
        return f"%dist_reset -r {format_ranks(ranks)} tries again, and %dist_reset starts all ranks anew"
    return "%dist_reset starts the ranks anew"
