"""Merge the variables of ranks into one table.

Covers: variables that are equal on several ranks, those that differ, sorting, choosing by pattern, the table as text.
Does not cover: describing values (``summaries``), asking the ranks (``client``).
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...protocol.ranks import label_ranks, size_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_SHOWN = 60  # characters of a value in the table


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A variable as it is on some ranks."""

    name: str
    ranks: tuple[int, ...]
    properties: Mapping[str, str]  # texts by title, e.g. "Type", "Shape", "Dtype", "Device", "Placements", "Value"
    size_bytes: int | None  # of its tensors and arrays, on the first of these ranks


class VariableTable:
    """The variables of ranks.

    Attributes
    ----------
    variables : tuple of Variable
        A variable that differs between ranks is listed once for each group of ranks where it is equal.
    ranks : tuple of int
        The ranks that replied.
    silent : tuple of int
        The ranks that did not reply in time.
    """

    def __init__(self, by_rank: Mapping[int, Iterable[Mapping[str, Any]]], silent: Sequence[int] = ()) -> None:
        self.ranks, self.silent = tuple(sorted(by_rank)), tuple(silent)
        grouped: dict[str, dict[tuple[tuple[str, str], ...], list[tuple[int, int | None]]]] = {}
        for rank in self.ranks:
            for each in by_rank[rank]:
                key = tuple(each["properties"].items())
                grouped.setdefault(each["name"], {}).setdefault(key, []).append((rank, each["size_bytes"]))
        self.variables = tuple(
            Variable(name=name, ranks=tuple(rank for rank, _ in held), properties=dict(key), size_bytes=held[0][1])
            for name, groups in sorted(grouped.items(), key=lambda item: item[0].lower())
            for key, held in groups.items()
        )

    def select(self, patterns: Sequence[str], *, by_size: bool = False) -> VariableTable:
        """Return the variables whose names match one of the patterns, e.g. ``"loss*"``; all without patterns.

        ``by_size``: the largest first.
        """
        found = VariableTable({}, self.silent)
        found.ranks = self.ranks
        chosen = [
            each
            for each in self.variables
            if not patterns or any(fnmatch.fnmatchcase(each.name, pattern) for pattern in patterns)
        ]
        found.variables = tuple(
            sorted(chosen, key=lambda each: (-(each.size_bytes or 0), each.name.lower())) if by_size else chosen
        )
        return found

    def __str__(self) -> str:
        """Return the table, with a line for each variable; where ranks differ, one for each group of them."""
        rows = [("name", "type", "value", "size", "ranks"), *map(self._row, self.variables)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        if not self.variables:
            lines = [f"no variables on {label_ranks(self.ranks)}"] if self.ranks else []
        if self.silent:
            do = "does" if len(self.silent) == 1 else "do"
            lines.append(f"{label_ranks(self.silent)} {do} not reply; %dist_where shows what they are doing")
        return "\n".join(lines)

    def _row(self, variable: Variable) -> tuple[str, ...]:
        properties = variable.properties
        size = "" if variable.size_bytes is None else size_text(variable.size_bytes)
        ranks = "" if variable.ranks == self.ranks else label_ranks(variable.ranks)
        return variable.name, properties["Type"].removeprefix("torch."), _value_text(properties), size, ranks

    def __repr__(self) -> str:
        """Return the table."""
        return str(self)


def _value_text(properties: Mapping[str, str]) -> str:
    """Return the properties of a value in one line."""
    if "Value" in properties:
        text = properties["Value"]
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    if "Parameters" in properties:
        return f"{properties['Parameters']} parameters"
    if "Length" in properties:
        return f"length {properties['Length']}"
    shown = ("Shape", "Dtype", "Device", "Placements", "Layout")
    parts = [properties[title] for title in shown if title in properties]
    if "Local shape" in properties:
        parts.append(f"here {properties['Local shape']}")
    return " ".join(parts)
