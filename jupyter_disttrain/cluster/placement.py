"""Where the ranks go, and how they and the notebook reach each other.

Covers: the hosts and their places, the network between them, the address on which the controller listens.
Does not cover: whether the hosts can be used (``preflight``), starting anything (``processes``).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..hosts import HostSlots

if TYPE_CHECKING:
    from ..config import ClusterConfig
    from .folders import Folders

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The hosts of one cluster; without any, all ranks are on the notebook's machine."""

    hosts: tuple[HostSlots, ...] = ()
    listen: str = ""  # the address of the notebook's machine at which ranks on other hosts reach the controller
    network: str = ""  # that all are in, as in "10.1.0.0/16"
    addresses: dict[str, str] = field(default_factory=dict)  # by host
    variables: dict[str, str] = field(default_factory=dict)  # of the environment, for ranks on these hosts
    gpus: int = 0  # on each host
    words: str = ""  # the network, as a person reads it

    @classmethod
    def load(cls, told: dict[str, Any]) -> Placement:
        """Read what :meth:`as_dict` wrote."""
        return cls(**told | {"hosts": tuple(HostSlots(**host) for host in told["hosts"])})

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return asdict(self)

    @property
    def count(self) -> int | None:
        """How many ranks there will be; None: as many as there are GPUs on this machine."""
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
        """Return the host that a rank was started on, as the launcher calls it; empty for this machine."""
        for host in self.hosts:
            rank -= host.slots or 0
            if rank < 0:
                return host.name
        return ""


def place(config: ClusterConfig, folders: Folders) -> Placement:
    """Decide where ranks go; hosts are looked at first.

    Raises
    ------
    LaunchError
        If a host can't be used; the message names each such host and what to do there.
    UsageError
        If it is not said how many ranks a host takes.
    """
    if not config.hosts:
        return Placement()
    return _over_hosts(config, folders)


def _over_hosts(config: ClusterConfig, folders: Folders) -> Placement:
    import ipaddress
    import socket

    import psutil

    addresses = {host.name: socket.gethostbyname(host.name) for host in config.hosts}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((next(iter(addresses.values())), 9))
        listen = probe.getsockname()[0]
    network = next(
        str(ipaddress.ip_network(f"{each.address}/{each.netmask}", strict=False))
        for all_ in psutil.net_if_addrs().values()
        for each in all_
        if each.address == listen
    )
    if any(host.slots is None for host in config.hosts):
        raise UsageError("say how many ranks each host takes, e.g. --hosts node1:4,node2:4")
    return Placement(hosts=config.hosts, listen=listen, network=network, addresses=addresses)
