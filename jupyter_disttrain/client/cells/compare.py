"""Compare a variable across ranks.

Covers: comparison by digests, the size of the first difference.
Does not cover: computing digests (``rank.kernel.digests``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...protocol.ranks import label_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    NumbersOf = Callable[[str, Sequence[int]], Mapping[int, np.ndarray | None]]

LISTED = 8  # number of further differing parts to list by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A part of a variable that is not the same on all ranks."""

    path: str  # e.g. "layers.0.weight"; empty for the variable itself
    groups: tuple[tuple[tuple[int, ...], str], ...]  # ranks that agree and the kind of their value, most ranks first


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of comparing a variable across ranks."""

    name: str
    ranks: tuple[int, ...]
    compared: int  # number of parts that were compared
    sharded: int  # number of parts that differ by design, and were left out
    opaque: int  # number of parts that can't be compared, e.g. locks and open files
    differences: tuple[Difference, ...]  # in the order of the parts
    largest: tuple[str, ...] = ()  # lines on how much the first differing part differs

    def __bool__(self) -> bool:
        """Whether ranks differ."""
        return bool(self.differences)

    def __repr__(self) -> str:
        """Return the result as text for the user, which IPython shows as well."""
        who = label_ranks(self.ranks)
        left_out = f"; {self.sharded} are sharded over ranks and were left out" if self.sharded else ""
        left_out += f"; {self.opaque} can't be compared" if self.opaque else ""
        parts = "1 part" if self.compared == 1 else f"{self.compared} parts"
        if not self.differences:
            return f"{self.name} is the same on {who} ({parts}{left_out})"
        first, *others = self.differences
        count = f"{len(self.differences)} of {parts}"
        lines = [f"{self.name} differs on {who} in {count}{left_out}; the first is {first.path or self.name}:"]
        lines += [f"  {label_ranks(ranks)}: {kind}" for ranks, kind in first.groups]
        lines += [f"  {line}" for line in self.largest]
        if others:
            named = ", ".join(each.path for each in others[:LISTED])
            more = f" and {len(others) - LISTED} more" if len(others) > LISTED else ""
            lines.append(f"  others that differ: {named}{more}")
        return "\n".join(lines)


def compare(name: str, digests: Mapping[int, Sequence[dict[str, Any]]], numbers_of: NumbersOf) -> Comparison:
    """Compare the digests of a variable across ranks, as computed by ``rank.kernel.digests.digests``.

    ``numbers_of`` fetches one part of the variable from ranks, as arrays by rank; None for a part that is not numeric.
    """
    ranks = tuple(sorted(digests))
    by_path: dict[str, dict[int, tuple[str, str | None]]] = {}
    for rank in ranks:
        for part in digests[rank]:
            by_path.setdefault(part["path"], {})[rank] = part["kind"], part["digest"]
    without = {
        path: {kind for kind, _ in by_rank.values()}
        for path, by_rank in by_path.items()
        if all(digest is None for _, digest in by_rank.values())
    }
    compared = [path for path in by_path if path not in without]
    differences = tuple(found for path in compared if (found := _difference(path, by_path[path], ranks)) is not None)
    return Comparison(
        name=name,
        ranks=ranks,
        compared=len(compared),
        sharded=sum("opaque" not in kinds for kinds in without.values()),
        opaque=sum("opaque" in kinds for kinds in without.values()),
        differences=differences,
        largest=_largest(differences[0], numbers_of) if differences else (),
    )


def _difference(path: str, by_rank: Mapping[int, tuple[str, str | None]], ranks: Sequence[int]) -> Difference | None:
    groups: dict[tuple[str, str | None], list[int]] = {}
    for rank in ranks:
        groups.setdefault(by_rank.get(rank, ("missing", None)), []).append(rank)
    if len(groups) == 1:
        return None
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1]))
    return Difference(path=path, groups=tuple((tuple(members), kind) for (kind, _), members in ordered))


def _largest(first: Difference, numbers_of: NumbersOf) -> tuple[str, ...]:
    """Return lines on how much the first differing part differs from its value on most ranks."""
    (members, kind), *others = first.groups
    if any(other != kind for _, other in others):
        return ()  # e.g. different shapes, which the kinds show
    representatives = [ranks[0] for ranks, _ in first.groups]
    arrays = numbers_of(first.path, representatives)
    reference = arrays[representatives[0]]
    if reference is None:
        return ()
    lines = []
    for ranks, _ in others:
        array = arrays[ranks[0]]
        if array is None or array.shape != reference.shape:
            continue
        if array.size == 1:
            lines.append(f"{label_ranks(ranks)}: {array.item()!r}, {label_ranks(members)}: {reference.item()!r}")
            continue
        lines.append(f"{label_ranks(ranks)} from {label_ranks(members)}: {_distance(array, reference)}")
    return tuple(lines)


def _is_nan(numbers: np.ndarray) -> np.ndarray:
    return np.asarray(numbers != numbers)  # noqa: PLR0124  (np.isnan does not accept arrays of Python integers)


def _distance(array: np.ndarray, reference: np.ndarray) -> str:
    """Return a text on the difference of two arrays; NaN at the same place and equal infinities don't count."""
    same = (array == reference) | (_is_nan(array) & _is_nan(reference))
    with np.errstate(invalid="ignore", over="ignore"):  # arrays may contain infinities
        apart = np.where(same, 0.0, abs(array - reference))
        known = apart[~_is_nan(apart)]
        parts = [f"up to {known.max():.4g}, {known.mean():.4g} on average"] if known.any() else []
    parts.append(f"in {int((~same).sum()):,} of {apart.size:,} numbers")
    if known.size < apart.size:
        parts.append(f"NaN on one side in {apart.size - known.size:,}")
    return ", ".join(parts)
