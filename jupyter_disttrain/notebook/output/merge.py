"""Merge what each rank printed into one sequence.

Covers: which lines several ranks have in common, and the order of all lines.
Does not cover: control characters (``terminal``), how much is merged while the cell runs (``transcript``).

A line that each of several ranks printed once is one line for all of them. A repeated line is matched by its number of
occurrence since the last of these. Then the lines are put in order, each once all of its ranks have reached it; a line
that ranks printed in different order is divided. The result for complete output depends on what the ranks printed and
not on when. The cost of n lines is O(n log n), and more only for lines that are divided.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
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
    return _order(lengths, shared, {rank: _priorities(rank, times, shared) for rank in lengths})


@dataclass(eq=False, slots=True)
class _Shared:
    """A line that several ranks have."""

    items: list[Item]
    missing: int  # ranks that have not reached it


def _match(sequences: Mapping[int, Sequence[Hashable]]) -> dict[Item, _Shared]:
    """Return the lines that several ranks have, by each of their items."""
    counts = [Counter(lines) for lines in sequences.values()]
    owners = Counter(line for counted in counts for line in counted)
    repeated = {line for counted in counts for line, number in counted.items() if number > 1}
    found: dict[tuple[Hashable, Hashable, int], list[Item]] = {}
    for rank in sorted(sequences):
        above: Hashable = None  # the last line that other ranks have too, and each of them once
        seen: Counter[Hashable] = Counter()  # since then
        for place, line in enumerate(sequences[rank]):
            if owners[line] == 1:
                continue
            if line not in repeated:
                above = line
                seen.clear()
            seen[line] += 1
            found.setdefault((above, line, seen[line]), []).append((rank, place))
    lines = [_Shared(items, len(items)) for items in found.values() if len(items) > 1]
    return {item: line for line in lines for item in line.items}


def _priorities(rank: int, times: Mapping[int, Sequence[float]], shared: Mapping[Item, _Shared]) -> list[float]:
    """Return the priorities of a rank's lines; the smallest one comes first, and among equal ones the first rank."""
    found = list(times[rank])
    common = None  # the time of the next line that is also another rank's
    for place in range(len(found) - 1, -1, -1):
        if (rank, place) in shared:
            common = min(times[other][at] for other, at in shared[rank, place].items)
        found[place] = found[place] if common is None else common
    return found


def _order(
    lengths: Mapping[int, int], shared: dict[Item, _Shared], priorities: Mapping[int, Sequence[float]]
) -> list[list[Item]]:
    """Put the lines of all ranks in one order, each once all of its ranks have reached it."""
    ordered: list[list[Item]] = []
    reached: dict[int, int] = {}
    ready: list[tuple[float, int, int]] = []  # the priority of a line, and its first item

    def reach(rank: int, place: int) -> None:
        reached[rank] = place
        line = shared.get((rank, place))
        if line is not None:
            line.missing -= 1
        if place < lengths[rank] and (line is None or not line.missing):
            first, at = line.items[0] if line is not None else (rank, place)
            heappush(ready, (priorities[first][at], first, at))

    for rank in lengths:
        reach(rank, 0)
    for rank, length in lengths.items():
        while reached[rank] < length:
            if ready:
                _, first, at = heappop(ready)
                items = shared[first, at].items if (first, at) in shared else [(first, at)]
            else:
                items = _divide(shared, reached, rank)
            ordered.append(items)
            for each, place in items:
                reach(each, place + 1)
    return ordered


def _divide(shared: dict[Item, _Shared], reached: Mapping[int, int], rank: int) -> list[Item]:
    """Divide a line that ranks have printed in different order, and return the part that is reached.

    It is the next one of ``rank``, or that of a rank that comes to this one later: the one that is further apart.
    """

    def first_late(line: _Shared) -> tuple[int, int]:
        return next((place - reached[each], each) for each, place in line.items if place > reached[each])

    line = shared[rank, reached[rank]]
    distance, late_rank = first_late(line)
    other = shared[late_rank, reached[late_rank]]
    if first_late(other)[0] > distance:
        line = other
    late = [item for item in line.items if item[1] > reached[item[0]]]
    line.items = [item for item in line.items if item[1] == reached[item[0]]]
    shared.update(dict.fromkeys(late, _Shared(late, len(late))))
    return line.items


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
