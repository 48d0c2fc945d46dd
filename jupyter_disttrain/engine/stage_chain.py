"""The nodes that copy a data set, as one of them sees them: the one before it and the one after it.

Covers: sockets between nodes, encryption, who may connect, noticing that a neighbour is gone.
Does not cover: what is said (``stage_relay``).

Each node listens for the one before it, on its own address of the cluster's network only, and the connection is
CurveZMQ's: every node makes a key pair for each staging, whose public half goes to the others through the client. Who
connects with another key than that of the node before is refused. A secret key never leaves its process.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

if TYPE_CHECKING:
    from collections.abc import Sequence

UP, DOWN = "up", "down"  # to the node before, from which blocks come, and to the one after
MESSAGES_AHEAD = 8  # that one socket holds: blocks of 1 MiB, so that a node which is slow costs no memory elsewhere
BEAT_MS, GONE_MS = 3_000, 15_000  # a network that is cut for some seconds is borne
LINGER_MS = 1_000  # for the last words
_ZAP = "inproc://zeromq.zap.01"  # where libzmq asks who may connect
_WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One node of the chain, as it tells the others of itself."""

    rank: int | None  # None: no rank, but the machine of the notebook, which has the source
    host: str
    url: str  # where it listens; empty where it is the first
    key: str  # the public one
    mark: str  # see ``Store.leave_mark``

    @property
    def label(self) -> str:
        """Who it is, for what is said."""
        return f"the notebook's machine {self.host}" if self.rank is None else f"rank {self.rank} on {self.host}"


class Neighbours:
    """Sockets to the node before and to the one after.

    Parameters
    ----------
    address
        Of this node in the cluster's network; None: it is the first, and listens to nobody.
    """

    def __init__(self, address: str | None) -> None:
        public, self._secret = zmq.curve_keypair()
        self.key = public.decode()
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)  # before any socket asks: without it libzmq lets everybody in
        self._allowed = b""
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._monitors: dict[str, zmq.Socket[bytes]] = {}
        self._connections: set[int] = set()  # from whomever, until libzmq has found out that they may not
        self._met: set[str] = set()
        self._gone: set[str] = set()
        try:
            self.url = "" if address is None else self._listen(address)
        except BaseException:  # a context that is left open waits for its sockets when Python clears it away
            self.close()
            raise

    def _listen(self, address: str) -> str:
        """Listen for the node before; return where."""
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
        """Let the node before in, and connect to the one after; on the thread that uses the sockets from then on."""
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
        """Wait until something can be received or sent, or a neighbour comes or goes."""
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
        """Let in who has the key of the node before."""
        version, request, _domain, _address, _identity, _mechanism, *credentials = self._zap.recv_multipart()
        is_known = bool(credentials) and z85.encode(credentials[0]) == self._allowed
        status, words = (b"200", b"OK") if is_known else (b"400", b"another key")
        self._zap.send_multipart([version, request, status, words, b"", b""])

    def _take_event(self, side: str, monitor: zmq.Socket[bytes]) -> None:
        told = recv_monitor_message(monitor)
        event, value = told["event"], int(told["value"])
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
        """Say the last words and close everything; on the thread that uses the sockets, or if none does."""
        if self._context.closed:
            return
        for side in list(self._sockets):
            self._close(side)
        self._zap.close()
        self._context.term()
