"""Whether the ranks of a job have all left its controller.

Covers: telling that from what the hub knows and from the connections that are there.
Does not cover: what follows from it (``controller``).

Beats alone tell neither who has left nor who is there. Processes that are killed all at once say nothing to the hub,
which counts on them for half a minute; those that a debugger has stopped, or whose network was cut for a while, it has
given up although they go on. The system closes the connections of a process that ends, and keeps those of all others.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

CLOSED_SECONDS = 0.5  # without a connection, once the hub knows of no rank: one that broke is made anew at once
UNHEARD_SECONDS = 5.0  # the same while the hub still counts on ranks
SILENT_SECONDS = 600.0  # without a beat: by then what holds the connections is no rank but what one has forked
_TABLE = Path("/proc/self/net/tcp")
_ESTABLISHED = "01"


class RankWatch:
    """Take in what is seen, and tell once all ranks that were there have left."""

    def __init__(self) -> None:
        self._had_ranks = False
        self._known_s = self._connected_s = 0.0  # when that was so last

    def are_gone(self, *, known: bool, connected: bool, now_s: float) -> bool:
        """Return whether all have left.

        Parameters
        ----------
        known
            Whether the hub knows of a rank.
        connected
            Whether any process of the job is connected.
        now_s
            The time, by a clock that only goes forward.
        """
        self._had_ranks = self._had_ranks or known
        if known:
            self._known_s = now_s
        if connected:
            self._connected_s = now_s
        silent_s, apart_s = now_s - self._known_s, now_s - self._connected_s
        if not self._had_ranks:
            return False
        return silent_s > SILENT_SECONDS or apart_s > (UNHEARD_SECONDS if known else CLOSED_SECONDS)


def has_connection(ports: Collection[int], table: Path = _TABLE) -> bool:
    """Whether anybody is connected to one of these ports of this host."""
    with table.open() as lines:
        next(lines)  # what the columns are
        for line in lines:
            _, local, _, state, *_ = line.split(maxsplit=4)
            if state == _ESTABLISHED and int(local.rpartition(":")[2], 16) in ports:
                return True
    return False
