"""The clusters of this user on this host, as the server follows them.

Covers: finding those that run, following each, leaving those that have ended.
Does not cover: one cluster (``live``), HTTP (``handlers``).
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from ..cluster import registry
from ..cluster.registry import starting, unreadable
from ..errors import UsageError
from .live import LiveCluster

if TYPE_CHECKING:
    from logging import Logger

LOOK_SECONDS = 1.0  # between two looks for clusters that have started or ended


class Clusters:
    """Every cluster that runs, each followed from the first look on.

    Everything here may wait for a rank's nanny, so it is called on threads, never on the server's loop.
    """

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._turn = threading.Lock()  # of the thread that looks
        self._live: dict[str, LiveCluster] = {}  # replaced as a whole
        self._looked = 0.0
        self._starting: frozenset[str] = frozenset()  # ids

    def look(self) -> list[LiveCluster]:
        """Return the clusters that run, the oldest first; looks again only after a while, one thread at a time."""
        is_due = time.monotonic() - self._looked >= LOOK_SECONDS or any(live.ended for live in self._live.values())
        if is_due and self._turn.acquire(blocking=False):
            try:
                self._look()
                self._looked = time.monotonic()
            finally:
                self._turn.release()
        return list(self._live.values())

    def _look(self) -> None:
        there = {found.cluster_id: found for found in registry.running()}
        live = dict(self._live)
        for cluster_id, each in list(live.items()):
            if each.ended or cluster_id not in there:
                live.pop(cluster_id).close()
            else:
                each.refresh(there[cluster_id])
        for cluster_id, found in there.items():
            if cluster_id in live:
                continue
            try:
                live[cluster_id] = LiveCluster(found)
            except Exception as error:  # noqa: BLE001  (one cluster that can't be followed must not hide the others)
                self._log.warning("jupyter_disttrain: %s can't be followed: %s", cluster_id, error)
        self._live = live

    def find(self, cluster_id: str) -> LiveCluster:
        """Return one cluster.

        Raises
        ------
        UsageError
            If it does not run.
        """
        for live in self.look():
            if live.there.cluster_id == cluster_id:
                return live
        raise UsageError(f"no cluster {cluster_id!r} runs here; it may have ended a moment ago")

    def starting(self) -> list[dict[str, str]]:
        """Return what is known of clusters that are starting; one that has started is looked for at once."""
        found = starting()
        ids = frozenset(each.cluster_id for each in found)
        if self._starting - ids:
            self._looked = 0.0
        self._starting = ids
        return [
            {"id": each.cluster_id, "name": each.name, "notebook": each.notebook, "text": each.text} for each in found
        ]

    def snapshot(self) -> dict[str, Any]:
        """Return all clusters as JSON, those that are starting, and those that another version has started."""
        found = self.starting()
        return {
            "clusters": [live.snapshot() for live in self.look()],
            "starting": found,
            "unreadable": unreadable(),
        }

    def close(self) -> None:
        """Leave all of them."""
        with self._turn:
            for live in self._live.values():
                live.close()
            self._live = {}
