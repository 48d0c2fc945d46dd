"""Sockets that hear the loopback interface alone.

Covers: those that a library has opened on all interfaces although it talks over the loopback interface only.

Open MPI's TCP layer can be told which interface to talk over, and listens on all the same. A socket's filter, which
needs no rights, has the kernel drop what comes from elsewhere.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from pathlib import Path

_SO_ATTACH_FILTER = 26
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF: offsets from there on count from the IP header
_SOURCE = 12  # of the address in an IPv4 header
_ACCEPT = 0xFFFFFFFF
# Classic BPF: (operation, jump if true, jump if false, value); see Linux's Documentation/networking/filter.rst.
_FROM_LOOPBACK = [
    (0x20, 0, 0, _NETWORK_HEADER + _SOURCE),  # load the source's address
    (0x54, 0, 0, 0xFF000000),  # and the network of it
    (0x15, 0, 1, 0x7F000000),  # is that 127.0.0.0/8?
    (0x06, 0, 0, _ACCEPT),
    (0x06, 0, 0, 0),
]
_NOTHING = [(0x06, 0, 0, 0)]


def hide_listeners() -> list[int]:
    """Have TCP sockets of this process that listen on all interfaces hear 127.0.0.0/8 alone; returns their ports."""
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
                _attach(listener, _FROM_LOOPBACK if listener.family == socket.AF_INET else _NOTHING)
                ports.append(listener.getsockname()[1])
    return ports


def _listens_to_all(sock: socket.socket) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return bool(listens) and sock.getsockname()[0] in ("0.0.0.0", "::")  # noqa: S104


def _attach(sock: socket.socket, program: list[tuple[int, int, int, int]]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(code)))
