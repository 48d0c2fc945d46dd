"""Who a rank is, and how people name ranks.

Covers: the identity of one rank, ``"0,2-3"`` to ranks and back.
Does not cover: deciding the identities (``cluster.rank_table``), a rank's state.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_LABEL = 20  # characters of a label before lines; more take from the text
_PART = re.compile(r"^\s*(\d+)\s*(?:[-:]\s*(\d+)\s*)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The identity of one rank, decided by the client and told to the rank.

    The names are those of torchrun's environment variables, in lower case.
    """

    rank: int  # 0 <= rank < world_size
    world_size: int
    local_rank: int  # the rank among those of its node
    local_world_size: int
    node_rank: int  # the node among the nodes
    node_count: int
    host: str
    pid: int
    backend: str  # "gloo" or "nccl"
    device: str  # "cpu" or "cuda:1", as torch.device takes it

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON takes them."""
        return {name: getattr(self, name) for name in self.__slots__}


def counted(count: int, noun: str) -> str:
    """Return ``"1 rank"`` or ``"2 ranks"``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def parse_ranks(spec: str | int | Iterable[int], world_size: int) -> tuple[int, ...]:
    """Expand a rank selection such as ``"0,2-3"``.

    Parameters
    ----------
    spec
        ``"all"``, a rank, ``"0,2-3"`` with or without brackets as in ``"[0, 2-3]"``, or an iterable of ranks.
    world_size
        The number of ranks in the cluster.

    Returns
    -------
    tuple of int
        Sorted, without repeats, never empty.

    Raises
    ------
    UsageError
        If ``spec`` is malformed, empty or names a rank outside the cluster.

    Examples
    --------
    >>> parse_ranks("0,2-3", world_size=4)
    (0, 2, 3)
    >>> parse_ranks("[1]", world_size=4)
    (1,)
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
            raise UsageError(f"ranks {part.strip()!r} in {spec!r} run backwards; write '{last}-{first}'")
        # A range that leaves the cluster is cut here and refused by the caller, so "0-10**12" costs nothing.
        ranks.update(range(first, min(last, max(first, world_size)) + 1))
    return ranks


def format_ranks(ranks: Iterable[int]) -> str:
    """Write ranks as people do.

    Examples
    --------
    >>> format_ranks([0, 1, 2, 5])
    '0-2,5'
    """
    parts: list[str] = []
    run: list[int] = []
    for rank in sorted(set(ranks)):
        if run and rank == run[-1] + 1:
            run.append(rank)
            continue
        if run:
            parts.append(_format_run(run))
        run = [rank]
    if run:
        parts.append(_format_run(run))
    return ",".join(parts)


def _format_run(run: list[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def label_ranks(ranks: Iterable[int]) -> str:
    """Write ranks with their noun: ``"rank 0"``, ``"ranks 0-3"``."""
    chosen = sorted(set(ranks))
    return f"rank{'' if len(chosen) == 1 else 's'} {format_ranks(chosen)}"


def short_label(ranks: Iterable[int]) -> str:
    """Write ranks with their noun, and those of many scattered ranks in short.

    Examples
    --------
    >>> short_label(range(2, 64, 3))
    '21 ranks: 2,5,…,62'
    """
    label = label_ranks(ranks)
    if len(label) <= MAX_LABEL:
        return label
    chosen = sorted(set(ranks))
    first, second, *_, last = format_ranks(chosen).split(",")
    return f"{len(chosen)} ranks: {first},{second},…,{last}"
