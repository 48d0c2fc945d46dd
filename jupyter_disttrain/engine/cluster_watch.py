"""Whether the cluster that a rank belongs to is still there.

Covers: the controller's end, told by ZeroMQ or seen by looking; a network that is cut for a while or for good.
Does not cover: what follows from it (``nanny``), whether the client reaches this host (``cluster.host_watch``).

On the notebook's host the controller's Unix socket tells at once. Over a network a connection that is silent may be
whole: so a socket of its own, the probe, sends heartbeats and is connected anew as soon as they fail, while all the
others wait for TCP to deliver what they have sent.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import recv_monitor_message

if TYPE_CHECKING:
    from .connection import Connection

EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
LOOK_SECONDS = 2.0  # between two looks whether the cluster is still there: ZeroMQ has been seen not to tell
EARLY_LOOK_SECONDS = 0.5  # the same while ranks start: a start that is given up only removes a file
GRACE_SECONDS = 2.0  # without a controller, before the rank is ended
CUT_SECONDS = 30.0  # the same over a network, which may come back
BEAT_MS, MISSED_MS = 500, 1500  # of the probe
CONNECT_MS, RECONNECT_MS = 150, 20


def open_probe(connection: Connection, context: zmq.Context[zmq.Socket[bytes]], name: str) -> zmq.Socket[bytes] | None:
    """Open a socket that notices soon that the network is cut, and that it is back; None where there is no network."""
    if not connection.over_network:
        return None
    sock = context.socket(zmq.ROUTER)
    return connection.connect(
        sock,
        "control",
        IDENTITY=f"probe-{name}-{uuid.uuid4().hex[:6]}".encode(),
        LINGER=0,
        HEARTBEAT_IVL=BEAT_MS,
        HEARTBEAT_TIMEOUT=MISSED_MS,
        CONNECT_TIMEOUT=CONNECT_MS,
        RECONNECT_IVL=RECONNECT_MS,
        RECONNECT_IVL_MAX=0,
    )


class ClusterWatch:
    """Watch the controller through one socket that is connected to it."""

    def __init__(self, connection: Connection, sock: zmq.Socket[bytes]) -> None:
        self._connection = connection
        self._grace_s = CUT_SECONDS if connection.over_network else GRACE_SECONDS
        self.monitor = sock.get_monitor_socket(EVENTS)
        self._orphan_at: float | None = None
        self._next_look = 0.0
        self.is_gone = False

    def hear(self) -> None:
        """Take what ZeroMQ tells."""
        event = recv_monitor_message(self.monitor)["event"]
        if event != zmq.EVENT_DISCONNECTED:
            self._orphan_at = None
        elif self._orphan_at is None:
            self._orphan_at = time.monotonic() + self._grace_s

    @property
    def hears(self) -> bool:
        """Whether somebody is there to hear what is sent, as far as was told."""
        return not self.is_gone and self._orphan_at is None

    @property
    def next_look(self) -> float:
        """When to call :meth:`look`."""
        return self._next_look if self._orphan_at is None else min(self._orphan_at, self._next_look)

    def look(self, *, once_reached: bool) -> bool:
        """Return whether it was found now that the controller is gone."""
        now = time.monotonic()
        is_due = now >= self._next_look
        if is_due:
            self._next_look = now + (LOOK_SECONDS if once_reached else EARLY_LOOK_SECONDS)
        is_orphan = self._orphan_at is not None and now >= self._orphan_at
        if not is_orphan and not (is_due and not self.is_there(once_reached=once_reached)):
            return False
        self._orphan_at, self.is_gone = None, True
        return True

    def is_there(self, *, once_reached: bool) -> bool:
        """Look, whenever that was done last."""
        return self._connection.is_there(once_reached=once_reached, is_silent=self._orphan_at is not None)
