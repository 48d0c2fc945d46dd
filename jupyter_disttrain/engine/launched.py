"""What the one who started this process tells of it: mpirun, srun, torchrun.

Covers: rank and number of processes, which job they belong to, which IPv4 address of this host the others reach: the
controller's sockets speak no other.
Does not cover: joining them (``join``), who a rank is in the end (``cluster.rank_table``).
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from ..errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping

# Rank, number of processes, number on this host. mpirun's come first: below it SLURM_PROCID is 0 everywhere. PMI_RANK
# alone may be Slurm's.
_VARIABLES = (
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),  # a batch script is in no step
)
# What is alike in all processes of a job, and not in those of the next.
_JOBS = {
    "mpirun": ("PMIX_NAMESPACE",),
    "torchrun": ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
}
AZURE = ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE")  # "10.0.0.4:6000": where rank 0 is to be reached
_NUMBER = re.compile(r"\d+")  # Slurm's "2(x3)" is two on each of three hosts
_SOMEWHERE = "203.0.113.1", 9  # of a network kept for examples: nothing is sent there


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """One process of a job."""

    launcher: str  # "mpirun", "torchrun" or "srun"
    rank: int
    world_size: int
    on_this_host: int  # processes of the job, about
    job: str  # what tells its processes from those of any other job; empty where nothing does

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Launched:
        """Read the environment.

        Raises
        ------
        LaunchError
            If nobody has said which rank this process is.
        """
        for launcher, rank, size, local in _VARIABLES:
            if not (environment.get(rank) and environment.get(size) and environment.get(local)):
                continue
            job = [environment.get(name, "") for name in _JOBS[launcher]]
            if launcher == "torchrun" and _is_loopback(environment.get("MASTER_ADDR", "")):
                job.append(socket.gethostname())
            return cls(
                launcher=launcher,
                rank=int(environment[rank]),
                world_size=int(environment[size]),
                on_this_host=int(_NUMBER.findall(environment[local])[0]),
                job="/".join([launcher, *job]) if any(job) else "",
            )
        raise LaunchError(
            f"nobody told this process on {socket.gethostname()} which rank it is; start it by mpirun, srun or "
            "torchrun, e.g. mpirun -n 4 python -m jupyter_disttrain.engine --join FILE"
        )


def own_address(interface: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the address at which rank 0's host is reached.

    Parameters
    ----------
    interface
        The name of an interface, or a network as in ``"10.1.0.0/16"``; empty: Azure's or torchrun's own choice, if it
        is an address of this host, else that of the default route's interface, else the only one there is.

    Raises
    ------
    LaunchError
        If there is none, or it can't be told which.
    """
    own = _addresses()
    if interface:
        return _on_interface(interface, own)
    for name in (*AZURE, "MASTER_ADDR"):
        told = environment.get(name, "")
        host = told.rpartition(":")[0] if name in AZURE and ":" in told else told
        if host and (address := _resolved(host)) in own:
            return address
    routed = _source_towards(*_SOMEWHERE)
    if routed:
        return routed
    others = [address for address in own if not _is_loopback(address)]
    if len(others) > 1:
        raise LaunchError(
            f"{socket.gethostname()} has {', '.join(others)} and no default route; say with --interface which of them "
            "the other hosts and the notebook reach"
        )
    return others[0] if others else "127.0.0.1"


def network_of(address: str) -> str:
    """Return the network of an address of this host, as in ``"10.1.0.0/16"``."""
    for each in _by_interface(address).values():
        return str(ipaddress.ip_interface(f"{address}/{each}").network)
    return f"{address}/32"


def interface_towards(address: str) -> str:
    """Return the name of this host's interface through which another is reached; empty where none can be told."""
    source = _source_towards(address, 9)
    return next(iter(_by_interface(source)), "") if source else ""


def _on_interface(interface: str, own: Mapping[str, str]) -> str:
    try:
        network = ipaddress.ip_network(interface, strict=False)
    except ValueError:
        found = [address for address, name in own.items() if name == interface]
    else:
        found = [address for address in own if ipaddress.ip_address(address) in network]
    if not found:
        there = ", ".join(f"{address} ({name})" for address, name in own.items())
        raise LaunchError(
            f"{socket.gethostname()} has no address on {interface}; name one of its interfaces or networks: {there}"
        )
    return found[0]


def _addresses() -> dict[str, str]:
    """Return this host's addresses with their interfaces."""
    return {
        each.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family == socket.AF_INET
    }


def _by_interface(address: str) -> dict[str, str]:
    return {
        name: str(each.netmask)
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.address == address
    }


def _source_towards(host: str, port: int) -> str:
    """Return the address that this host would speak from; empty where no route leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nothing_is_sent:
        try:
            nothing_is_sent.connect((host, port))
        except OSError:
            return ""
        return str(nothing_is_sent.getsockname()[0])


def _resolved(host: str) -> str:
    try:
        # Most hosts have localhost as ::1 too, and name that first.
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
