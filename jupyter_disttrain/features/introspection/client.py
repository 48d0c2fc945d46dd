"""Ask ranks to complete and document the text at the cursor of a cell, and for their variables.

Covers: which ranks are asked, how long they are waited for, names that only some of them have, how they differ.
Does not cover: the replies (``completion``, ``inspection``), requests of front ends (``notebook.cell_completion``,
``server``).

For a cell the lowest rank is asked. The others only list their names, or what they would reply to ``name?``, to be
compared.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...config.rank_selection import parse_ranks
from ...errors import ClusterClosedError
from ...protocol.ranks import label_ranks
from ...protocol.requests import Complete, Inspect, ListNames, ListVariables
from ...protocol.states import RankState
from ...protocol.time_limits import COMPLETION_SECONDS, OTHER_NAMES_SECONDS, VARIABLES_SECONDS
from .cell_text import place_at
from .variables import VariableTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ...client.session import Session
    from ...client.startup.rank_table import RankEntry
    from ...client.transport.link import Link
    from ...protocol.requests import Request

_REACHABLE = (RankState.IDLE, RankState.RUNNING)
_COMPARED = (
    "Type",
    "Value",
    "Length",
    "Shape",
    "Dtype",
    "Device",
    "Placements",
    "Local shape",
    "Parameters",
    "Signature",
)


@dataclass(frozen=True, slots=True)
class Completions:
    """What can replace the text from ``start`` to ``end``: texts, each with its kind and the ranks that have it."""

    start: int
    end: int
    matches: tuple[tuple[str, str], ...] = ()


class VariableRequests:
    """Requests to the ranks of one cluster for their variables; any thread may ask.

    A rank that has not replied in time is not asked again: it would have to serve all requests of meanwhile, before
    more urgent ones, and the reply that is still to come will be as new as one to a later request.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owed: dict[str, Future[Any]] = {}  # by process of a rank: replies that had not arrived in time

    def ask(self, link: Link, entries: Sequence[RankEntry], is_reachable: Callable[[RankEntry], bool]) -> VariableTable:
        """Return the variables of ranks; waits ``VARIABLES_SECONDS`` at most.

        Raises a ClusterClosedError if the cluster has ended.
        """
        with self._lock:
            owed = self._owed = {engine: future for engine, future in self._owed.items() if not future.done()}
        futures = {
            entry.info.rank: owed.get(entry.engine) or link.request(entry.engine, ListVariables())
            for entry in entries
            if is_reachable(entry)
        }
        wait(futures.values(), VARIABLES_SECONDS)
        contents = {rank: future.result()["content"] for rank, future in futures.items() if future.done()}
        engines = {entry.info.rank: entry.engine for entry in entries}
        with self._lock:
            late = {engines[rank]: future for rank, future in futures.items() if rank not in contents}
            self._owed = {**self._owed, **late}
        replies = {rank: content for rank, content in contents.items() if content["status"] == "ok"}
        devices = {entry.info.rank: entry.info.device for entry in entries}
        return VariableTable(replies, [rank for rank in devices if rank not in replies], devices)


class Introspection:
    """Completes and documents code for the ranks of one session, also while they run cells."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._owed: dict[str, Future[Any]] = {}  # by process of a rank: replies that have not arrived
        self._variable_requests = VariableRequests()

    def complete(self, code: str, cursor: int, ranks: Sequence[int]) -> Completions:
        """Return how the text at a position of a cell can be completed; without matches if no rank replies in time.

        Parameters
        ----------
        code
            The cell, without the magic that selects its ranks.
        cursor
            The position, in characters.
        ranks
            The ranks on which the cell is to run.
        """
        place = place_at(code, cursor)
        first, *others = sorted(ranks)
        requests: dict[int, Request] = {first: Complete(code=code, cursor=cursor)}
        if place.kind == "name":
            requests |= {rank: ListNames(prefix=place.prefix) for rank in others}
        replies = self._ask(requests, first)
        if first not in replies:
            return Completions(cursor, cursor)
        found = replies[first]
        matches = [(text, kind) for text, kind in found["matches"]]
        names = {rank: set(reply["names"]) for rank, reply in replies.items()} if place.kind == "name" else {}
        return Completions(found["start"], found["end"], tuple(_marked(matches, first, names) if names else matches))

    def inspect(self, code: str, cursor: int, ranks: Sequence[int], *, with_source: bool = False) -> dict[str, str]:
        """Return what documents the text at a position of a cell, as texts by title; empty if it is not known.

        ``"Ranks"`` states which ranks differ, and how. The parameters are those of :meth:`complete`; ``with_source``
        includes the source in place of the documentation.
        """
        first, *others = sorted(ranks)
        requests: dict[int, Request] = {first: Inspect(code=code, cursor=cursor, with_source=with_source)}
        requests |= {rank: Inspect(code=code, cursor=cursor, with_source=False) for rank in others}
        replies = self._ask(requests, first)
        if first not in replies:
            return {}
        sections = {rank: dict(reply["sections"]) for rank, reply in replies.items()}
        own = sections.pop(first)
        differing = _differences(own, sections)
        return own | ({"Ranks": "\n".join(differing)} if differing and own else {})

    def variables(self, ranks: str | int | Iterable[int] = "all") -> VariableTable:
        """Return the variables of ranks, also while they run cells.

        Modules, functions, classes and the names that every rank has are left out.

        Raises
        ------
        UsageError
            If a rank does not exist.
        ClusterClosedError
            If the cluster has ended.
        """
        launch = self._session.launch
        launch.check_open()
        entries = [launch.table[rank] for rank in parse_ranks(ranks, len(launch.table))]
        return self._variable_requests.ask(launch.open_link, entries, lambda entry: entry.state in _REACHABLE)

    def _ask(self, requests: Mapping[int, Request], first: int) -> dict[int, dict[str, Any]]:
        """Send each rank its request; return the replies that arrive in time, without those of ranks that fail."""
        launch = self._session.launch
        # A rank that has not replied yet would have to reply to all requests of meanwhile, before more urgent ones.
        self._owed = {engine: future for engine, future in self._owed.items() if not future.done()}
        entries = {rank: launch.table[rank] for rank in requests if launch.table[rank].state in _REACHABLE}
        entries = {rank: entry for rank, entry in entries.items() if entry.engine not in self._owed}
        if first not in entries or launch.lost_because:
            return {}
        try:
            futures: dict[int, Future[Any]] = {
                rank: launch.open_link.request(entry.engine, requests[rank]) for rank, entry in entries.items()
            }
        except ClusterClosedError:
            return {}
        began = time.monotonic()
        wait([futures[first]], COMPLETION_SECONDS)
        left = min(OTHER_NAMES_SECONDS, COMPLETION_SECONDS - (time.monotonic() - began))
        wait(futures.values(), max(0.0, left))
        found = {}
        for rank, future in futures.items():
            if future.done() and future.exception() is None:
                content = future.result()["content"]
                if content["status"] == "ok":
                    found[rank] = content
            elif not future.done():
                self._owed[entries[rank].engine] = future
        return found


def _marked(matches: list[tuple[str, str]], first: int, names: Mapping[int, set[str]]) -> list[tuple[str, str]]:
    """Mark the variables that only some ranks have; add those that the first rank lacks."""
    marked = []
    of_any = set().union(*names.values())
    for text, kind in [*matches, *((name, "instance") for name in sorted(of_any - names[first]))]:
        having = [rank for rank, its in names.items() if text in its]
        is_partial = text in of_any and len(having) < len(names)
        marked.append((text, f"{kind}, only {label_ranks(having)}" if is_partial else kind))
    return marked


def _differences(own: Mapping[str, str], others: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Return a line for each group of ranks on which a value differs from the first rank's."""
    grouped: dict[str, list[int]] = {}
    for rank, sections in others.items():
        if not sections:
            grouped.setdefault("not defined", []).append(rank)
            continue
        titles = [title for title in _COMPARED if own.get(title) != sections.get(title)]
        if titles:
            text = ", ".join(f"{title} {sections.get(title, 'none')}" for title in titles)
            grouped.setdefault(text, []).append(rank)
    return [f"{label_ranks(ranks)}: {text}" for text, ranks in grouped.items()]
