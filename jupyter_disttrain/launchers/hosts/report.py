"""Define the report of a host before ranks start there, and the requirements on it.

Covers: the records, the requirements that follow from this machine.
Does not cover: probing the hosts (``probe_runner``), evaluating the reports (``preflight``), the network (``network``).
"""

from __future__ import annotations

import ipaddress
import os
import sys
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..mpi import version_output
from ..rank_environment import forwarded
from . import probe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    AnyNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

SILENT = "no reply"  # the failure of a host from which neither a reply nor an error came
LEAST_FREE_BYTES = 100 * 2**20  # for logs, sockets and MPI's own files


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address of a host."""

    interface: str  # "eth0"
    address: str
    prefix: int  # length of the network prefix, in bits
    loopback: bool = False

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """The address as a number."""
        return ipaddress.ip_address(self.address)

    @property
    def network(self) -> AnyNetwork:
        """The network of the interface."""
        return ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """A host's report, or the reason why there is none."""

    name: str  # as the user wrote it
    failure: str = ""  # error output of ssh or Python if there was no reply; all fields below are unknown then
    exit_code: int | None = None  # of ssh, if there was no reply; None: ssh had to be killed
    hostname: str = ""
    ssh_address: str = ""  # at which ssh or Slurm reached the host; empty if unknown
    addresses: tuple[Address, ...] = ()
    rdma_ports: Mapping[str, str] = field(default_factory=dict)  # link layer of each active port, as "mlx5_0:1"
    python: str = ""  # "CPython 3.11"
    torch: str = ""  # empty: not installed
    package_folder: str = ""  # empty: not installed
    package_version: str = ""
    package_digest: str = ""
    problems: tuple[tuple[str, str], ...] = ()  # with its folders and connections, each with the remedy
    gpus: int = 0
    daemon: str = ""  # version of the Open MPI whose daemon mpiexec would start there; empty: none
    clock_ahead_s: float = 0.0  # seconds by which its clock is ahead of this machine's

    @property
    def answered(self) -> bool:
        """Whether the host has replied."""
        return not self.failure


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRequirements:
    """Requirements on every host."""

    python: str = sys.executable
    python_version: str = field(default_factory=probe.python_version)
    python_path: tuple[str, ...] = ()  # entries of PYTHONPATH
    library_path: str = ""  # LD_LIBRARY_PATH, which Python itself may need to be loaded
    package_folder: str
    package_version: str
    package_digest: str
    torch: str | None  # version; None: the ranks don't use torch
    mpiexec: str | None = None  # path of Open MPI's mpiexec; None: the ranks don't use it
    mpi_version: str = ""
    shared_folder: Path | None = None  # folder that all hosts must see; None: none is needed
    temporary_folder: str = field(default_factory=tempfile.gettempdir)
    working_folder: str = field(default_factory=os.getcwd)
    interface: str | None = None  # name of the interface, or the network in CIDR form; None: chosen automatically
    least_free_bytes: int = LEAST_FREE_BYTES
    limit_s: float = 20.0  # for a host to reply
    reach_s: float = 3.0  # for one host to connect to another
    by: str = "ssh"  # command that starts processes on the hosts; "srun": they are nodes of a Slurm job

    @classmethod
    def here(
        cls, *, torch: bool = True, mpiexec: str | None = None, forward: Sequence[str] = (), **others: Any
    ) -> HostRequirements:
        """Return the requirements that follow from what this machine has.

        ``torch``: whether the ranks use it; ``mpiexec``: the path of Open MPI's, if it starts the ranks; ``forward``:
        as in ``ClusterConfig``; ``others``: further fields of this class.

        Raises
        ------
        UsageError
            If a variable to forward is not set.
        """
        environment = forwarded(os.environ, forward)
        entries = environment.get("PYTHONPATH", "").split(os.pathsep)
        return cls(
            torch=probe.version_of("torch") if torch else None,
            mpiexec=mpiexec,
            mpi_version=probe.open_mpi_version(version_output(mpiexec)) if mpiexec else "",
            python_path=tuple(os.path.abspath(entry) for entry in entries if entry),  # noqa: PTH100  (keep symbolic links)
            library_path=environment.get("LD_LIBRARY_PATH", ""),
            **{**probe.package(), **others},
        )


def own_addresses() -> tuple[Address, ...]:
    """Return the addresses of this machine."""
    return tuple(Address(**each) for each in probe.addresses())


def read_report(name: str, answer: Mapping[str, Any], now_s: float) -> HostReport:
    """Parse the reply of ``probe.report``, which arrived at ``now_s``, in seconds since the epoch."""
    known = {
        **answer,
        "addresses": tuple(Address(**each) for each in answer["addresses"]),
        "problems": tuple(map(tuple, answer["problems"])),
        "clock_ahead_s": answer["time_s"] - now_s,
    }
    del known["time_s"]
    return HostReport(name=name, **known)
