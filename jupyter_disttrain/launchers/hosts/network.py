"""Choose the network that the ranks communicate over.

Covers: choosing it from the addresses of all hosts or taking the one that the user names, the environment variables
that restrict NCCL and UCX to it, describing it.
Does not cover: whether its ports are open (``probe_runner``), Open MPI's variables (``launchers.mpi``).
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
    from collections.abc import Iterable, Mapping, Sequence

    from .report import Address, AnyNetwork, HostReport

    Choice = tuple[AnyNetwork, dict[str, Address]]  # a network, and the address of each host in it

# Interface prefixes of networks inside one machine: virtual machines and containers.
_INNER = ("docker", "virbr", "veth", "br-", "cni", "flannel", "cali", "lxcbr", "lxdbr", "podman", "tunl", "kube")
WIDEST_PREFIX = {4: 8, 6: 32}  # shortest prefix, by IP version, of a network around the hosts' addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network in which every host has an address."""

    client_address: str  # this machine's address, as the hosts reach it
    cidr: str
    addresses: Mapping[str, Address]  # by host, in the order of the hosts
    ports: Mapping[str, Mapping[str, str]]  # link layers of each host's active RDMA ports

    @property
    def infiniband(self) -> dict[str, tuple[str, ...]]:
        """The names of each host's active InfiniBand ports."""
        return {
            host: tuple(port for port, layer in ports.items() if layer == "InfiniBand")
            for host, ports in self.ports.items()
        }


def choose_network(
    client_addresses: Sequence[Address], reports: Sequence[HostReport], interface: str | None = None
) -> Network:
    """Choose the network that all hosts share and that ssh reached most of them by, or take the one in ``interface``.

    ``interface`` is the name of one that every host has, or a network as ``"10.1.0.0/16"``; hosts that did not reply
    are left out.

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
        network, chosen = _named_network(interface, hosts)
    else:
        network, chosen = _named_interface(interface, client_addresses, hosts)
    return Network(
        client_address=_client_address(client_addresses, network, chosen),
        cidr=str(network),
        addresses=chosen,
        ports={host.name: host.rdma_ports for host in hosts},
    )


def device_environment(network: Network, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that restrict NCCL and UCX to devices that all hosts have, unless the user has set them.

    Ranks find their interfaces themselves: their names may differ between hosts.
    """
    interfaces = {address.interface for address in network.addresses.values()}
    infiniband = set(network.infiniband.values())
    wanted = {}
    if len(infiniband) == 1 and (ports := next(iter(infiniband))):
        wanted["NCCL_IB_HCA"] = f"={','.join(ports)}"
        if len(interfaces) == 1:
            wanted["UCX_NET_DEVICES"] = ",".join([*ports, *interfaces])
    elif len(interfaces) == 1 and not any(network.ports.values()):
        wanted["UCX_NET_DEVICES"] = next(iter(interfaces))  # with RDMA ports, UCX finds faster devices by itself
    return {name: value for name, value in wanted.items() if name not in given}


def describe(network: Network) -> str:
    """Describe the network in one line."""
    interfaces = _by_host({host: address.interface for host, address in network.addresses.items()}, "")
    text = f"network {network.cidr} ({interfaces})"
    ports = {host: names for host, names in network.infiniband.items() if names}
    if not ports:
        return text
    devices = {host: ", ".join(dict.fromkeys(name.partition(":")[0] for name in ports[host])) for host in ports}
    if len(ports) < len(network.addresses):
        return f"{text}, InfiniBand {_by_host(devices)}, not used: not every node has it"
    return f"{text}, InfiniBand {_by_host(devices, ' on all nodes' if len(devices) > 1 else None)}"


def _by_host(values: Mapping[str, str], all_hosts: str | None = None) -> str:
    """Return e.g. "eth0 on a, b, ens7 on c"; ``all_hosts`` follows a value that all hosts have."""
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host)
    if len(hosts) == 1 and all_hosts is not None:
        return f"{next(iter(hosts))}{all_hosts}"
    return ", ".join(f"{value} on {', '.join(names)}" for value, names in hosts.items())


# Choice of the network


def _best(client: Sequence[Address], hosts: Sequence[HostReport]) -> Choice:
    if len(hosts) == 1 and is_local(hosts[0].name):
        loopback = next(address for address in hosts[0].addresses if address.loopback)
        return loopback.network, {hosts[0].name: loopback}
    shared = []
    for network in dict.fromkeys(address.network for address in _usable(hosts[0])):
        inside = _pick(hosts, {host.name: [each for each in _usable(host) if each.ip in network] for host in hosts})
        if len(inside) == len(hosts):
            shared.append((network, inside))
    if not shared:  # clouds may give each host a network of its own
        own = {host.name: [each for each in _usable(host) if each.address == host.ssh_address] for host in hosts}
        return _around(_pick(hosts, own), hosts)

    def rank(choice: Choice) -> tuple[int, bool, int]:
        network, inside = choice
        by_ssh = sum(inside[host.name].address == host.ssh_address for host in hosts)
        return -by_ssh, not any(address.ip in network for address in client), network.version

    return min(shared, key=rank)


def _pick(hosts: Sequence[HostReport], addresses: Mapping[str, Sequence[Address]]) -> dict[str, Address]:
    """Return one of each host's addresses, that of ssh if possible; hosts without any are left out."""
    return {
        host.name: next((each for each in of_host if each.address == host.ssh_address), of_host[0])
        for host in hosts
        if (of_host := addresses[host.name])
    }


def _usable(host: HostReport) -> list[Address]:
    return [
        each
        for each in host.addresses
        if not (each.loopback or each.ip.is_link_local or each.interface.startswith(_INNER))
    ]


def _named_network(text: str, hosts: Sequence[HostReport]) -> Choice:
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise UsageError(
            f"{text!r} is not a network: {error}; write e.g. --interface 10.1.0.0/16, or an interface's name, e.g. ib0"
        ) from error
    if network.is_loopback:
        raise _is_loopback(text, hosts)
    chosen = _pick(hosts, {host.name: [each for each in _usable(host) if each.ip in network] for host in hosts})
    without = [host for host in hosts if host.name not in chosen]
    if without:
        raise LaunchError(
            f"{_have_none(without)} in {text}; name another network with --interface. {_what_they_have(without)}"
        )
    return network, chosen


def _named_interface(interface: str, client: Sequence[Address], hosts: Sequence[HostReport]) -> Choice:
    """Return the network around the hosts' addresses on an interface: IPv4 if all have such an address."""
    on = {host.name: [each for each in host.addresses if each.interface == interface] for host in hosts}
    is_here = len(hosts) == 1 and (is_local(hosts[0].name) or set(hosts[0].addresses) == set(client))
    if all(on.values()) and not is_here and any(each.loopback for of_host in on.values() for each in of_host):
        raise _is_loopback(interface, hosts)
    for version in (4, 6):
        chosen = _pick(hosts, {name: [each for each in on[name] if each.ip.version == version] for name in on})
        if len(chosen) == len(hosts):
            return _around(chosen, hosts)
    without = [host for host in hosts if not on[host.name]] or list(hosts)
    raise LaunchError(
        f"{_have_none(without)} that fits on an interface {interface}; name the network instead where interfaces have "
        f"different names, e.g. --interface 10.1.0.0/16. {_what_they_have(without)}"
    )


def _around(chosen: dict[str, Address], hosts: Sequence[HostReport]) -> Choice:
    """Return the narrowest network around the networks of addresses."""
    networks = [address.network for address in chosen.values()]
    if len(chosen) == len(hosts) and len({network.version for network in networks}) == 1:
        common = networks[0]
        while not all(end in common for network in networks for end in (network[0], network[-1])):
            common = common.supernet()
        if common.prefixlen >= WIDEST_PREFIX[common.version]:
            return common, chosen
    raise LaunchError(
        "the hosts share no network; name one in which each has an address, e.g. --interface 10.1.0.0/16. "
        f"{_what_they_have(hosts)}"
    )


def _is_loopback(interface: str, hosts: Sequence[HostReport]) -> LaunchError:
    return LaunchError(
        f"--interface {interface} is loopback, which does not connect hosts; name a network that all hosts are in, "
        f"e.g. --interface eth0 or 10.1.0.0/16. {_what_they_have(hosts)}"
    )


def _have_none(hosts: Sequence[HostReport]) -> str:
    return f"{', '.join(host.name for host in hosts)} {'has' if len(hosts) == 1 else 'have'} no address"


def _what_they_have(hosts: Sequence[HostReport]) -> str:
    found = {host.name: _listed(_usable(host), " ({})") for host in hosts}
    return "; ".join(f"{name} has {has or 'no address that other hosts can reach'}" for name, has in found.items())


def _listed(addresses: Iterable[Address], interface: str = "") -> str:
    return ", ".join(f"{each.address}/{each.prefix}{interface.format(each.interface)}" for each in addresses)


def _client_address(client: Sequence[Address], network: AnyNetwork, chosen: Mapping[str, Address]) -> str:
    """Return this machine's source address for packets to the hosts, as chosen by the kernel."""
    name, target = next(iter(chosen.items()))
    family = socket.AF_INET6 if network.version == 6 else socket.AF_INET  # noqa: PLR2004
    with socket.socket(family, socket.SOCK_DGRAM) as nothing_is_sent:
        try:
            nothing_is_sent.connect((target.address, 9))
        except OSError as error:
            has = _listed(each for each in client if not each.loopback) or "none"
            raise LaunchError(
                f"this machine can't reach {name} at {target.address}, in the network {network} of the hosts: "
                f"{error.strerror}. Its addresses are: {has}. Start the notebook on a machine of that network, or name "
                "another network with --interface"
            ) from error
        return str(nothing_is_sent.getsockname()[0])
