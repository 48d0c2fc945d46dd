"""Merge what each rank printed into one sequence.

Covers: which lines several ranks have in common, and in which order all of them stand.
Does not cover: control characters (``terminal``), the merge while the cell runs (``transcript``).

The result depends on what the ranks printed and not on when: it is the same whichever rank was faster. Lines are
matched as a patience diff does it: first those that occur once on either side, then what lies between them. The cost
of n lines is n, times a small depth.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    Item = tuple[int, int]  # a rank, and a place in its sequence
    Span = tuple[int, int]

MAX_DEPTH = 12  # of blocks between anchors; deeper ones are matched by their number of occurrence


class _Shared:
    """A line that several ranks may have."""

    def __init__(self, like: int) -> None:
        self.like = like
        self.items: list[Item] = []


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
    spine: list[_Shared] = []
    for rank, lines in numbered.items():
        own = [(place, line) for place, line in enumerate(lines) if line >= 0 and counts[line] > 1]
        spine = _weave(spine, rank, own)
    return _order([node.items for node in spine if len(node.items) > 1], {r: len(s) for r, s in numbered.items()})


def _weave(spine: list[_Shared], rank: int, own: list[tuple[int, int]]) -> list[_Shared]:
    """Add a rank's lines: to those that are alike, else in front of the next one that is."""
    partners = dict(_match([node.like for node in spine], [line for _, line in own]))
    woven: list[_Shared] = []
    waiting: list[_Shared] = []
    at = 0
    for index, (place, line) in enumerate(own):
        partner = partners.get(index)
        if partner is None:
            node = _Shared(line)
            waiting.append(node)
        else:
            node = spine[partner]
            woven += spine[at:partner]
            woven += waiting
            woven.append(node)
            waiting.clear()
            at = partner + 1
        node.items.append((rank, place))
    return woven + spine[at:] + waiting


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


def _match(left: Sequence[int], right: Sequence[int]) -> list[tuple[int, int]]:
    """Return places of equal lines as (right, left), increasing in both."""
    pairs: list[tuple[int, int]] = []
    todo: list[tuple[Span, Span, int]] = [((0, len(left)), (0, len(right)), 0)]
    while todo:
        (left_start, left_end), (right_start, right_end), depth = todo.pop()
        while left_start < left_end and right_start < right_end and left[left_start] == right[right_start]:
            pairs.append((right_start, left_start))
            left_start, right_start = left_start + 1, right_start + 1
        while left_start < left_end and right_start < right_end and left[left_end - 1] == right[right_end - 1]:
            left_end, right_end = left_end - 1, right_end - 1
            pairs.append((right_end, left_end))
        if left_start == left_end or right_start == right_end:
            continue
        spans = (left_start, left_end), (right_start, right_end)
        anchors = _anchors(_once(left, spans[0]), _once(right, spans[1])) if depth < MAX_DEPTH else []
        if not anchors:
            pairs += _anchors(_by_occurrence(left, spans[0]), _by_occurrence(right, spans[1]))
            continue
        pairs += anchors
        for (right_at, left_at), (right_next, left_next) in zip(
            [(right_start - 1, left_start - 1), *anchors], [*anchors, (right_end, left_end)], strict=True
        ):
            todo.append(((left_at + 1, left_next), (right_at + 1, right_next), depth + 1))
    return pairs


def _once(lines: Sequence[int], span: Span) -> dict[Hashable, int]:
    """Return where the lines stand that occur once."""
    counts = Counter(lines[span[0] : span[1]])
    return {lines[place]: place for place in range(*span) if counts[lines[place]] == 1}


def _by_occurrence(lines: Sequence[int], span: Span) -> dict[Hashable, int]:
    """Return where each line stands for the first time, for the second time and so on."""
    counts: Counter[int] = Counter()
    places: dict[Hashable, int] = {}
    for place in range(*span):
        counts[lines[place]] += 1
        places[lines[place], counts[lines[place]]] = place
    return places


def _anchors(left: Mapping[Hashable, int], right: Mapping[Hashable, int]) -> list[tuple[int, int]]:
    """Return the most pairs of what both have that are increasing on both sides, as (right, left)."""
    ends: list[int] = []  # by length: the smallest place on the left at which so long a chain ends
    chains: list[tuple[int, int, int]] = []  # right, left, the pair before it
    last: list[int] = []  # by length: that chain's last pair
    for line, right_at in right.items():
        left_at = left.get(line)
        if left_at is None:
            continue
        length = bisect_left(ends, left_at)
        before = last[length - 1] if length else -1
        ends[length : length + 1], last[length : length + 1] = [left_at], [len(chains)]
        chains.append((right_at, left_at, before))
    found: list[tuple[int, int]] = []
    at = last[-1] if last else -1
    while at >= 0:
        right_at, left_at, at = chains[at]
        found.append((right_at, left_at))
    return found[::-1]
