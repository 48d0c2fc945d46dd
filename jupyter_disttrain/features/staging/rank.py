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
from .pipeline import Relay
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
        self._relay: Relay | None = None
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
            ``"place"``: see :class:`Place`; ``"sees"``: whether the source's path is there.

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
        """Copy; returns what was done: see :meth:`Relay.tell`.

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
        relay = self._relay = Relay(self._source, places, at, self._neighbours, self._store, verify=verify)
        self._neighbours, self._store = None, None
        done = threading.Event()
        thread = threading.Thread(target=_run, args=(relay, done), name="stage", daemon=True)
        thread.start()
        try:
            wait_for_staging(done)
        except BaseException:  # mostly an interrupt; it is raised again
            relay.stop(f"{places[at].label} was interrupted")
            done.wait(STAGING_END_SECONDS)
            raise
        finally:
            self._relay = None
        thread.join()
        if relay.fault is not None:
            raise relay.fault
        return relay.tell()

    def tell(self) -> dict[str, Any]:
        """Return the progress; called on another thread."""
        relay = self._relay
        if relay is None:
            return {"phase": ""}
        return {"phase": relay.phase, "total_bytes": relay.total_bytes, "done_bytes": relay.done_bytes}

    def release(self, because: str = "another rank has failed") -> None:
        """End the copy, because a rank has failed; called on another thread."""
        relay = self._relay
        if relay is not None:
            relay.stop(because)

    def let_go(self) -> None:
        """Release what was prepared and never used."""
        if self._neighbours is not None:
            self._neighbours.close()
            self._neighbours = None
        if self._store is not None:
            self._store.close()
            self._store = None


def _run(relay: Relay, done: threading.Event) -> None:
    try:
        relay.run()
    finally:
        done.set()


def wait_for_staging(done: threading.Event) -> None:
    """Wait for the end; an interrupt ends this as if it were the user's code (``untimely``)."""
    while not done.wait(1.0):
        pass
