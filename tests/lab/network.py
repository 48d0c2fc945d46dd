"""The network of the lab: capture its traffic, and drop packets.

Covers: a capture of all packets between the hosts and the head, closing TCP ports.
Does not cover: cutting a cable (``lab``).
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .places import LabError, command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

# Constants of linux/if_packet.h that Python's socket module does not define.
SOL_PACKET = 263
PACKET_ADD_MEMBERSHIP = 1
PACKET_STATISTICS = 6
PACKET_MR_PROMISC = 1
SO_RCVBUFFORCE = 33
ETH_P_ALL = 3
ETH_P_IP = b"\x08\x00"
BUFFER_BYTES = 128 << 20


@dataclass
class Capture:
    """All packets that cross a bridge while the ``with`` block runs."""

    interface: str
    packets: list[bytes] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
        self._socket.bind((self.interface, ETH_P_ALL))
        # Only then does the bridge show the traffic between hosts.
        request = struct.pack("iHH8s", socket.if_nametoindex(self.interface), PACKET_MR_PROMISC, 0, b"")
        self._socket.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, request)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._read, name="lab-capture", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        dropped = struct.unpack("II", self._socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))[1]
        self._socket.close()
        if dropped:
            raise LabError(f"the capture on {self.interface} has lost {dropped} packets, so it proves nothing")

    @property
    def data(self) -> bytes:
        """Every packet with its headers, concatenated."""
        return b"".join(self.packets)

    def streams(self) -> dict[tuple[str, int, str, int], bytes]:
        """Return the bytes of each TCP connection, by source, its port, destination and its port."""
        parts: dict[tuple[str, int, str, int], dict[int, bytes]] = defaultdict(dict)
        for packet in self.packets:
            if packet[12:14] != ETH_P_IP or packet[23] != socket.IPPROTO_TCP:
                continue
            at = 14 + (packet[14] & 15) * 4
            ends_at = 14 + int.from_bytes(packet[16:18], "big")
            source, target, number = struct.unpack_from("!HHI", packet, at)
            payload = packet[at + (packet[at + 12] >> 4) * 4 : ends_at]
            if payload:
                key = (socket.inet_ntoa(packet[26:30]), source, socket.inet_ntoa(packet[30:34]), target)
                parts[key].setdefault(number, payload)
        return {key: b"".join(text for _, text in sorted(by_number.items())) for key, by_number in parts.items()}

    def _read(self) -> None:
        self._socket.settimeout(0.05)
        while True:
            try:
                self.packets.append(self._socket.recv(1 << 17))
            except TimeoutError:
                if self._ends.is_set():
                    return


def close_ports(table: str, ports: Sequence[int | str], *, prefix: Sequence[str] = (), interface: str = "") -> None:
    """Drop every packet for one of the TCP ports (``8888``, ``"29500-29600"``), without a reply; no ports: none.

    ``table`` of the packet filter is replaced, on the host that ``prefix`` enters; only packets that arrive at
    ``interface``, if one is named.
    """
    incoming = f'iifname "{interface}" ' if interface else ""
    _filter(table, f"{incoming}tcp dport {{ {', '.join(map(str, ports))} }}" if ports else "", prefix)


def refuse_beginnings(table: str, source: str, but: int, prefix: Sequence[str]) -> None:
    """Drop new TCP connections from an address, except to one port; existing ones continue."""
    _filter(table, f"ip saddr {source} tcp flags & (syn | ack) == syn tcp dport != {but}", prefix)


def _filter(table: str, rule: str, prefix: Sequence[str]) -> None:
    """Drop incoming packets that match a rule; an empty one: none."""
    command(*prefix, "nft", "add", "table", "inet", table)
    command(*prefix, "nft", "delete", "table", "inet", table)
    if rule:
        hook = "type filter hook input priority 0; policy accept;"
        command(*prefix, "nft", f"table inet {table} {{\nchain input {{ {hook}\n{rule} drop\n}}\n}}")
