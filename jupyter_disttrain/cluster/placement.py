"""Where the ranks go, and how they and the notebook reach each other.

Covers: the hosts and their places, the network between them, the address on which the controller listens.
Does not cover: whether the hosts can be used (``preflight``), starting anything (``processes``).
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..errors import LaunchError, UsageError
from ..hosts import HostSlots, split_command
from .devices import check_hosts, shown_gpus
from .host_report import Wanted, own_addresses
from .launchers.mpi import mpiexec_over_hosts
from .network import environment_for
from .rank_environment import forwarded
from .slurm.grant import Grant

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import ExitStack

    from ..config import ClusterConfig
    from .folders import Folders
    from .host_report import HostReport
    from .network import Network

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The hosts of one cluster; without any, all ranks are on the notebook's machine."""

    hosts: tuple[HostSlots, ...] = ()
    listen: str = ""  # the address of the notebook's machine at which ranks on other hosts reach the controller
    network: str = ""  # that all are in, as in "10.1.0.0/16"
    addresses: dict[str, str] = field(default_factory=dict)  # by host
    variables: dict[str, str] = field(default_factory=dict)  # of the environment, for ranks on these hosts
    gpus: dict[str, int] = field(default_factory=dict)  # that its ranks share out, by host
    words: str = ""  # the network, as a person reads it
    grant: Grant | None = None  # of Slurm

    @classmethod
    def load(cls, told: dict[str, Any]) -> Placement:
        """Read what :meth:`as_dict` wrote."""
        grant = None if told["grant"] is None else Grant.load(told["grant"])
        return cls(**told | {"hosts": tuple(HostSlots(**host) for host in told["hosts"]), "grant": grant})

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


def place(config: ClusterConfig, folders: Folders, tell: Callable[[str], None], taken: ExitStack) -> Placement:
    """Decide where ranks go; hosts are looked at first, and a Slurm job is waited for.

    Parameters
    ----------
    tell
        Called with a line on what is waited for, each time it changes.
    taken
        Is told how to give back what is taken, at the moment at which it is.

    Raises
    ------
    LaunchError
        If a host can't be used; the message names each such host and what to do there.
    UsageError
        If it is not said how many ranks a host takes, or if it has too few GPUs for them.
    """
    if config.launcher == "slurm":
        from .job_placement import place_in_job  # noqa: PLC0415  (it imports this)

        return place_in_job(config, folders, tell, taken)
    if not config.hosts:
        return Placement()
    return _over_hosts(config, folders)


def _over_hosts(config: ClusterConfig, folders: Folders) -> Placement:
    """Ask all hosts, the spares too, whether ranks can be started there, and choose their network."""
    from .preflight import WITHOUT_MPI, survey  # noqa: PLC0415  (for one machine it is of no use)

    names = [*(host.name for host in config.hosts), *config.spares]
    ssh = split_command(config.ssh)
    wanted = Wanted.here(
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
    """Return how many GPUs CUDA will show on each host; empty if the ranks use none."""
    if config.backend in ("gloo", "none"):
        return {}
    chosen = forwarded(os.environ, config.forward).get("CUDA_VISIBLE_DEVICES")
    return {report.name: len(shown_gpus(report.gpus, chosen)) for report in reports}


def over(reports: Sequence[HostReport], wanted: Wanted, launcher: str, ssh: Sequence[str] = ()) -> Placement:
    """Refuse hosts that can't be used, and choose the network between those that were asked; without ranks so far.

    Parameters
    ----------
    reports
        What the hosts have said.
    wanted
        What they were asked for.
    launcher
        Of the ranks.
    ssh
        The command by which they were asked, if it was ssh.

    Raises
    ------
    LaunchError
        If a host can't be used, or they share no network; the message names each and what to do.
    """
    from .preflight import check, choose_network, describe  # noqa: PLC0415  (as above)

    notes = check(reports, wanted, ssh)
    network = choose_network(own_addresses(), reports, wanted.interface)
    check_version(network, launcher)
    return Placement(
        listen=network.client_address,
        network=network.cidr,
        addresses={node.name: node.address for node in network.nodes},
        variables=_infiniband(network, reports[0].name),
        words="; ".join([describe(network), *notes]),
    )


def check_version(network: Network, launcher: str) -> None:
    """Refuse IPv6 for an MPI job, which in Slurm ranks may be too: the filter before its sockets lets in IPv4 alone.

    Raises
    ------
    LaunchError
        If that is the network's, and MPI starts the ranks.
    """
    if ":" in network.client_address and launcher != "ssh":
        needs = "ranks in Slurm need" if launcher == "slurm" else "an MPI job over hosts needs"
        raise LaunchError(
            f"the hosts were to talk over {network.cidr}, and {needs} IPv4; start without MPI (--launcher ssh), or "
            "name an IPv4 network that all hosts are in, e.g. --interface 10.1.0.0/16"
        )


def _infiniband(network: Network, host: str) -> dict[str, str]:
    """Return what holds NCCL and UCX to devices that all hosts have; interfaces each rank finds by itself."""
    same = ("NCCL_IB_HCA", "UCX_NET_DEVICES")
    given = environment_for(network, host)
    others = [environment_for(network, node.name) for node in network.nodes]
    return {
        name: given[name] for name in same if name in given and all(each.get(name) == given[name] for each in others)
    }


def _filled(config: ClusterConfig, gpus: Mapping[str, int]) -> tuple[HostSlots, ...]:
    """Give each host its number of ranks where none was named: its GPUs, else an equal part of -n, else one."""
    unsaid = [host.name for host in config.hosts if host.slots is None]
    equal = 1
    if unsaid and config.n is not None:
        left = config.n - sum(host.slots or 0 for host in config.hosts)
        equal, rest = divmod(left, len(unsaid))
        if rest or equal < 1:
            raise UsageError(
                f"-n {config.n} leaves {left} to be shared out evenly over {', '.join(unsaid)}, which can't be; say "
                "how many each takes, e.g. --hosts node1:4,node2:2"
            )
    usual = gpus if config.n is None else {}
    return tuple(replace(host, slots=host.slots or usual.get(host.name) or equal) for host in config.hosts)
