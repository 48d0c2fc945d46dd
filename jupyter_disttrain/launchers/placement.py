"""Describe where the ranks run, and how they and the notebook reach each other.

Covers: the hosts and their slots, the network between them, the address on which the controller listens.
Does not cover: deciding it (``client.startup.host_placement``), starting anything (``client.startup.processes``).
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from ..config.hosts import HostSlots
from .slurm.allocated_nodes import AllocatedNodes

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The hosts of one cluster; without any, all ranks are on the notebook's machine."""

    hosts: tuple[HostSlots, ...] = ()
    listen: str = ""  # the address of the notebook's machine at which ranks on other hosts reach the controller
    network: str = ""  # the network that all hosts are in, as in "10.1.0.0/16"
    addresses: dict[str, str] = field(default_factory=dict)  # by host
    variables: dict[str, str] = field(default_factory=dict)  # environment variables for ranks on these hosts
    gpus: dict[str, int] = field(default_factory=dict)  # GPUs that are divided among the ranks of a host, by host
    description: str = ""  # description of the network for the user
    allocated: AllocatedNodes | None = None  # the Slurm allocation
    folder: str = field(default_factory=os.getcwd)  # in which ranks start, also those that are started later

    @classmethod
    def load(cls, fields: dict[str, Any]) -> Placement:
        """Read what :meth:`as_dict` wrote."""
        allocated = None if fields["allocated"] is None else AllocatedNodes.load(fields["allocated"])
        return cls(**fields | {"hosts": tuple(HostSlots(**host) for host in fields["hosts"]), "allocated": allocated})

    def as_dict(self) -> dict[str, Any]:
        """Return it as a dict that JSON can represent."""
        return asdict(self)

    @property
    def count(self) -> int | None:
        """The number of ranks; None: as many as there are GPUs on this machine."""
        return sum(host.slots or 0 for host in self.hosts) or None

    @property
    def most(self) -> int | None:
        """The largest number of ranks on one host."""
        return max((host.slots or 0 for host in self.hosts), default=None)

    @property
    def master(self) -> str:
        """The address of rank 0's host, as the other ranks reach it."""
        return self.addresses[self.hosts[0].name] if self.hosts else LOOPBACK

    def host_of(self, rank: int) -> str:
        """Return the host that a rank was started on, by the launcher's name; empty for this machine."""
        for host in self.hosts:
            rank -= host.slots or 0
            if rank < 0:
                return host.name
        return ""
