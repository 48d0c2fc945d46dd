"""Choose the network that the ranks communicate over.

Covers: choosing it from the addresses of all hosts or taking the one that the user names, the environment variables
that restrict NCCL and UCX to it, describing it.
Does not cover: whether its ports are open (``probe_runner``).
"""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...config.hosts import is_local
from ...errors import LaunchError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .report import Address, HostReport

    AnyNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

# Interface prefixes of networks inside one machine: virtual machines and containers.
_INNER = ("docker", "virbr", "veth", "br-", "cni", "flannel", "cali", "lxcbr", "lxdbr", "podman", "tunl", "kube")
_NO_COMMON = "the hosts share no network; name one in which each has an address, e.g. --interface 10.1.0.0/16. "
WIDEST_PREFIX = {4: 8, 6: 32}  # shortest prefix, by IP version, of a network around the hosts' addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNetwork:
    """One host's address and interface in the network."""

    name: str
    address: str
    interface: str
    infiniband: tuple[str, ...] = ()  # active InfiniBand ports, e.g. "mlx5_0:1"
    other_rdma: bool = False  # has active RDMA ports of another kind, such as RoCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network in which every host has an address."""

    client_address: str  # this machine's address, as the hosts reach it
    cidr: str
    nodes: tuple[NodeNetwork, ...]  # in the order of the hosts

    @property
    def has_infiniband(self) -> bool:
        """Whether every host has an active InfiniBand port."""
        return all(node.infiniband for node in self.nodes)


def choose_network(
    client_addresses: Sequence[Address], reports: Sequence[HostReport], interface: str | None = None
) -> Network:
    """Choose the network that all hosts share and that ssh reached most of them by, or take the one in ``interface``.

    Parameters
    ----------
    client_addresses
        This machine's, from ``report.own_addresses``.
    reports
        Reports of the hosts; those that did not reply are left out.
    interface
        The name of an interface that every host has, or a network as ``"10.1.0.0/16"``; None: choose.

    Raises
    ------
    UsageError
        If ``interface`` has a slash and is not a valid network.
    LaunchError
        If the hosts have no such network, or this machine can't reach it; the message lists the addresses of each.
    """
    hosts = [report for report in reports if report.answered]
    if not hosts:
        raise LaunchError("no host has replied, so no network can be chosen")
    if interface is None:
        network, chosen = _best(client_addresses, hosts)
    elif "/" in interface:
        network = parse_network(interface)
        chosen = _within(network, hosts, interface)
    else:
        network, chosen = _by_name(interface, hosts)
    if interface and any(each.loopback for each in chosen.values()) and not _is_here(client_addresses, hosts):
        raise LaunchError(loopback_text(interface, _what_they_have(hosts)))
    return Network(
        client_address=_client_address(client_addresses, network, chosen),
        cidr=str(network),
        nodes=tuple(_node(host, chosen[host.name]) for host in hosts),
    )


def device_environment(network: Network, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that restrict NCCL and UCX to devices that all hosts have, unless the user has set them.

    Ranks find their interfaces themselves: their names may differ between hosts.
    """
    first = network.nodes[0]
    same_interface = len({node.interface for node in network.nodes}) == 1
    wanted = {}
    if network.has_infiniband and len({node.infiniband for node in network.nodes}) == 1:
        wanted["NCCL_IB_HCA"] = f"={','.join(first.infiniband)}"
        if same_interface:
            wanted["UCX_NET_DEVICES"] = ",".join([*first.infiniband, first.interface])
    elif same_interface and not any(node.infiniband or node.other_rdma for node in network.nodes):
        wanted["UCX_NET_DEVICES"] = first.interface  # else UCX finds faster devices by itself
    return {name: value for name, value in wanted.items() if name not in given}


def describe(network: Network) -> str:
    """Describe the network in one line."""
    interfaces = {node.name: node.interface for node in network.nodes}
    same = len(set(interfaces.values())) == 1
    text = f"network {network.cidr} ({network.nodes[0].interface if same else _by_host(interfaces)})"
    devices = {node.name: ", ".join(_devices(node)) for node in network.nodes if node.infiniband}
    if not devices:
        return text
    if not network.has_infiniband:
        return f"{text}, InfiniBand {_by_host(devices)}, not used: not every node has it"
    if len(network.nodes) > 1 and len(set(devices.values())) == 1:
        return f"{text}, InfiniBand {next(iter(devices.values()))} on all nodes"
    return f"{text}, InfiniBand {_by_host(devices)}"


def _devices(node: NodeNetwork) -> list[str]:
    return list(dict.fromkeys(port.partition(":")[0] for port in node.infiniband))


def _by_host(values: Mapping[str, str]) -> str:
    """Return e.g. "eth0 on a, b, ens7 on c"."""
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host)
    return ", ".join(f"{value} on {', '.join(names)}" for value, names in hosts.items())


def _node(host: HostReport, address: Address) -> NodeNetwork:
    active = [port for port in host.infiniband if port.active]
    return NodeNetwork(
        name=host.name,
        address=address.address,
        interface=address.interface,
        infiniband=tuple(port.name for port in active if port.link_layer == "InfiniBand"),
        other_rdma=any(port.link_layer != "InfiniBand" for port in active),
    )


# Choice of the network


def _best(client: Sequence[Address], hosts: Sequence[HostReport]) -> tuple[AnyNetwork, dict[str, Address]]:
    if len(hosts) == 1 and is_local(hosts[0].name):
        loopback = next(address for address in hosts[0].addresses if address.loopback)
        return _network(loopback), {hosts[0].name: loopback}
    shared = []
    for network in dict.fromkeys(_network(address) for address in _usable(hosts[0])):
        inside = {host.name: address for host in hosts if (address := _first_in(network, host))}
        if len(inside) == len(hosts):
            shared.append((network, inside))
    if not shared:
        return _put_together(hosts)

    def rank(choice: tuple[AnyNetwork, dict[str, Address]]) -> tuple[int, bool, bool]:
        network = choice[0]
        reached = sum(_is_in(host.ssh_address, network) for host in hosts)
        return -reached, not any(_is_in(address.address, network) for address in client), network.version == 6  # noqa: PLR2004

    return min(shared, key=rank)


def _put_together(hosts: Sequence[HostReport]) -> tuple[AnyNetwork, dict[str, Address]]:
    """Return the narrowest network around the addresses that ssh reached, since clouds may give each host a subnet."""
    chosen = {host.name: address for host in hosts for address in _usable(host) if address.address == host.ssh_address}
    if len(chosen) < len(hosts) or len({_version(address) for address in chosen.values()}) > 1:
        raise LaunchError(_NO_COMMON + _what_they_have(hosts))
    return _around(chosen, hosts)


def _usable(host: HostReport) -> Iterator[Address]:
    for address in host.addresses:
        link_local = ipaddress.ip_address(address.address).is_link_local
        if not (address.loopback or link_local or address.interface.startswith(_INNER)):
            yield address


def _first_in(network: AnyNetwork, host: HostReport) -> Address | None:
    inside = [address for address in _usable(host) if _is_in(address.address, network)]
    return next((each for each in inside if each.address == host.ssh_address), inside[0] if inside else None)


def loopback_text(interface: str, has: str) -> str:
    """Return the error for loopback as a network between hosts, and what to name instead."""
    return (
        f"--interface {interface} is loopback, which does not connect hosts; name a network that all hosts are in, "
        f"e.g. --interface eth0 or 10.1.0.0/16. {has}"
    )


def _is_here(client: Sequence[Address], hosts: Sequence[HostReport]) -> bool:
    """Whether all ranks are on this machine, whatever its name."""
    return len(hosts) == 1 and (is_local(hosts[0].name) or set(hosts[0].addresses) == set(client))


def _within(network: AnyNetwork, hosts: Sequence[HostReport], named: str) -> dict[str, Address]:
    chosen = {host.name: address for host in hosts if (address := _first_in(network, host))}
    without = [host for host in hosts if host.name not in chosen]
    looped = [
        host for host in without if any(each.loopback and _is_in(each.address, network) for each in host.addresses)
    ]
    if without and looped == without:
        raise LaunchError(loopback_text(named, _what_they_have(hosts)))
    if without:
        raise LaunchError(
            f"{_have_none(without)} in {named}; name another network with --interface. {_what_they_have(without)}"
        )
    return chosen


def _by_name(interface: str, hosts: Sequence[HostReport]) -> tuple[AnyNetwork, dict[str, Address]]:
    """Return the network around the hosts' addresses on an interface: IPv4 if all have such an address."""
    for version in (4, 6):
        chosen: dict[str, Address] = {}
        for host in hosts:
            own = [each for each in host.addresses if each.interface == interface and _version(each) == version]
            if own:
                chosen[host.name] = next((each for each in own if each.address == host.ssh_address), own[0])
        if len(chosen) == len(hosts):
            return _around(chosen, hosts)
    without = [host for host in hosts if all(each.interface != interface for each in host.addresses)] or list(hosts)
    raise LaunchError(
        f"{_have_none(without)} that fits on an interface {interface}; name the network instead where interfaces have "
        f"different names, e.g. --interface 10.1.0.0/16. {_what_they_have(without)}"
    )


def _around(chosen: dict[str, Address], hosts: Sequence[HostReport]) -> tuple[AnyNetwork, dict[str, Address]]:
    """Return the narrowest network around addresses of one IP version."""
    network = _common([_network(address) for address in chosen.values()])
    if network.prefixlen < WIDEST_PREFIX[network.version]:
        raise LaunchError(_NO_COMMON + _what_they_have(hosts))
    return network, chosen


def _have_none(hosts: Sequence[HostReport]) -> str:
    return f"{', '.join(host.name for host in hosts)} {'has' if len(hosts) == 1 else 'have'} no address"


def _what_they_have(hosts: Sequence[HostReport]) -> str:
    parts = (
        f"{host.name} has {', '.join(f'{each.address}/{each.prefix} ({each.interface})' for each in _usable(host))}"
        if any(_usable(host))
        else f"{host.name} has no address that other hosts can reach"
        for host in hosts
    )
    return "; ".join(parts)


def _client_address(client: Sequence[Address], network: AnyNetwork, chosen: Mapping[str, Address]) -> str:
    """Return this machine's source address for packets to the hosts, as chosen by the kernel."""
    name, target = next(iter(chosen.items()))
    family = socket.AF_INET6 if network.version == 6 else socket.AF_INET  # noqa: PLR2004
    with socket.socket(family, socket.SOCK_DGRAM) as nothing_is_sent:
        try:
            nothing_is_sent.connect((target.address, 9))
        except OSError as error:
            has = ", ".join(f"{each.address}/{each.prefix}" for each in client if not each.loopback) or "none"
            raise LaunchError(
                f"this machine can't reach {name} at {target.address}, in the network {network} of the hosts: "
                f"{error.strerror}. Its addresses are: {has}. Start the notebook on a machine of that network, or name "
                "another network with --interface"
            ) from error
        return str(nothing_is_sent.getsockname()[0])


def _network(address: Address) -> AnyNetwork:
    return ipaddress.ip_interface(f"{address.address}/{address.prefix}").network


def _version(address: Address) -> int:
    return ipaddress.ip_address(address.address).version


def parse_network(text: str) -> AnyNetwork:
    """Parse a network given to ``--interface``.

    Raises
    ------
    UsageError
        If it is not a valid network.
    """
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise UsageError(
            f"{text!r} is not a network: {error}; write e.g. --interface 10.1.0.0/16, or an interface's name, e.g. ib0"
        ) from error


def _is_in(address: str, network: AnyNetwork) -> bool:
    return bool(address) and ipaddress.ip_address(address) in network


def _common(networks: Sequence[AnyNetwork]) -> AnyNetwork:
    """Return the narrowest network that contains all of the given networks, which have one IP version."""
    common = networks[0]
    while common.prefixlen and not all(
        each.network_address in common and each.prefixlen >= common.prefixlen for each in networks
    ):
        common = common.supernet()
    return common
