"""Detect that the cluster's controller has exited or cannot be reached.

Covers: the controller's exit, reported by ZeroMQ or found by a check; a network that is down, briefly or permanently.
Does not cover: the reaction to it (``nanny``), whether the client reaches this host
(``launchers.hosts.host_watch``).

On the notebook's host the controller's Unix socket reports its exit at once. Over a network a silent connection may
still work. So a separate socket, the probe, sends heartbeats and reconnects as soon as they fail, while all other
sockets wait for TCP to deliver what they have sent.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import recv_monitor_message

from ...protocol.time_limits import (
    CLUSTER_WATCH_GRACE_SECONDS,
    CLUSTER_WATCH_POLL_SECONDS,
    CUT_SECONDS,
    EARLY_POLL_SECONDS,
)

if TYPE_CHECKING:
    from ..startup.connection import Connection

EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
BEAT_MS, MISSED_MS = 500, 1500  # the probe's heartbeat interval and timeout
CONNECT_MS, RECONNECT_MS = 150, 20


def open_probe(connection: Connection, context: zmq.Context[zmq.Socket[bytes]], name: str) -> zmq.Socket[bytes] | None:
    """Open a socket that soon detects that the network is down or up again; None if no network is used."""
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
        self._grace_s = CUT_SECONDS if connection.over_network else CLUSTER_WATCH_GRACE_SECONDS
        self.monitor = sock.get_monitor_socket(EVENTS)
        self._orphan_at: float | None = None
        self._next_check = 0.0
        self.is_gone = False

    def read_event(self) -> None:
        """Read one event of ZeroMQ's monitor."""
        event = recv_monitor_message(self.monitor)["event"]
        if event != zmq.EVENT_DISCONNECTED:
            self._orphan_at = None
        elif self._orphan_at is None:
            self._orphan_at = time.monotonic() + self._grace_s

    @property
    def is_connected(self) -> bool:
        """Whether the controller is connected, as far as ZeroMQ has reported."""
        return not self.is_gone and self._orphan_at is None

    @property
    def next_check(self) -> float:
        """When to call :meth:`check`."""
        return self._next_check if self._orphan_at is None else min(self._orphan_at, self._next_check)

    def check(self, *, once_reached: bool) -> bool:
        """Check the controller if a check is due; return True if this call found that it has ended."""
        now = time.monotonic()
        is_due = now >= self._next_check
        if is_due:
            self._next_check = now + (CLUSTER_WATCH_POLL_SECONDS if once_reached else EARLY_POLL_SECONDS)
        is_orphan = self._orphan_at is not None and now >= self._orphan_at
        if not is_orphan and not (is_due and not self.is_there(once_reached=once_reached)):
            return False
        self._orphan_at, self.is_gone = None, True
        return True

    def is_there(self, *, once_reached: bool) -> bool:
        """Check now whether the controller runs."""
        return self._connection.is_there(once_reached=once_reached, is_silent=self._orphan_at is not None)
