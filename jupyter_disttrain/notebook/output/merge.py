"""Merge what each rank printed into one sequence.

Covers: which lines several ranks have in common, and the order of all lines.
Does not cover: control characters (``terminal``), how much is merged while the cell runs (``transcript``).

A line that each of several ranks printed once is one line for all of them. A repeated line is matched with the next one
of each other rank since the last line that all of these ranks printed once. Lines are put in order, each once all of
its ranks have reached it; of lines that ranks printed in different order, one is taken without the ranks that come
later. The result for complete output depends on what the ranks printed and not on when. The cost of n lines is
O(n log n), and more only for lines in different order.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    Item = tuple[int, int]  # a rank, and a place in its sequence


def merge(
    sequences: Mapping[int, Sequence[Hashable]], times: Mapping[int, Sequence[float]] | None = None
) -> list[list[Item]]:
    """Merge sequences of lines.

    Parameters
    ----------
    sequences
        By rank: what it printed, line by line. Equal lines can become one.
    times
        By rank: when each line was printed. Without them the sequences are complete, and each line stands as late as
        what follows on its ranks allows, then in the order of the ranks. With them ranks may still print, and what they
        have printed below their last common line stands in the order of time.

    Returns
    -------
    list of list of (int, int)
        Line by line: the ranks that have it, each with the place in its sequence. The order in each sequence is kept.
    """
    lengths = {rank: len(sequences[rank]) for rank in sorted(sequences)}
    shared = _match(sequences)
    if times is None:
        return _sort_from_end(_order(lengths, shared, {rank: [0.0] * length for rank, length in lengths.items()}))
    return _order(lengths, shared, _priorities(times, shared))


@dataclass(eq=False, slots=True)
class _Alike:
    """Equal lines of several ranks, since the last line that each of these ranks has once."""

    places: dict[int, deque[int]] = field(default_factory=dict)  # by rank: of those that are not in order yet
    waiting: set[int] = field(default_factory=set)  # ranks that have reached their next one

    def take(self) -> list[Item]:
        """Remove the next line of the ranks that have reached it."""
        items = [(rank, self.places[rank].popleft()) for rank in sorted(self.waiting)]
        self.places = {rank: places for rank, places in self.places.items() if places}
        self.waiting.clear()
        return items


def _match(sequences: Mapping[int, Sequence[Hashable]]) -> dict[Item, _Alike]:
    """Return the lines that several ranks have, by each of their items."""
    counts = {rank: Counter(sequences[rank]) for rank in sorted(sequences)}
    ranks_of: dict[Hashable, list[int]] = {}
    for rank, counted in counts.items():
        for line in counted:
            ranks_of.setdefault(line, []).append(rank)
    owners = {line: frozenset(ranks) for line, ranks in ranks_of.items() if len(ranks) > 1}
    repeated = {line for counted in counts.values() for line, number in counted.items() if number > 1}
    of_repeated = {owners[line] for line in repeated & owners.keys()}
    within: dict[frozenset[int], list[frozenset[int]]] = {}
    found: dict[tuple[Hashable, Hashable], _Alike] = {}
    for rank in counts:
        above: dict[frozenset[int], Hashable] = {}  # the last line that all of these ranks have, and each of them once
        for place, line in enumerate(sequences[rank]):
            ranks = owners.get(line)
            if ranks is None:
                continue
            if line not in repeated:
                if ranks not in within:
                    within[ranks] = [some for some in of_repeated if some <= ranks]
                above.update(dict.fromkeys(within[ranks], line))
            start = above.get(ranks) if line in repeated else line
            found.setdefault((start, line), _Alike()).places.setdefault(rank, deque()).append(place)
    return {
        (rank, place): alike
        for alike in found.values()
        if len(alike.places) > 1
        for rank, places in alike.places.items()
        for place in places
    }


def _priorities(times: Mapping[int, Sequence[float]], shared: Mapping[Item, _Alike]) -> dict[int, list[float]]:
    """Return the priorities of each rank's lines; the smallest one comes first, and among equal ones the first rank."""
    first: dict[Item, float] = {}  # of each line that other ranks have too: its time on the first of them
    for alike in dict.fromkeys(shared.values()):
        for number in range(max(map(len, alike.places.values()))):
            items = [(rank, places[number]) for rank, places in alike.places.items() if number < len(places)]
            first.update(dict.fromkeys(items, min(times[rank][place] for rank, place in items)))
    found = {}
    for rank, own in times.items():
        found[rank] = list(own)
        common = None  # the time of the next line that is also another rank's
        for place in range(len(own) - 1, -1, -1):
            common = first.get((rank, place), common)
            found[rank][place] = own[place] if common is None else common
    return found


def _order(
    lengths: Mapping[int, int], shared: Mapping[Item, _Alike], priorities: Mapping[int, Sequence[float]]
) -> list[list[Item]]:
    """Put the lines of all ranks in one order, each once all of its ranks have reached it."""
    ordered: list[list[Item]] = []
    reached: dict[int, int] = {}
    ready: list[tuple[float, int, int]] = []  # the priority of a line, and its first item

    def reach(rank: int, place: int) -> None:
        reached[rank] = place
        alike = shared.get((rank, place))
        if alike is not None:
            alike.waiting.add(rank)
            if len(alike.waiting) < len(alike.places):
                return
            rank = min(alike.places)
            place = alike.places[rank][0]
        if place < lengths[rank]:
            heappush(ready, (priorities[rank][place], rank, place))

    for rank in lengths:
        reach(rank, 0)
    for rank, length in lengths.items():
        while reached[rank] < length:
            if ready:
                _, first, at = heappop(ready)
                items = shared[first, at].take() if (first, at) in shared else [(first, at)]
            else:
                items = _choose(shared, reached, rank).take()  # without the ranks that reach it later
            ordered.append(items)
            for each, place in items:
                reach(each, place + 1)
    return ordered


def _choose(shared: Mapping[Item, _Alike], reached: Mapping[int, int], rank: int) -> _Alike:
    """Return a line that not all of its ranks have reached, because they have printed lines in different order.

    It is the next one of ``rank``, or that of a rank that comes to this one later: the one that is further apart.
    """

    def first_late(alike: _Alike) -> tuple[int, int]:
        return next(
            (places[0] - reached[each], each) for each, places in alike.places.items() if each not in alike.waiting
        )

    alike = shared[rank, reached[rank]]
    distance, late_rank = first_late(alike)
    other = shared[late_rank, reached[late_rank]]
    return other if first_late(other)[0] > distance else alike


def _sort_from_end(ordered: list[list[Item]]) -> list[list[Item]]:
    """Return the lines in another order: each as late as what follows on its ranks allows, then by rank.

    What only one rank has between two shared lines stays together.
    """
    distances: Counter[int] = Counter()  # by rank: from the line that was last seen to the end
    own: set[int] = set()  # ranks of which only they have that line
    keys: list[tuple[int, int]] = []
    for items in reversed(ordered):
        ranks = {rank for rank, _ in items}
        is_in_block = len(items) == 1 and ranks <= own
        distance = max(distances[rank] for rank in ranks) + (not is_in_block)
        distances.update({rank: distance - distances[rank] for rank in ranks})
        own = own | ranks if len(items) == 1 else own - ranks
        keys.append((-distance, items[0][0]))
    keys.reverse()
    return [ordered[at] for at in sorted(range(len(ordered)), key=keys.__getitem__)]
