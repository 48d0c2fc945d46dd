"""Connect a node that copies a data set to the nodes before and after it.

Covers: sockets between nodes, encryption, authentication, detecting that a neighbour has disconnected.
Does not cover: the messages (``pipeline``).

Each node listens for the one before it, on its own address of the cluster's network only, and the connection uses
CurveZMQ: every node makes a key pair for each staging, and the client sends the public keys to the other nodes. A
connection with a key other than that of the node before is refused. A secret key never leaves its process.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from ...protocol.time_limits import LINGER_MS

if TYPE_CHECKING:
    from collections.abc import Sequence

UP, DOWN = "up", "down"  # to the node before, which sends blocks, and to the one after
MESSAGES_AHEAD = 8  # held by one socket: blocks of 1 MiB, so that a slow node costs no memory elsewhere
BEAT_MS, GONE_MS = 3_000, 15_000  # a network outage of some seconds is tolerated
_ZAP = "inproc://zeromq.zap.01"  # where libzmq asks for authentication
_WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One node of the chain, as the others see it."""

    rank: int | None  # None: not a rank, but the notebook's machine, which has the source
    host: str
    url: str  # where it listens; empty for the first node
    key: str  # the public key
    mark: str  # see ``Store.leave_mark``

    @property
    def label(self) -> str:
        """The node's name in messages."""
        return f"the notebook's machine {self.host}" if self.rank is None else f"rank {self.rank} on {self.host}"


class Neighbours:
    """Sockets to the node before and to the one after.

    Parameters
    ----------
    address
        Of this node in the cluster's network; None: it is the first, and does not listen.
    """

    def __init__(self, address: str | None) -> None:
        public, self._secret = zmq.curve_keypair()
        self.key = public.decode()
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)  # before any socket needs it: without it libzmq accepts every connection
        self._allowed = b""
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._monitors: dict[str, zmq.Socket[bytes]] = {}
        self._connections: set[int] = set()  # any connections, until libzmq has refused them
        self._met: set[str] = set()
        self._gone: set[str] = set()
        try:
            self.url = "" if address is None else self._listen(address)
        except BaseException:  # an open context would wait for its sockets when Python garbage-collects it
            self.close()
            raise

    def _listen(self, address: str) -> str:
        """Listen for the node before; return the address."""
        sock = self._sockets[UP] = self._make()
        sock.curve_server = True
        sock.curve_secretkey = self._secret
        sock.zap_domain = b"stage"
        host = f"[{address}]" if ":" in address else address
        sock.ipv6 = ":" in address
        self._monitors[UP] = sock.get_monitor_socket(_WATCHED)
        return f"tcp://{host}:{sock.bind_to_random_port(f'tcp://{host}')}"

    def _make(self) -> zmq.Socket[bytes]:
        sock = self._context.socket(zmq.DEALER)
        sock.linger = LINGER_MS
        sock.sndhwm = sock.rcvhwm = MESSAGES_AHEAD
        sock.heartbeat_ivl, sock.heartbeat_timeout = BEAT_MS, GONE_MS
        return sock

    def join(self, before: Place | None, after: Place | None) -> None:
        """Accept the node before, and connect to the one after; on the thread that uses the sockets from then on."""
        if before is None:
            if UP in self._sockets:
                self._close(UP)
        else:
            self._allowed = before.key.encode()
        if after is not None:
            sock = self._sockets[DOWN] = self._make()
            sock.curve_publickey, sock.curve_secretkey = self.key.encode(), self._secret
            sock.curve_serverkey = after.key.encode()
            sock.ipv6 = "[" in after.url
            self._monitors[DOWN] = sock.get_monitor_socket(_WATCHED)
            sock.connect(after.url)

    def __contains__(self, side: str) -> bool:
        """Whether there is a node on that side."""
        return side in self._sockets

    def send(self, side: str, head: dict[str, Any], parts: Sequence[Any] = ()) -> bool:
        """Send a message, unless the node there has not taken the earlier ones yet; returns whether it was sent."""
        try:
            self._sockets[side].send_multipart([json.dumps(head).encode(), *parts], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def receive(self, side: str) -> tuple[dict[str, Any], list[zmq.Frame]] | None:
        """Return the next message from a side; None if there is none now."""
        try:
            head, *parts = self._sockets[side].recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return json.loads(head.bytes), parts

    def wait(self, seconds: float, reads: Sequence[str], writes: Sequence[str] = ()) -> None:
        """Wait until something can be received or sent, or a neighbour connects or disconnects."""
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        for monitor in self._monitors.values():
            poller.register(monitor, zmq.POLLIN)
        for side, sock in self._sockets.items():
            flags = (zmq.POLLIN if side in reads else 0) | (zmq.POLLOUT if side in writes else 0)
            if flags:
                poller.register(sock, flags)
        found = dict(poller.poll(round(seconds * 1000)))
        if self._zap in found:
            self._answer()
        for side, monitor in self._monitors.items():
            if monitor in found:
                self._take_event(side, monitor)

    def is_gone(self, side: str) -> bool:
        """Whether the connection to a node that was there has ended."""
        return side in self._gone

    def _answer(self) -> None:
        """Accept a connection with the key of the node before, and refuse others."""
        version, request, _domain, _address, _identity, _mechanism, *credentials = self._zap.recv_multipart()
        is_known = bool(credentials) and z85.encode(credentials[0]) == self._allowed
        status, text = (b"200", b"OK") if is_known else (b"400", b"another key")
        self._zap.send_multipart([version, request, status, text, b"", b""])

    def _take_event(self, side: str, monitor: zmq.Socket[bytes]) -> None:
        message = recv_monitor_message(monitor)
        event, value = message["event"], int(message["value"])
        if event == zmq.EVENT_ACCEPTED:
            self._connections.add(value)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._met.add(side)
        elif event == zmq.EVENT_DISCONNECTED:
            self._connections.discard(value)
            if side in self._met and not (side == UP and self._connections):
                self._gone.add(side)

    def _close(self, side: str) -> None:
        sock = self._sockets.pop(side)
        sock.disable_monitor()
        self._monitors.pop(side).close()
        sock.close()

    def close(self) -> None:
        """Send pending messages and close everything; on the thread that uses the sockets, or if none does."""
        if self._context.closed:
            return
        for side in list(self._sockets):
            self._close(side)
        self._zap.close()
        self._context.term()
