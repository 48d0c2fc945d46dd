"""Serve ``%dist_stage`` on this rank, which copies for its node.

Covers: preparing, this node's part while the client's cell waits, progress, interrupts.
Does not cover: the copying (``pipeline``), the client's side (``features.staging.client``).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from ...protocol.time_limits import STAGING_END_SECONDS
from ...rank.libraries.reserved_ports import own_address
from .peers import Neighbours, Place
from .pipeline import PipelineNode
from .source import is_seen
from .store import Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...protocol.ranks import RankInfo


class Staging:
    """Copies data sets to this node."""

    def __init__(self) -> None:
        self._neighbours: Neighbours | None = None
        self._store: Store | None = None
        self._node: PipelineNode | None = None
        self._mark = self._source = ""

    def get_ready(self, source: str, to: str | None, mark: str, info: RankInfo, master: str) -> dict[str, Any]:
        """Listen for the node before this one, and return the address.

        Parameters
        ----------
        source
            A path, or an address.
        to
            See :class:`Store`.
        mark
            Unique name of this staging on this node.
        info
            The rank's identity.
        master
            The address of rank 0's host.

        Returns
        -------
        dict
            ``"place"``: see :class:`Place`; ``"sees"``: whether the source's path exists.

        Raises
        ------
        StageError
            If the folder can't be made.
        """
        self.let_go()
        self._mark, self._source = mark, source
        self._store = Store(source, to, info.host)
        self._store.leave_mark(mark)
        self._neighbours = Neighbours(own_address(master))
        place = {"url": self._neighbours.url, "key": self._neighbours.key, "mark": mark}
        return {"place": place | {"rank": info.rank, "host": info.host}, "sees": is_seen(source)}

    def run(self, chain: Sequence[dict[str, Any]], *, verify: bool) -> dict[str, Any]:
        """Copy; returns what was done: see :meth:`PipelineNode.report`.

        Parameters
        ----------
        chain
            All nodes that copy, in their order: the first one reads the source.
        verify
            See :meth:`Store.begin`.

        Raises
        ------
        StageError
            If this node can't continue; if another one can't, the return value includes it.
        """
        assert self._neighbours is not None
        assert self._store is not None
        places = [Place(**place) for place in chain]
        at = next(number for number, place in enumerate(places) if place.mark == self._mark)
        node = self._node = PipelineNode(self._source, places, at, self._neighbours, self._store, verify=verify)
        self._neighbours, self._store = None, None
        done = threading.Event()
        thread = threading.Thread(target=_run, args=(node, done), name="stage", daemon=True)
        thread.start()
        try:
            wait_for_staging(done)
        except BaseException:  # mostly an interrupt; it is raised again
            node.stop(f"{places[at].label} was interrupted")
            done.wait(STAGING_END_SECONDS)
            raise
        finally:
            self._node = None
        thread.join()
        if node.fault is not None:
            raise node.fault
        return node.report()

    def progress(self) -> dict[str, Any]:
        """Return the progress; called on another thread."""
        node = self._node
        if node is None:
            return {"phase": ""}
        return {"phase": node.phase, "total_bytes": node.total_bytes, "done_bytes": node.done_bytes}

    def release(self, because: str = "another rank has failed") -> None:
        """End the copy, because a rank has failed; called on another thread."""
        node = self._node
        if node is not None:
            node.stop(because)

    def let_go(self) -> None:
        """Release what was prepared and never used."""
        if self._neighbours is not None:
            self._neighbours.close()
            self._neighbours = None
        if self._store is not None:
            self._store.close()
            self._store = None


def _run(node: PipelineNode, done: threading.Event) -> None:
    try:
        node.run()
    finally:
        done.set()


def wait_for_staging(done: threading.Event) -> None:
    """Wait for the end; an interrupt ends this as if it were the user's code (``rank.interrupts.deferral``)."""
    while not done.wait(1.0):
        pass
