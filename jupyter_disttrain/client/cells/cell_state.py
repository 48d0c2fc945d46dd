"""Track which ranks run a cell and how each of them ended it.

Covers: the state machine of a cell, ranks that failed only because they waited for another.
Does not cover: waiting for the cell (``cell_run``), making and merging failures (``failures``), releasing stuck
ranks (``client.recovery.state_machine``).

:class:`CellState` has no I/O: events in, state out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...protocol.ranks import label_ranks
from .events import Died, Event, OutputEnded, Replied
from .failures import death_of, failure_of, merge_failures

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ...protocol.messages import CellFailure


class CellState:
    """The ranks that run a cell, and the replies and failures of those that have ended it.

    An event replaces these collections and changes none of them, so a thread that reads one has a snapshot. A rank
    leaves ``running`` last.
    """

    def __init__(self, ranks: Sequence[int], hosts: Mapping[int, str]) -> None:
        self.running = frozenset(ranks)
        self.failures: dict[int, CellFailure] = {}
        self.replies: dict[int, Replied] = {}
        self._silent: set[int] = set()
        self._hosts = dict(hosts)

    @property
    def done(self) -> bool:
        """Whether every rank has ended the cell and all its output has arrived."""
        return not self.running

    def apply(self, event: Event) -> None:
        """Apply one event; events of ranks that have ended the cell change nothing."""
        rank = event.rank
        if rank not in self.running:
            return
        if isinstance(event, Replied):
            self.replies = self.replies | {rank: event}
            if event.content["status"] != "ok":
                self.failures = self.failures | {rank: failure_of(event, self._hosts[rank])}
            if event.quiet or rank in self._silent:
                self.running -= {rank}
        elif isinstance(event, OutputEnded):
            # The idle message and the reply travel on different sockets: either may come first.
            self._silent.add(rank)
            if rank in self.replies:
                self.running -= {rank}
        elif isinstance(event, Died):
            self.failures = self.failures | {rank: death_of(event, self._hosts[rank])}
            self.running -= {rank}

    @property
    def waited(self) -> dict[int, CellFailure]:
        """Failures of ranks whose process group was aborted because another rank had failed."""
        return _waited(self.failures)

    def cut_imports(self, remedy: Callable[[Collection[int]], str]) -> list[str]:
        """Return messages on modules whose import was interrupted, so that ranks can't import them again.

        Only modules for which this is known are listed.
        """
        ranks_by_name: dict[str, list[int]] = {}
        for rank, reply in sorted(self.replies.items()):
            for name in reply.content.get("cut_imports", ()):
                ranks_by_name.setdefault(name, []).append(rank)
        texts = []
        for name, ranks in ranks_by_name.items():
            hosts = ", ".join(dict.fromkeys(self._hosts[rank] for rank in ranks))
            texts.append(f"the import of {name} was interrupted on {label_ranks(ranks)} ({hosts}); {remedy(ranks)}")
        return texts

    def distinct_failures(self) -> tuple[CellFailure, ...]:
        """Return each distinct failure once with all its ranks, the earliest first; without those in :attr:`waited`."""
        failures = self.failures
        waited = _waited(failures)
        return merge_failures(failure for rank, failure in failures.items() if rank not in waited)


def _waited(failures: Mapping[int, CellFailure]) -> dict[int, CellFailure]:
    if all(failure.of_group for failure in failures.values()):
        return {}  # no rank failed on its own, so the group itself is the cause
    return {rank: failure for rank, failure in failures.items() if failure.of_group}
