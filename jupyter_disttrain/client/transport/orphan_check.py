"""Detect that all ranks of a job have left its controller.

Covers: deciding that from the hub's records and from open connections.
Does not cover: what follows from it (``controller``).

Heartbeats alone do not show which ranks have left. Processes that are killed all at once do not deregister, and the hub
still lists them for half a minute; the hub drops processes that a debugger has stopped, or whose network was down for a
while, although they still run. The system closes the connections of a process that ends, and keeps those of all others.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...protocol.time_limits import CLOSED_SECONDS, ORPHANED_SECONDS, UNANSWERED_SECONDS

if TYPE_CHECKING:
    from collections.abc import Collection

_TABLE = Path("/proc/self/net/tcp")
_ESTABLISHED = "01"


class OrphanCheck:
    """Decide from repeated observations when all ranks that were present have left."""

    def __init__(self) -> None:
        self._had_ranks = False
        self._known_s = self._connected_s = 0.0  # times of the last positive observation

    def note_end(self, now_s: float) -> None:
        """Note that a rank has ended, which may not have registered; see :meth:`are_gone` for ``now_s``."""
        self._had_ranks = True
        self._known_s = self._connected_s = now_s

    def are_gone(self, *, known: bool, connected: bool, now_s: float) -> bool:
        """Return whether all ranks have left.

        Parameters
        ----------
        known
            Whether the hub has a rank registered.
        connected
            Whether any process of the job is connected.
        now_s
            The time of a monotonic clock, in seconds.
        """
        self._had_ranks = self._had_ranks or known
        if known:
            self._known_s = now_s
        if connected:
            self._connected_s = now_s
        silent_s, apart_s = now_s - self._known_s, now_s - self._connected_s
        if not self._had_ranks:
            return False
        return silent_s > ORPHANED_SECONDS or apart_s > (UNANSWERED_SECONDS if known else CLOSED_SECONDS)


def has_connection(ports: Collection[int], table: Path = _TABLE) -> bool:
    """Whether any process is connected to one of these ports of this host."""
    with table.open() as lines:
        next(lines)  # the column headers
        for line in lines:
            _, local, _, state, *_ = line.split(maxsplit=4)
            if state == _ESTABLISHED and int(local.rpartition(":")[2], 16) in ports:
                return True
    return False
