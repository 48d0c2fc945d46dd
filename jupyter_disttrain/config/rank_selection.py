"""Parse a selection of ranks.

Covers: ``"0,2-3"`` to ranks.
Does not cover: formatting them (``protocol.ranks``).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..protocol.ranks import format_ranks, label_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable

_PART = re.compile(r"^\s*(\d+)\s*(?:[-:]\s*(\d+)\s*)?$")


def parse_ranks(spec: str | int | Iterable[int], world_size: int) -> tuple[int, ...]:
    """Expand a rank selection such as ``"0,2-3"``; returns at least one rank, sorted, without repeats.

    ``spec`` is ``"all"``, a rank, ``"0,2-3"`` with or without brackets as in ``"[0, 2-3]"``, or an iterable of ranks.
    Raises a UsageError if it is malformed, empty or names a rank outside the cluster.

    >>> parse_ranks("0,2-3", world_size=4)
    (0, 2, 3)
    """
    if isinstance(spec, int):
        ranks = {spec}
    elif isinstance(spec, str):
        ranks = _parse_text(spec, world_size)
    else:
        ranks = {int(rank) for rank in spec}
    if not ranks:
        raise UsageError(f"no rank is named in {spec!r}; write e.g. '0,2-3' or 'all'")
    outside = sorted(rank for rank in ranks if not 0 <= rank < world_size)
    if outside:
        be = "is" if len(outside) == 1 else "are"
        raise UsageError(
            f"there {be} no {label_ranks(outside)}: this cluster has ranks "
            f"{format_ranks(range(world_size))}; write e.g. '0' or 'all'"
        )
    return tuple(sorted(ranks))


def _parse_text(spec: str, world_size: int) -> set[int]:
    text = spec.strip()
    if text.startswith(("[", "(")) and text.endswith(("]", ")")):
        text = text[1:-1].strip()
    if text == "all":
        return set(range(world_size))
    ranks: set[int] = set()
    for part in text.split(","):
        if not part.strip():
            continue
        match = _PART.match(part)
        if match is None:
            raise UsageError(f"cannot read {part.strip()!r} in ranks {spec!r}; write e.g. '0,2-3' or 'all'")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"ranks {part.strip()!r} in {spec!r} are in reverse order; write '{last}-{first}'")
        # A range that leaves the cluster is cut here and refused by the caller, so "0-10**12" costs nothing.
        ranks.update(range(first, min(last, max(first, world_size)) + 1))
    return ranks
