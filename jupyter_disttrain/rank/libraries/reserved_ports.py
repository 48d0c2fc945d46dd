"""Reserve a port on this rank for servers of other frameworks.

Covers: an address and a port that stay reserved for this rank.
Does not cover: the process group's store (``rank.process_group.group``), publishing the port (``config.frameworks``).

TensorFlow and JAX need to know ports before they listen on them, and use them minutes or days later. By then another
process may have taken a port that was free. So a socket that does not listen keeps it bound: the system does not assign
it to processes that request any free port, but allows binding this port explicitly with SO_REUSEADDR, as servers do.
"""

from __future__ import annotations

import socket

DISCARD = 9  # any port: nothing is sent


def own_address(master: str) -> str:
    """Return this host's address for the other ranks, which is its source address towards rank 0's host."""
    family, *_, where = socket.getaddrinfo(master, DISCARD, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where[:2])
        return str(probe.getsockname()[0])


class ReservedPort:
    """A reserved port on this host, at the address at which the other ranks reach it.

    The route to ``master``, the address of rank 0's host, determines this host's address.
    """

    def __init__(self, master: str) -> None:
        self.address = own_address(master)
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self._held = socket.socket(family, socket.SOCK_STREAM)
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind((self.address, 0))
        self.port: int = self._held.getsockname()[1]
        self.name = f"[{self.address}]:{self.port}" if family == socket.AF_INET6 else f"{self.address}:{self.port}"
