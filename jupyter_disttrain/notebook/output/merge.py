"""Merge what each rank printed into one sequence.

Covers: which lines several ranks have in common, and the order of all lines.
Does not cover: control characters (``terminal``), the merge while the cell runs (``transcript``).

The result depends on what the ranks printed and not on when: it is the same whichever rank was faster. Lines are
matched as in a patience diff: first those that occur once on either side, then what lies between them. The cost of n
lines is O(n), times a small depth.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

    Item = tuple[int, int]  # a rank, and a place in its sequence
    Span = tuple[int, int]

FIRST, LAST = 0, 1  # sentinels above and below all lines of a spine
KEY_STEP = 1 << 40  # between the keys of two lines: room for those inserted between them
MAX_DEPTH = 12  # depth of blocks between anchors; deeper ones are matched by their number of occurrence


class _Spine:
    """Lines that several ranks may have, in order, under fixed numbers; finds neighbours and equal lines."""

    def __init__(self) -> None:
        # By number; FIRST and LAST are no lines.
        self.likes = [-1, -1]
        self.items: list[list[Item]] = [[], []]
        self.before, self.after = [FIRST, FIRST], [LAST, LAST]
        self.keys = [0, 0]  # increasing in the order of the lines
        self._alike: dict[int, list[int]] = {}  # by content: lines in order

    def __iter__(self) -> Iterator[int]:
        """Yield the lines in order."""
        line = self.after[FIRST]
        while line != LAST:
            yield line
            line = self.after[line]

    def add(self, like: int) -> int:
        """Return a new line, which has no place yet."""
        self.likes.append(like)
        self.items.append([])
        for numbers in (self.before, self.after, self.keys):
            numbers.append(FIRST)
        return len(self.likes) - 1

    def place(self, lines: Sequence[int], below: int) -> None:
        """Insert new lines above another."""
        above = self.before[below]
        step = (self.keys[below] - self.keys[above]) // (len(lines) + 1)
        for line, next_line in pairwise((above, *lines, below)):
            self.after[line], self.before[next_line] = next_line, line
        for count, line in enumerate(lines, 1):
            self.keys[line] = self.keys[above] + count * step
        if not step:
            for number, line in enumerate((*self, LAST), 1):
                self.keys[line] = number * KEY_STEP
        for line in lines:
            insort(self._alike.setdefault(self.likes[line], []), line, key=self.keys.__getitem__)

    def between(self, above: int, below: int, like: int) -> list[int]:
        """Return the lines of one content between two lines."""
        alike = self._alike.get(like)
        if alike is None:
            return []
        start = bisect_right(alike, self.keys[above], key=self.keys.__getitem__)
        return alike[start : bisect_left(alike, self.keys[below], start, key=self.keys.__getitem__)]


def merge(sequences: Mapping[int, Sequence[Hashable]]) -> list[list[Item]]:
    """Merge sequences of lines.

    Parameters
    ----------
    sequences
        By rank: what it printed, line by line. Equal lines can become one; None equals nothing.

    Returns
    -------
    list of list of (int, int)
        Line by line: the ranks that have it, each with the place in its sequence. The order in each sequence is kept.
        Between two lines that all ranks have, what only one rank has stands in the order of the ranks.
    """
    numbers: dict[Hashable, int] = {None: -1}
    numbered = {
        rank: [numbers.setdefault(line, len(numbers)) for line in lines] for rank, lines in sorted(sequences.items())
    }
    counts = Counter(number for lines in numbered.values() for number in set(lines))
    spine = _Spine()
    for rank, lines in numbered.items():
        own = [(place, line) for place, line in enumerate(lines) if line >= 0 and counts[line] > 1]
        _weave(spine, rank, own)
    common = [spine.items[line] for line in spine]
    return _order([items for items in common if len(items) > 1], {r: len(s) for r, s in numbered.items()})


def _weave(spine: _Spine, rank: int, own: list[tuple[int, int]]) -> None:
    """Add a rank's lines: to equal lines, else in front of the next line that has an equal one."""
    partners = dict(_match(spine, [like for _, like in own]))
    waiting: list[int] = []
    for index, (place, like) in enumerate(own):
        line = partners.get(index)
        if line is None:
            line = spine.add(like)
            waiting.append(line)
        elif waiting:
            spine.place(waiting, line)
            waiting.clear()
        spine.items[line].append((rank, place))
    spine.place(waiting, LAST)


def _order(common: list[list[Item]], lengths: Mapping[int, int]) -> list[list[Item]]:
    """Put common lines and the blocks between them in order: as late as what follows allows, then by rank."""
    blocks: list[tuple[int, int, list[list[Item]]]] = []  # minus the distance to the end, the first rank, the lines
    ends = dict(lengths)  # by rank: the part of the sequence that is not placed yet
    distances = dict.fromkeys(lengths, 0)

    def place_own(rank: int, start: int) -> None:
        if start < ends[rank]:
            distances[rank] += 1
            blocks.append((-distances[rank], rank, [[(rank, place)] for place in range(start, ends[rank])]))

    for items in reversed(common):
        for rank, place in items:
            place_own(rank, place + 1)
            ends[rank] = place
        distance = 1 + max(distances[rank] for rank, _ in items)
        distances.update((rank, distance) for rank, _ in items)
        blocks.append((-distance, items[0][0], [items]))
    for rank in lengths:
        place_own(rank, 0)
    blocks.sort(key=lambda block: block[:2])
    return [line for _, _, lines in blocks for line in lines]


def _match(spine: _Spine, right: Sequence[int]) -> list[tuple[int, int]]:
    """Return places on the right with the equal lines of the spine, increasing in both."""
    pairs: list[tuple[int, int]] = []
    todo: list[tuple[Span, Span, int]] = [((FIRST, LAST), (0, len(right)), 0)]
    while todo:
        (above, below), (start, end), depth = todo.pop()
        while start < end and spine.likes[spine.after[above]] == right[start] and spine.after[above] != below:
            above = spine.after[above]
            pairs.append((start, above))
            start += 1
        while start < end and spine.likes[spine.before[below]] == right[end - 1] and spine.before[below] != above:
            below = spine.before[below]
            end -= 1
            pairs.append((end, below))
        if start == end or spine.after[above] == below:
            continue
        rest = range(start, end)
        anchors = _anchors(spine, _once(spine, above, below, right, rest)) if depth < MAX_DEPTH else []
        if not anchors:
            pairs += _anchors(spine, _by_occurrence(spine, above, below, right, rest))
            continue
        pairs += anchors
        todo += [
            ((line, next_line), (place + 1, next_place), depth + 1)
            for (place, line), (next_place, next_line) in pairwise([(start - 1, above), *anchors, (end, below)])
        ]
    return pairs


def _once(spine: _Spine, above: int, below: int, right: Sequence[int], rest: range) -> Iterator[tuple[int, int]]:
    """Yield the places and lines of what occurs exactly once on either side."""
    counts = Counter(right[rest.start : rest.stop])
    for place in rest:
        if counts[right[place]] == 1:
            alike = spine.between(above, below, right[place])
            if len(alike) == 1:
                yield place, alike[0]


def _by_occurrence(
    spine: _Spine, above: int, below: int, right: Sequence[int], rest: range
) -> Iterator[tuple[int, int]]:
    """Yield the places and lines of first occurrences on either side, of second ones and so on."""
    following: dict[int, Iterator[int]] = {}
    for place in rest:
        like = right[place]
        if like not in following:
            following[like] = iter(spine.between(above, below, like))
        line = next(following[like], None)
        if line is not None:
            yield place, line


def _anchors(spine: _Spine, candidates: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest chain of these pairs, which increase on the right, that increases in the spine as well."""
    ends: list[int] = []  # by length: the smallest key in the spine at which such a chain ends
    chains: list[tuple[int, int, int]] = []  # place, line, the pair before it
    last: list[int] = []  # by length: that chain's last pair
    for place, line in candidates:
        key = spine.keys[line]
        length = bisect_left(ends, key)
        before = last[length - 1] if length else -1
        ends[length : length + 1], last[length : length + 1] = [key], [len(chains)]
        chains.append((place, line, before))
    found: list[tuple[int, int]] = []
    at = last[-1] if last else -1
    while at >= 0:
        place, line, at = chains[at]
        found.append((place, line))
    return found[::-1]
