"""Read what the launcher (mpirun, srun, torchrun) has set in this process's environment.

Covers: rank and number of processes, their job, the IPv4 address at which others reach this host; the controller's
sockets use IPv4 only.
Does not cover: joining the processes (``join``), a rank's final identity (``client.startup.rank_table``).
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from ...config.hosts import is_local
from ...errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping

# Rank, number of processes, number on this host. mpirun's come first, because under mpirun SLURM_PROCID is 0
# everywhere. PMI_RANK alone may be Slurm's.
_VARIABLES = (
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),  # a batch script runs in no step
)
# Variables with the same values in all processes of a job and other values in the next job.
_JOBS = {
    "mpirun": ("PMIX_NAMESPACE",),
    "torchrun": ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
}
AZURE = ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE")  # rank 0's address, e.g. "10.0.0.4:6000"
# Names of the process that starts a job's processes on a host; torchrun's may have any.
_PROCESSES = {
    "mpirun": ("mpirun", "mpiexec", "prterun", "prted", "orterun", "orted", "hydra_pmi_proxy"),
    "srun": ("slurmstepd",),
}
_SHELLS = ("sh", "bash", "dash", "ksh", "zsh", "csh", "tcsh", "fish")  # a job may start its ranks with a script
_NUMBER = re.compile(r"\d+")  # Slurm's "2(x3)" means two on each of three hosts
_SOMEWHERE = "203.0.113.1"  # in a network reserved for documentation; nothing is sent there


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """One process of a job."""

    launcher: str  # "mpirun", "torchrun" or "srun"
    rank: int
    world_size: int
    on_this_host: int  # approximate number of the job's processes on this host
    job: str  # identifies the job; empty if no variable does

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Launched:
        """Read the environment.

        Raises
        ------
        LaunchError
            If no launcher has set this process's rank.
        """
        for launcher, rank, size, local in _VARIABLES:
            if not (environment.get(rank) and environment.get(size) and environment.get(local)):
                continue
            job = [environment.get(name, "") for name in _JOBS[launcher]]
            if launcher == "torchrun" and is_local(environment.get("MASTER_ADDR", "")):
                job.append(socket.gethostname())
            return cls(
                launcher=launcher,
                rank=int(environment[rank]),
                world_size=int(environment[size]),
                on_this_host=int(_NUMBER.findall(environment[local])[0]),
                job="/".join([launcher, *job]) if any(job) else "",
            )
        raise LaunchError(
            f"this process on {socket.gethostname()} has no rank, because no launcher has set one; start it with "
            "mpirun, srun or torchrun, e.g. mpirun -n 4 python -m jupyter_disttrain.rank --join FILE"
        )


def launcher_process(launcher: str, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the pid of the launcher's process on this host; None if a user has set torchrun's variables by hand."""
    if launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in environment:
        return None
    above = [(each.pid, each.name()) for each in psutil.Process().parents()]
    known = [pid for pid, name in above if name in _PROCESSES.get(launcher, ())]
    return next(iter([*known, *(pid for pid, name in above if name not in _SHELLS)]), None)


def own_address(interface: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the address at which others reach this host, which is rank 0's.

    Parameters
    ----------
    interface
        The name of an interface, or a network, e.g. ``"10.1.0.0/16"``; if empty, the address that Azure or torchrun has
        set, if it is an address of this host, else that of the default route's interface, else the only address.

    Raises
    ------
    LaunchError
        If there is no such address or the choice is ambiguous.
    """
    own = _networks()
    if interface:
        return _on_interface(interface, own)
    for name in (*AZURE, "MASTER_ADDR"):
        value = environment.get(name, "")
        host = value.rpartition(":")[0] if name in AZURE and ":" in value else value
        if host and (address := _resolved(host)) in own:
            return address
    routed = _source_towards(_SOMEWHERE)
    if routed:
        return routed
    others = [address for address in own if not is_local(address)]
    if len(others) > 1:
        raise LaunchError(
            f"{socket.gethostname()} has {', '.join(others)} and no default route; choose with --interface the one "
            "that the other hosts and the notebook can reach"
        )
    return others[0] if others else "127.0.0.1"


def network_of(address: str) -> str:
    """Return the network of an address of this host, e.g. ``"10.1.0.0/16"``."""
    return _networks().get(address, ("", f"{address}/32"))[1]


def interface_towards(address: str) -> str:
    """Return the name of this host's interface that reaches an address; empty if unknown."""
    return _networks().get(_source_towards(address), ("", ""))[0]


def _on_interface(interface: str, own: Mapping[str, tuple[str, str]]) -> str:
    try:
        wanted = ipaddress.ip_network(interface, strict=False)
    except ValueError:
        found = [address for address, (name, _) in own.items() if name == interface]
    else:
        found = [address for address in own if ipaddress.ip_address(address) in wanted]
    if not found:
        there = ", ".join(f"{address} ({name})" for address, (name, _) in own.items())
        raise LaunchError(
            f"{socket.gethostname()} has no address on {interface}; name one of its interfaces or networks: {there}"
        )
    return found[0]


def _networks() -> dict[str, tuple[str, str]]:
    """Return the name of the interface and the network of each of this host's addresses."""
    return {
        each.address: (name, str(ipaddress.ip_interface(f"{each.address}/{each.netmask or 32}").network))
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family == socket.AF_INET
    }


def _source_towards(host: str) -> str:
    """Return the source address with which this host would send to another; empty if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nothing_is_sent:
        try:
            nothing_is_sent.connect((host, 9))
        except OSError:
            return ""
        return str(nothing_is_sent.getsockname()[0])


def _resolved(host: str) -> str:
    try:
        # IPv4 only: most hosts also resolve localhost to ::1, and list that first.
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""
