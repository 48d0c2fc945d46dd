"""Follow this user's clusters on this host.

Covers: finding running clusters, following each, closing those that have ended.
Does not cover: one cluster (``live_cluster``), HTTP (``handlers``).
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from ..client.registry import cluster_file
from ..client.registry.cluster_file import starting, unreadable
from ..errors import UsageError
from ..protocol.time_limits import CLUSTERS_POLL_SECONDS
from .live_cluster import LiveCluster

if TYPE_CHECKING:
    from logging import Logger


class Clusters:
    """All running clusters, each followed from the time it is found.

    Every method may wait for a rank or its nanny, so they are called on threads, never on the server's event loop.
    """

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._turn = threading.Lock()  # held by the thread that updates the clusters
        self._live: dict[str, LiveCluster] = {}  # replaced as a whole, never changed
        self._refreshed_at = 0.0
        self._starting: frozenset[str] = frozenset()  # ids of clusters that were starting at the last check

    def running(self) -> list[LiveCluster]:
        """Return the running clusters, oldest first; refreshes the list at intervals, on one thread at a time."""
        has_ended = any(live.ended for live in self._live.values())
        is_due = has_ended or time.monotonic() - self._refreshed_at >= CLUSTERS_POLL_SECONDS
        if is_due and self._turn.acquire(blocking=False):
            try:
                self._refresh()
                self._refreshed_at = time.monotonic()
            finally:
                self._turn.release()
        return list(self._live.values())

    def _refresh(self) -> None:
        before, live = dict(self._live), {}
        for found in cluster_file.running():
            known = before.get(found.cluster_id)
            if known is not None and not known.ended:
                known.refresh(found)
                live[found.cluster_id] = before.pop(found.cluster_id)
                continue
            try:
                live[found.cluster_id] = LiveCluster(found, self._log)
            except Exception as error:  # noqa: BLE001  (one cluster that can't be followed must not hide the others)
                self._log.warning("jupyter_disttrain: %s can't be followed: %s", found.cluster_id, error)
        for ended in before.values():
            ended.close()
        self._live = live

    def find(self, cluster_id: str) -> LiveCluster:
        """Return one cluster; raise UsageError if it is not running."""
        for live in self.running():
            if live.file.cluster_id == cluster_id:
                return live
        raise UsageError(f"no cluster {cluster_id!r} is running on this host; it may have just ended")

    def starting(self) -> list[dict[str, str]]:
        """Return the clusters that are starting; once one has started, :meth:`running` does not wait for its pause."""
        found = starting()
        ids = frozenset(each.cluster_id for each in found)
        if self._starting - ids:
            self._refreshed_at = 0.0
        self._starting = ids
        return [
            {"id": each.cluster_id, "name": each.name, "notebook": each.notebook, "text": each.text} for each in found
        ]

    def changes(self) -> dict[str, int]:
        """Return by cluster how often it changed in ways that are published sooner than its figures."""
        return {live.file.cluster_id: live.telemetry.changes for live in self._live.values()}

    def snapshot(self) -> dict[str, Any]:
        """Return as JSON all clusters, those that are starting, and those that another version has started."""
        found = self.starting()
        return {
            "clusters": [live.snapshot() for live in self.running()],
            "starting": found,
            "unreadable": unreadable(),
        }

    def close(self) -> None:
        """Close all of them."""
        with self._turn:
            for live in self._live.values():
                live.close()
            self._live = {}
