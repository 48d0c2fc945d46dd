"""Merge the variables of ranks into one table.

Covers: variables that are equal on several ranks, those that differ, sorting, choosing by pattern, the table as text
and as JSON.
Does not cover: describing values (``summaries``), asking the ranks (``client``).
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...protocol.ranks import format_ranks, label_ranks, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_SHOWN = 60  # characters of a value in the table as text
_DEVICES = ("Device", "Local device")  # properties that name a device


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A variable as it is on some ranks."""

    name: str
    ranks: tuple[int, ...]
    properties: Mapping[str, str]  # texts by title, e.g. "Type", "Shape", "Dtype", "Device", "Placements", "Value"
    size_bytes: int | None  # of its tensors and arrays, on the first of these ranks

    @property
    def type_text(self) -> str:
        """The name of its class, with the module."""
        return self.properties["Type"].removeprefix("torch.")


class VariableTable:
    """The variables of ranks.

    Parameters
    ----------
    replies
        By rank, the reply to ``ListVariables``.
    silent
        The ranks that did not reply in time.
    devices
        By rank, its own device: a tensor there is not different although the device has another index on each rank.

    Attributes
    ----------
    variables : tuple of Variable
        A variable that differs between ranks is listed once for each group of ranks where it is equal.
    ranks : tuple of int
        The ranks that replied.
    silent : tuple of int
        The ranks that did not reply in time.
    tensor_bytes : dict of int to int
        By rank, the bytes of the tensors and arrays that all its variables hold, each counted once.
    """

    def __init__(
        self,
        replies: Mapping[int, Mapping[str, Any]],
        silent: Sequence[int] = (),
        devices: Mapping[int, str] | None = None,
    ) -> None:
        self.ranks, self.silent = tuple(sorted(replies)), tuple(silent)
        self.tensor_bytes = {rank: int(replies[rank]["tensor_bytes"]) for rank in self.ranks}
        grouped: dict[str, dict[tuple[tuple[str, str], ...], list[tuple[int, int | None]]]] = {}
        for rank in self.ranks:
            own_device = (devices or {}).get(rank, "")
            for each in replies[rank]["variables"]:
                key = tuple(_comparable(each["properties"], own_device))
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
        found.ranks, found.tensor_bytes = self.ranks, self.tensor_bytes
        chosen = [
            each
            for each in self.variables
            if not patterns or any(fnmatch.fnmatchcase(each.name, pattern) for pattern in patterns)
        ]
        found.variables = tuple(
            sorted(chosen, key=lambda each: (-(each.size_bytes or 0), each.name.lower())) if by_size else chosen
        )
        return found

    def to_content(self) -> dict[str, Any]:
        """Return the table as JSON, for a front end; ranks are texts such as ``"0-2,5"``."""
        sizes = self.tensor_bytes.values()
        return {
            "variables": [
                {
                    "name": each.name,
                    "type": each.type_text,
                    "value": _value_text(each.properties),
                    "size_bytes": each.size_bytes,
                    "ranks": format_ranks(each.ranks),
                    "differs": each.ranks != self.ranks,
                }
                for each in self.variables
            ],
            "ranks": format_ranks(self.ranks),
            "silent": format_ranks(self.silent),
            "least_tensor_bytes": min(sizes, default=0),
            "most_tensor_bytes": max(sizes, default=0),
        }

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
        value = _value_text(variable.properties, _SHOWN)
        size = "" if variable.size_bytes is None else size_text(variable.size_bytes)
        ranks = "" if variable.ranks == self.ranks else label_ranks(variable.ranks)
        return variable.name, variable.type_text, value, size, ranks

    def __repr__(self) -> str:
        """Return the table."""
        return str(self)


def _comparable(properties: Mapping[str, str], own_device: str) -> Iterator[tuple[str, str]]:
    """Yield the properties, with the rank's own device as e.g. ``cuda``, without its index."""
    for title, text in properties.items():
        yield title, text.partition(":")[0] if title in _DEVICES and text == own_device else text


def _value_text(properties: Mapping[str, str], most: int | None = None) -> str:
    """Return the properties of a value in one line; ``most``: the characters of a plain value that are shown."""
    if "Value" in properties:
        text = properties["Value"]
        return text if most is None or len(text) <= most else f"{text[:most]}..."
    if "Parameters" in properties:
        return f"{properties['Parameters']} parameters"
    if "Length" in properties:
        return f"length {properties['Length']}"
    shown = ("Shape", "Dtype", "Device", "Placements", "Layout")
    # Of a DTensor only the local part has a data type and a device.
    known = {title.removeprefix("Local ").capitalize(): text for title, text in properties.items()} | dict(properties)
    parts = [known[title] for title in shown if title in known]
    if "Local shape" in properties:
        parts.append(f"here {properties['Local shape']}")
    return " ".join(parts)
