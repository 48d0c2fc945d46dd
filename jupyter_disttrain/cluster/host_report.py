"""What is known of a host before anything starts there, and what is wanted of it.

Covers: the records, and what this machine itself has.
Does not cover: asking the hosts (``survey``), judging their answers (``preflight``), the network (``network``).
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import host_probe
from .rank_environment import forwarded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SILENT = "no answer"  # the failure of a host of which not even ssh says anything
LEAST_FREE_BYTES = 100 * 2**20  # for logs, sockets and MPI's own files


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address of a host."""

    interface: str  # "eth0"
    address: str
    prefix: int  # length of the network's part, in bits
    loopback: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A port of an RDMA device."""

    device: str  # "mlx5_0"
    port: int
    active: bool
    link_layer: str  # "InfiniBand", or "Ethernet" for RoCE
    rate: str = ""  # in the kernel's words: "100 Gb/sec (4X EDR)"
    interfaces: tuple[str, ...] = ()  # for IP over it, e.g. "ib0"

    @property
    def name(self) -> str:
        """The port as NCCL and UCX name it."""
        return f"{self.device}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """What a host said of itself, or why it said nothing."""

    name: str  # as the person wrote it
    failure: str = ""  # ssh's or Python's own words where there was no answer; all below is unknown then
    exit_code: int | None = None  # of ssh, where there was no answer; None: it had to be ended
    hostname: str = ""
    ssh_address: str = ""  # at which ssh, or Slurm, reached it; empty where it does not tell
    addresses: tuple[Address, ...] = ()
    infiniband: tuple[Port, ...] = ()
    python: str = ""  # "CPython 3.11"
    torch: str = ""  # empty: not installed
    package_folder: str = ""  # empty: not installed
    package_version: str = ""
    package_digest: str = ""
    shared: str = ""  # what keeps it from seeing the client's file; empty: it sees it, or was not asked
    unwritable: Mapping[str, str] = field(default_factory=dict)  # folders where no file can be written, and why
    working: str = ""  # what is wrong with the working directory
    free_bytes: Mapping[str, int] = field(default_factory=dict)  # by folder
    gpus: int = 0
    daemon: str = ""  # version of the Open MPI whose daemon mpiexec would start there; empty: none
    clock_ahead_s: float = 0.0  # of this machine's
    unreached: Mapping[str, str] = field(
        default_factory=dict
    )  # other hosts, by name; "" is the client: the system's words
    client_address: str = ""  # this machine's, that it tried
    address: str = ""  # that the others tried
    port: int = 0  # that the others tried; 0: none could be opened
    unopened: str = ""  # why no port could be opened

    @property
    def answered(self) -> bool:
        """Whether the host could be asked."""
        return not self.failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What every host must have."""

    python: str = sys.executable
    python_version: str = field(default_factory=host_probe.python_version)
    python_path: tuple[str, ...] = ()  # what PYTHONPATH adds
    library_path: str = ""  # LD_LIBRARY_PATH, which Python itself may need to be loaded
    package_folder: str
    package_version: str
    package_digest: str
    torch: str | None  # None: the ranks do without
    mpiexec: str | None = None  # Open MPI's; None: the ranks do without
    mpi_version: str = ""
    shared_folder: Path | None = None  # that all must see; None: none is needed
    temporary_folder: str = field(default_factory=tempfile.gettempdir)
    working_folder: str = field(default_factory=os.getcwd)
    interface: str | None = None  # its name, or the network in CIDR form; None: chosen
    least_free_bytes: int = LEAST_FREE_BYTES
    limit_s: float = 20.0  # for a host to answer
    reach_s: float = 3.0  # for one host to reach another
    by: str = "ssh"  # what leads to the hosts; "srun": they are nodes of a Slurm job

    @classmethod
    def here(
        cls, *, torch: bool = True, mpiexec: str | None = None, forward: Sequence[str] = (), **others: Any
    ) -> Wanted:
        """Want on every host what this machine has.

        Parameters
        ----------
        torch
            Whether the ranks use it.
        mpiexec
            Open MPI's, if the ranks are started by it.
        forward
            Variables that the ranks are given there, as in ``ClusterConfig.forward``.
        others
            Fields of this class.

        Raises
        ------
        UsageError
            If a variable is to be forwarded that is not set.
        """
        environment = forwarded(os.environ, forward)
        said = host_probe.hear(host_probe.ask_version(mpiexec)) if mpiexec else ""
        entries = environment.get("PYTHONPATH", "").split(os.pathsep)
        return cls(
            torch=host_probe.version_of("torch") if torch else None,
            mpiexec=mpiexec,
            mpi_version=host_probe.open_mpi_version(said),
            python_path=tuple(os.path.abspath(entry) for entry in entries if entry),  # noqa: PTH100  (links stay)
            library_path=environment.get("LD_LIBRARY_PATH", ""),
            **{**host_probe.package(), **others},
        )


def own_addresses() -> tuple[Address, ...]:
    """Return the addresses of this machine."""
    return tuple(Address(**each) for each in host_probe.addresses())


def read_report(name: str, answer: Mapping[str, Any], now_s: float) -> HostReport:
    """Read what ``host_probe.report`` said; ``now_s`` is when it arrived."""
    known = dict(answer)
    ssh = known.pop("ssh")
    known["addresses"] = tuple(Address(**each) for each in known["addresses"])
    known["infiniband"] = tuple(
        Port(**{**each, "interfaces": tuple(each["interfaces"])}) for each in known["infiniband"]
    )
    ahead_s = known.pop("time_s") - now_s
    return HostReport(name=name, ssh_address=_server(ssh), clock_ahead_s=ahead_s, **known)


def _server(ssh_connection: list[str]) -> str:
    """Return the server's address in SSH_CONNECTION: client, its port, server, its port."""
    return ssh_connection[2].partition("%")[0] if len(ssh_connection) == 4 else ""  # noqa: PLR2004
