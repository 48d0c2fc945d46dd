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

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    Item = tuple[int, int]  # a rank, and a place in its sequence
    Part = tuple[list[Item], int]  # the first items of some lines, and how many lines; several lines are of one rank
    Shared = Mapping[int, Mapping[int, "_Alike"]]  # by rank and place: lines that several ranks have


def merge(
    sequences: Mapping[int, Sequence[Hashable]], times: Mapping[int, Sequence[float]] | None = None
) -> list[Part]:
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
    list of (list of (int, int), int)
        Part by part: the ranks that have it, each with the place in its sequence, and the number of lines. A part of
        several ranks is one line; one of a single rank can be several lines, which follow each other in its sequence.
        The order in each sequence is kept.
    """
    lengths = {rank: len(sequences[rank]) for rank in sorted(sequences)}
    shared = _match(sequences)
    if times is None:
        return _sort_from_end(_order(lengths, shared, {rank: [0.0] * length for rank, length in lengths.items()}))
    return _order(lengths, shared, _priorities(times, shared))


@dataclass(eq=False, slots=True)
class _Alike:
    """Equal lines of several ranks, since the last line that each of these ranks has once."""

    places: dict[int, list[int]] = field(default_factory=dict)  # by rank: of those not in order yet, the last one first
    waiting: list[int] = field(default_factory=list)  # ranks that have reached their next one

    def take(self) -> list[Item]:
        """Remove the next line of the ranks that have reached it."""
        items = [(rank, self.places[rank].pop()) for rank in sorted(self.waiting)]
        self.places = {rank: places for rank, places in self.places.items() if places}
        self.waiting.clear()
        return items


def _match(sequences: Mapping[int, Sequence[Hashable]]) -> Shared:
    """Return the lines that several ranks have, by rank and place."""
    owners, repeated = _owners({rank: Counter(sequences[rank]) for rank in sorted(sequences)})
    of_repeated = {owners[line] for line in repeated}
    once = {owners[line] for line in owners.keys() - repeated}
    within = {ranks: [some for some in of_repeated if some <= ranks] for ranks in once}
    found: defaultdict[tuple[Hashable, Hashable], _Alike] = defaultdict(_Alike)
    for rank in sorted(sequences) if owners else ():
        above: dict[frozenset[int], Hashable] = {}  # the last line that all of these ranks have, and each of them once
        for place, line in enumerate(sequences[rank]):
            ranks = owners.get(line)
            if ranks is None:
                continue
            if line not in repeated:
                above.update(dict.fromkeys(within[ranks], line))
            start = above.get(ranks) if line in repeated else line
            found[start, line].places.setdefault(rank, []).append(place)
    shared: dict[int, dict[int, _Alike]] = {rank: {} for rank in sequences}
    for alike in found.values():
        if len(alike.places) > 1:
            for rank, places in alike.places.items():
                shared[rank].update(dict.fromkeys(places, alike))
                places.reverse()
    return shared


def _owners(counts: Mapping[int, Counter[Hashable]]) -> tuple[dict[Hashable, frozenset[int]], set[Hashable]]:
    """Return the ranks of each line that several ranks have, and which of these lines a rank has more than once."""
    seen: set[Hashable] = set()
    common: set[Hashable] = set()
    for counted in counts.values():
        common |= seen & counted.keys()
        seen |= counted.keys()
    ranks_of: dict[Hashable, list[int]] = {line: [] for line in common}
    repeated: set[Hashable] = set()
    for rank, counted in counts.items():
        for line in common & counted.keys():
            ranks_of[line].append(rank)
            if counted[line] > 1:
                repeated.add(line)
    groups: dict[tuple[int, ...], frozenset[int]] = {}  # because lines are many
    return {line: groups.setdefault(tuple(ranks), frozenset(ranks)) for line, ranks in ranks_of.items()}, repeated


def _priorities(times: Mapping[int, Sequence[float]], shared: Shared) -> dict[int, list[float]]:
    """Return the priorities of each rank's lines; the smallest one comes first, and among equal ones the first rank."""
    first: dict[Item, float] = {}  # of each line that other ranks have too: its time on the first of them
    for alike in dict.fromkeys(alike for own in shared.values() for alike in own.values()):
        for number in range(1, 1 + max(map(len, alike.places.values()))):
            items = [(rank, places[-number]) for rank, places in alike.places.items() if number <= len(places)]
            first.update(dict.fromkeys(items, min(times[rank][place] for rank, place in items)))
    found = {}
    for rank, own in times.items():
        found[rank] = list(own)
        common = None  # the time of the next line that is also another rank's
        for place in range(len(own) - 1, -1, -1) if shared[rank] else ():
            common = first.get((rank, place), common)
            found[rank][place] = own[place] if common is None else common
    return found


def _order(lengths: Mapping[int, int], shared: Shared, priorities: Mapping[int, Sequence[float]]) -> list[Part]:
    """Put the lines of all ranks in one order, each once all of its ranks have reached it."""
    ordered: list[Part] = []
    front = _Reached(lengths, shared, priorities)
    for rank, length in lengths.items():
        while front.reached[rank] < length:
            if front.ready:
                items, number = front.take()
            else:
                items, number = _choose(shared, front.reached, rank).take(), 1  # without the ranks that reach it later
            ordered.append((items, number))
            for each, place in items:
                front.reach(each, place + number)
    return ordered


class _Reached:
    """Track each rank's next line, and the lines that all of their ranks have reached."""

    def __init__(self, lengths: Mapping[int, int], shared: Shared, priorities: Mapping[int, Sequence[float]]) -> None:
        self.reached: dict[int, int] = {}  # by rank: its place
        self.ready: list[tuple[float, int, int]] = []  # of lines that all of their ranks have reached: priority, item
        self._lengths, self._shared, self._priorities = lengths, shared, priorities
        for rank in lengths:
            self.reach(rank, 0)

    def reach(self, rank: int, place: int) -> None:
        """Go to a place of a rank."""
        self.reached[rank] = place
        alike = self._shared[rank].get(place)
        if alike is not None:
            alike.waiting.append(rank)
            if len(alike.waiting) < len(alike.places):
                return
            rank = min(alike.places)
            place = alike.places[rank][-1]
        if place < self._lengths[rank]:
            heappush(self.ready, (self._priorities[rank][place], rank, place))

    def take(self) -> Part:
        """Remove the first line that is ready, and those that follow it directly if only one rank has them."""
        _, rank, place = heappop(self.ready)
        shared, priorities, length = self._shared[rank], self._priorities[rank], self._lengths[rank]
        if place in shared:
            return shared[place].take(), 1
        until = self.ready[0][:2] if self.ready else (inf, rank)
        end = place + 1
        while end < length and end not in shared and (priorities[end], rank) <= until:
            end += 1
        return [(rank, place)], end - place


def _choose(shared: Shared, reached: Mapping[int, int], rank: int) -> _Alike:
    """Return a line that not all of its ranks have reached, because they have printed lines in different order.

    It is the next one of ``rank``, or that of a rank that comes to this one later: the one that is further apart.
    """

    def first_late(alike: _Alike) -> tuple[int, int]:
        return next(
            (places[-1] - reached[each], each) for each, places in alike.places.items() if each not in alike.waiting
        )

    alike = shared[rank][reached[rank]]
    distance, late_rank = first_late(alike)
    other = shared[late_rank][reached[late_rank]]
    return other if first_late(other)[0] > distance else alike


def _sort_from_end(ordered: list[Part]) -> list[Part]:
    """Return the parts in another order: each as late as what follows on its ranks allows, then by rank.

    What only one rank has between two shared lines stays together.
    """
    distances: Counter[int] = Counter()  # by rank: from the part that was last seen to the end
    own: set[int] = set()  # ranks of which only they have that part
    keys: list[tuple[int, int]] = []
    for items, _ in reversed(ordered):
        first = items[0][0]
        if len(items) > 1:
            distance = 1 + max([distances[rank] for rank, _ in items])
            for rank, _ in items:
                distances[rank] = distance
                own.discard(rank)
        elif first not in own:
            distances[first] += 1
            own.add(first)
        keys.append((-distances[first], first))
    keys.reverse()
    return [ordered[at] for at in sorted(range(len(ordered)), key=keys.__getitem__)]
