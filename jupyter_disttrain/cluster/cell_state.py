"""Who runs a cell, who ended it how.

Covers: the state machine of a cell, which rank only waited for another.
Does not cover: waiting for it (``cell_run``), which failures are one (``merging``), releasing stuck ranks
(``recovery``).

:class:`CellState` has no I/O: events in, state out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..messages import CellFailure
from ..ranks import label_ranks
from .events import Died, Event, Replied, Silent
from .last_words import last_words
from .merging import RANK_DIED, merge_failures

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class CellState:
    """Who runs, who ended how."""

    def __init__(self, ranks: Sequence[int], hosts: Mapping[int, str]) -> None:
        self.running = set(ranks)
        self.failures: dict[int, CellFailure] = {}
        self.replies: dict[int, Replied] = {}
        self._silent: set[int] = set()
        self._hosts = dict(hosts)

    @property
    def done(self) -> bool:
        """Whether every rank has ended the cell and all it said has arrived."""
        return not self.running

    def apply(self, event: Event) -> None:
        """Take one event; those of ranks that have ended change nothing."""
        rank = event.rank
        if rank not in self.running:
            return
        if isinstance(event, Replied):
            self.replies[rank] = event
            if event.content["status"] != "ok":
                self.failures[rank] = self._failure(rank, event)
            if event.quiet or rank in self._silent:
                self.running.discard(rank)
        elif isinstance(event, Silent):
            # The idle message and the reply travel on different sockets: either may come first.
            self._silent.add(rank)
            if rank in self.replies:
                self.running.discard(rank)
        elif isinstance(event, Died):
            self.running.discard(rank)
            self.failures[rank] = self._death(rank, event)

    def _failure(self, rank: int, event: Replied) -> CellFailure:
        content = event.content
        return CellFailure(
            ranks=(rank,),
            hosts=(self._hosts[rank],),
            ename=content.get("ename", "Error"),
            evalue=content.get("evalue", ""),
            traceback=tuple(content.get("traceback", ())),
            line=content.get("line"),
            file=content.get("file", ""),
            time_s=content.get("time_s", event.time_s),
            details=tuple(content.get("details", ())),
            raised_at=content.get("raised_at", ""),
            of_group=content.get("group_error", False) and content["ename"] != "KeyboardInterrupt",
        )

    def _death(self, rank: int, event: Died) -> CellFailure:
        traceback, file, line = last_words(event.record.stderr_tail, event.record.crash)
        return CellFailure(
            ranks=(rank,),
            hosts=(self._hosts[rank],),
            ename=RANK_DIED,
            evalue=event.record.cause
            if event.record.host_silent_s
            else f"process {event.record.pid} {event.record.cause}",
            traceback=traceback,
            line=line,
            file=file,
            time_s=event.time_s,
        )

    @property
    def waited(self) -> dict[int, CellFailure]:
        """The ranks whose process group ended under them because another rank had failed."""
        if all(failure.of_group for failure in self.failures.values()):
            return {}  # nobody else failed, so it is the group itself that did
        return {rank: failure for rank, failure in self.failures.items() if failure.of_group}

    @property
    def lost_step(self) -> bool:
        """Whether all ranks have ended this cell, and some have called more collectives of a group than others."""
        if len(self.replies) < len(self._hosts):
            return False
        counts: dict[str, set[int]] = {}
        for reply in self.replies.values():
            for name, count in reply.content.get("collectives", {}).items():
                counts.setdefault(name, set()).add(count)
        return any(len(different) > 1 for different in counts.values())

    def out_of_step(self) -> list[str]:
        """Say so if some ranks called more collectives in a cell that ended well everywhere: the next would hang."""
        if self.failures or not self.lost_step:
            return []
        totals: dict[int, list[int]] = {}
        for rank, reply in sorted(self.replies.items()):
            totals.setdefault(sum(reply.content["collectives"].values()), []).append(rank)
        said = ", ".join(f"{label_ranks(ranks)} called {count}" for count, ranks in totals.items())
        what = f"out of step: of this cell's collectives {said}; the next one will wait for ranks that are elsewhere"
        return [f"{what} (stop it then, and all are in step again)"]

    def distinct_failures(self) -> tuple[CellFailure, ...]:
        """Each distinct failure once with all its ranks, the earliest first; without those that only waited."""
        waited = self.waited
        return merge_failures(failure for rank, failure in self.failures.items() if rank not in waited)
