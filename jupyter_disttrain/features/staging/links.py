"""Connect a node that copies a data set to the nodes before and after it.

Covers: sockets between nodes, encryption, authentication, the state of the connection to the node after.
Does not cover: the messages (``pipeline``).

Each node listens for the one before it, on its own address of the cluster's network only. The connection uses CurveZMQ
with a key pair of this one copy, which the client makes and sends to the nodes over the cluster's channels. A
connection with another key is refused.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from ...protocol.time_limits import LINGER_MS, PIPELINE_POLL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

MESSAGES_AHEAD = 8  # held by one socket: blocks of 1 MiB, so that a slow node costs no memory elsewhere
BEAT_MS, GONE_MS = 3_000, 15_000  # a network outage of some seconds is tolerated
_DOMAIN = "stage"  # of the authentication; libzmq asks for it only where a socket has one


class Place(NamedTuple):
    """One node of the chain, as the others see it."""

    rank: int | None  # None: not a rank, but the notebook's machine, which has the source
    host: str
    url: str  # where it listens
    mark: str  # see ``Store.sees_mark``; empty: it writes no files

    @property
    def label(self) -> str:
        """The node's name in messages."""
        return f"the notebook's machine {self.host}" if self.rank is None else f"rank {self.rank} on {self.host}"


class Links:
    """Sockets to the node before (:attr:`up`) and to the one after (:attr:`down`).

    ``keys`` are the public and the secret key of this copy; without an ``address`` of its own the node does not listen.
    """

    def __init__(self, keys: Sequence[str], address: str | None) -> None:
        self._public, self._secret = (key.encode() for key in keys)
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._monitor: zmq.Socket[bytes] | None = None
        self.up: zmq.Socket[bytes] | None = None
        self.down: zmq.Socket[bytes] | None = None
        self.url = ""
        self.is_reached = False  # the node after
        self.cut_at: float | None = None  # when the connection to it ended
        try:
            if address is not None:
                self._listen(address)
        except BaseException:  # an open context would wait for its sockets when Python garbage-collects it
            self.close()
            raise

    def _listen(self, address: str) -> None:
        self._authenticator.start()  # before any socket needs it: without it libzmq accepts every connection
        self._authenticator.configure_curve_callback(_DOMAIN, self)
        self.up = self._socket()
        self.up.curve_server = True
        self.up.zap_domain = _DOMAIN.encode()
        self.up.ipv6 = ":" in address
        host = f"[{address}]" if ":" in address else address
        self.url = f"tcp://{host}:{self.up.bind_to_random_port(f'tcp://{host}')}"

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether a connection may use this key; called by the authenticator."""
        return key == self._public

    def _socket(self) -> zmq.Socket[bytes]:
        sock = self._context.socket(zmq.DEALER)
        sock.linger = LINGER_MS
        sock.sndhwm = sock.rcvhwm = MESSAGES_AHEAD
        sock.sndtimeo = sock.rcvtimeo = round(PIPELINE_POLL_SECONDS * 1000)
        sock.heartbeat_ivl, sock.heartbeat_timeout = BEAT_MS, GONE_MS
        sock.curve_publickey, sock.curve_secretkey = self._public, self._secret
        return sock

    def connect(self, url: str) -> None:
        """Connect to the node after; on the thread that uses the sockets from then on."""
        self.down = self._socket()
        self.down.curve_serverkey = self._public
        self.down.ipv6 = "[" in url
        self._monitor = self.down.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.down.connect(url)

    def update(self) -> None:
        """Update :attr:`is_reached` and :attr:`cut_at`; on the thread that uses the sockets."""
        while self._monitor is not None and self._monitor.poll(0):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_reached = True
            elif self.is_reached and self.cut_at is None:
                self.cut_at = time.monotonic()

    def close(self) -> None:
        """Send pending messages and close everything; on the thread that uses the sockets, or if none does."""
        if self.down is not None:
            self.down.disable_monitor()
        for sock in (self._monitor, self.down, self.up):
            if sock is not None:
                sock.close()
        self._authenticator.stop()
        self._context.term()
