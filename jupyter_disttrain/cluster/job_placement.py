"""Where the ranks of a Slurm job go, and the network between them.

Covers: taking the nodes, the network that they and this machine are in, or the one that is named.
Does not cover: hosts that are reached by ssh (``placement``), the job (``slurm``).

The hosts are not asked one by one as those of ssh are: Slurm vouches for them, and tells their addresses.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

from ..errors import LaunchError, UsageError
from ..hosts import HostSlots
from .host_report import own_addresses
from .placement import Placement
from .slurm.grant import obtain

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..config import ClusterConfig
    from .folders import Folders


def place_in_job(config: ClusterConfig, folders: Folders, tell: Callable[[str], None]) -> Placement:
    """Take the nodes of an allocation, or submit a job and wait for its nodes.

    Parameters
    ----------
    tell
        Called with a line on the queue, each time it changes.

    Raises
    ------
    UsageError
        If the request can't be met as it is.
    LaunchError
        If Slurm does not grant it, or this machine does not reach the nodes; no job is left then.
    """
    grant = obtain(config.sbatch, config.count, folders, tell)
    try:
        addresses = grant.addresses()
        listen, network = network_to(addresses, config.interface)
    except BaseException:  # an interrupt too: no job may stay
        grant.release()
        raise
    return Placement(
        hosts=tuple(HostSlots(name=node, slots=grant.per_node) for node in grant.nodes),
        listen=listen,
        network=network,
        addresses=addresses,
        gpus=grant.gpus_per_node if config.backend not in ("gloo", "none") else 0,
        words=f"{grant.in_words}; network {network}",
        grant=grant,
    )


def network_to(addresses: dict[str, str], interface: str | None) -> tuple[str, str]:
    """Return this machine's address in the network of the nodes, and the network.

    Parameters
    ----------
    addresses
        Of the nodes.
    interface
        One of this machine, or a network as in ``"10.1.0.0/16"``; None: the way to the nodes.

    Raises
    ------
    UsageError
        If this machine has no address there.
    LaunchError
        If it does not reach the nodes.
    """
    own = [each for each in own_addresses() if ":" not in each.address]
    if interface is None:
        listen = _way_to(*next(iter(addresses.items())))
        chosen = [each for each in own if each.address == listen]
    elif "/" in interface:
        named = ipaddress.ip_network(interface, strict=False)
        chosen = [each for each in own if ipaddress.ip_address(each.address) in named]
    else:
        chosen = [each for each in own if each.interface == interface]
    if not chosen:
        has = ", ".join(f"{each.address}/{each.prefix} ({each.interface})" for each in own if not each.loopback)
        raise UsageError(
            f"this machine has no address on {interface or 'the way to the nodes'}; it has {has or 'none'}"
        )
    network = ipaddress.ip_interface(f"{chosen[0].address}/{chosen[0].prefix}").network
    if interface is None:
        # Nodes may be in a network beside ours, behind a router.
        while not all(ipaddress.ip_address(address) in network for address in addresses.values()):
            network = network.supernet()
    return chosen[0].address, interface if interface and "/" in interface else str(network)


def _way_to(name: str, address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nothing_is_sent:
        try:
            nothing_is_sent.connect((address, 9))
        except OSError as error:
            raise LaunchError(
                f"this machine can't reach {name} at {address}: {error.strerror}; run the notebook on a host that "
                "the nodes reach, or in an allocation"
            ) from error
        return str(nothing_is_sent.getsockname()[0])
