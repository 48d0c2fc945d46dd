"""Where other frameworks' servers on this rank can be reached.

Covers: an address and a port that stay this rank's own.
Does not cover: the process group's store (``process_group``), who learns of it (``framework_variables``).

TensorFlow and JAX want to know ports before anybody listens on them, and use them minutes or days later. A port that
was free once may be another's by then. So it stays bound by a socket that does not listen: the system gives it to
nobody who asks for any port, and to everybody who asks for this one with SO_REUSEADDR, as servers do.
"""

from __future__ import annotations

import socket

DISCARD = 9  # any port: nothing is sent


def own_address(master: str) -> str:
    """Return the address of this host that the other ranks reach: the one from which it reaches rank 0's host."""
    family, *_, where = socket.getaddrinfo(master, DISCARD, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where[:2])
        return str(probe.getsockname()[0])


class MeetingPlace:
    """A port on this host, at the address by which the other ranks reach it.

    Parameters
    ----------
    master
        The address of rank 0's host: the way there tells which of this host's addresses others see.
    """

    def __init__(self, master: str) -> None:
        self.address = own_address(master)
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self._held = socket.socket(family, socket.SOCK_STREAM)
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind((self.address, 0))
        host = f"[{self.address}]" if family == socket.AF_INET6 else self.address
        self.name = f"{host}:{self._held.getsockname()[1]}"
