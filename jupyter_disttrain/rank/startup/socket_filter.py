"""Restrict listening sockets to connections from the cluster's hosts.

Covers: sockets that a library opens on all interfaces although it uses only one: the loopback interface, or that of the
hosts' network.
Does not cover: when to restrict them (``app``).

Open MPI's TCP layer can be configured to use one interface and still listens on all of them. A socket filter, which
needs no privileges, makes the kernel drop packets from elsewhere.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SO_ATTACH_FILTER = 26
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF: offsets from there on count from the IP header
_SOURCE = 12  # offset of the source address in an IPv4 header
_ACCEPT = 0xFFFFFFFF
# Classic BPF: (operation, jump if true, jump if false, value); see Linux's Documentation/networking/filter.rst.
_LOOPBACK = ipaddress.IPv4Network("127.0.0.0/8")
_NOTHING = [(0x06, 0, 0, 0)]


def _only_from(networks: Sequence[ipaddress.IPv4Network]) -> list[tuple[int, int, int, int]]:
    """Return a filter that accepts packets from these networks only."""
    program = []
    for network in networks:
        program += [
            (0x20, 0, 0, _NETWORK_HEADER + _SOURCE),  # load the source address
            (0x54, 0, 0, int(network.netmask)),  # apply the netmask
            (0x15, 0, 1, int(network.network_address)),  # compare with the network
            (0x06, 0, 0, _ACCEPT),
        ]
    return [*program, *_NOTHING]


def hide_listeners(network: str | None = None) -> list[int]:
    """Restrict this process's TCP sockets that listen on all interfaces to some source addresses; return their ports.

    ``network`` is that of the cluster's hosts, e.g. ``"10.1.0.0/16"``, accepted in addition to 127.0.0.0/8; None
    accepts 127.0.0.0/8 only.
    """
    accepted = [_LOOPBACK]
    hosts = ipaddress.ip_network(network) if network else None
    if isinstance(hosts, ipaddress.IPv4Network):
        accepted.append(hosts)
    ports = []
    for descriptor in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            listener = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue  # closed meanwhile
        with listener:
            if _listens_to_all(listener):
                _attach(listener, _only_from(accepted) if listener.family == socket.AF_INET else _NOTHING)
                ports.append(listener.getsockname()[1])
    return ports


def is_held_to(network: str, environment: Mapping[str, str]) -> bool:
    """Whether Open MPI's variables restrict it to this network; its other layers may need what a filter drops."""
    talks_over = environment.get("OMPI_MCA_pml"), environment.get("OMPI_MCA_btl_tcp_if_include")
    return talks_over == ("ob1", network)


def _listens_to_all(sock: socket.socket) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return bool(listens) and sock.getsockname()[0] in ("0.0.0.0", "::")  # noqa: S104


def _attach(sock: socket.socket, program: list[tuple[int, int, int, int]]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(code)))
