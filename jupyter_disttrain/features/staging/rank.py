"""Serve ``%dist_stage`` on this rank, which copies for its node.

Covers: preparing, this node's part while the client's cell waits, progress, interrupts.
Does not cover: the copying (``pipeline``), the client's side (``features.staging.client``).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ...config.data_urls import is_address
from ...protocol.time_limits import STAGING_END_SECONDS
from ...rank.libraries.reserved_ports import own_address
from .links import Links, Place
from .pipeline import PipelineNode
from .store import Store

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from ...protocol.ranks import RankInfo
    from ...protocol.requests import PrepareStaging


class Staging:
    """Copies data sets to this node."""

    def __init__(self) -> None:
        self._node: PipelineNode | None = None
        self._place: Place | None = None
        self._ended_mark = ""

    def get_ready(self, request: PrepareStaging, info: RankInfo, master: str) -> dict[str, Any]:
        """Listen for the node before this one; return its place, and whether this node sees the source."""
        if self._node is not None:  # prepared and never used
            self._node.stop("another copy begins")
            self._node.done.wait(STAGING_END_SECONDS)
        mark = f"{request.mark}-{info.rank}"
        store = Store(request.source, request.to, info.host, mark)
        try:
            links = Links(request.keys, own_address(master))
        except BaseException:  # also an interrupt: the store must not stay open
            store.close()
            raise
        self._place = Place(info.rank, info.host, links.url, mark)
        self._node = PipelineNode(request.source, links, store)
        if request.mark == self._ended_mark:  # the client was interrupted
            self._node.stop("it was ended before")
        # An address is checked only when it is read. os.path: a folder that can't be entered is no error.
        sees = is_address(request.source) or os.path.exists(request.source)  # noqa: PTH110
        return {"place": self._place, "sees": sees}

    def run(self, chain: Sequence[Sequence[Any]], *, verify: bool) -> dict[str, Any]:
        """Copy as one of these nodes, the first of which reads the source; see :meth:`Store.begin` for ``verify``.

        Returns :meth:`PipelineNode.report`, also if another node could not continue; raises the error of this one.
        """
        node, place = self._node, self._place
        assert node is not None
        assert place is not None
        places = [Place(*fields) for fields in chain]
        node.start(places, places.index(place), verify=verify)
        try:
            wait_for_staging(node.done)
        except BaseException:  # mostly an interrupt; it is raised again
            node.stop(f"{place.label} was interrupted")
            node.done.wait(STAGING_END_SECONDS)
            raise
        finally:
            self._node = None
        if node.fault is not None:
            raise node.fault
        return node.report()

    def progress(self) -> dict[str, Any]:
        """Return the progress; called on another thread."""
        node = self._node
        if node is None:
            return {"phase": ""}
        return {"phase": node.phase, "total_bytes": node.total_bytes, "done_bytes": node.done_bytes}

    def release(self, because: str = "another rank has failed", mark: str = "") -> None:
        """End the copy, or the one with this mark, whether it has begun or not; called on another thread."""
        self._ended_mark = mark
        node, place = self._node, self._place
        if node is not None and place is not None and place.mark.startswith(mark):
            node.stop(because)


def wait_for_staging(done: threading.Event) -> None:
    """Wait for the end; an interrupt ends this as if it were the user's code (``rank.interrupts.deferral``)."""
    while not done.wait(1.0):
        pass
