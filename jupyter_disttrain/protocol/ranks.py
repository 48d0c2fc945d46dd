"""Identify ranks, and format lists of ranks, counts and sizes.

Covers: the identity of one rank, ranks to ``"0,2-3"``, bytes to ``"1.5 GB"``.
Does not cover: parsing a selection of ranks (``config.rank_selection``), assigning the identities
(``client.startup.rank_table``).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

NEW_GROUP = "new_group"  # among the groups in a report of collectives: the number of groups that the rank has made
MAX_LABEL = 20  # characters of a label before lines; more would take space from the text


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The identity of one rank, assigned by the client and sent to the rank.

    The names are those of torchrun's environment variables, in lower case.
    """

    rank: int  # 0 <= rank < world_size
    world_size: int
    local_rank: int  # the rank's index among those of its node
    local_world_size: int
    node_rank: int  # the node's index among the nodes
    node_count: int
    host: str
    pid: int
    backend: str  # "gloo" or "nccl"
    device: str  # "cpu" or "cuda:1", as torch.device takes it


def counted(count: int, noun: str) -> str:
    """Return ``"1 rank"`` or ``"2 ranks"``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size_text(size_bytes: float) -> str:
    """Format a size with a suitable unit."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes:.0f} B"


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as ranges.

    >>> format_ranks([0, 1, 2, 5])
    '0-2,5'
    """
    parts = []
    for _, run in groupby(enumerate(sorted(set(ranks))), key=lambda numbered: numbered[1] - numbered[0]):
        first, *others = (rank for _, rank in run)
        parts.append(f"{first}-{others[-1]}" if others else str(first))
    return ",".join(parts)


def label_ranks(ranks: Iterable[int]) -> str:
    """Format ranks with their noun: ``"rank 0"``, ``"ranks 0-3"``."""
    chosen = sorted(set(ranks))
    return f"rank{'' if len(chosen) == 1 else 's'} {format_ranks(chosen)}"


def short_label(ranks: Iterable[int]) -> str:
    """Format ranks with their noun, abbreviated for many scattered ranks.

    >>> short_label(range(2, 64, 3))
    '21 ranks: 2,5,…,62'
    """
    label = label_ranks(ranks)
    if len(label) <= MAX_LABEL:
        return label
    chosen = sorted(set(ranks))
    first, second, *_, last = format_ranks(chosen).split(",")
    return f"{len(chosen)} ranks: {first},{second},…,{last}"
