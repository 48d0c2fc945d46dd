"""What ranks were seen doing, and what that means together.

Covers: one look at one rank; who waits in which collective, who is missing and where; collectives that don't match.
Does not cover: asking the ranks (``guardian``), drawing (``notebook.screen``).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..ranks import label_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PATIENCE_SECONDS = 1.0  # for a rank to answer; its control thread may wait for Python's lock


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One rank, as it was seen last; times are those of ``time.monotonic``."""

    asked_at: float
    answered_at: float = -1.0
    told: dict[str, Any] | None = None  # see ``engine.where``
    still_since: float = 0.0  # since when it was seen at the same place of the same call

    def asked_again(self, now: float) -> Look:
        """Return the look with a question under way."""
        return replace(self, asked_at=now)

    def answered(self, now: float, told: dict[str, Any] | None) -> Look:
        """Return the look with an answer; None if the rank could not say."""
        same = self.told is not None and told is not None and _place(self.told) == _place(told)
        return replace(self, answered_at=now, told=told, still_since=self.still_since if same else now)

    @property
    def silent_s(self) -> float:
        """How long a question is unanswered, in seconds."""
        return 0.0 if self.answered_at >= self.asked_at else time.monotonic() - self.asked_at

    @property
    def collective(self) -> dict[str, Any] | None:
        """The collective that the rank waits in, as the flight recorder tells it."""
        return None if self.told is None or self.told["cell"] is None else self.told["collective"]

    @property
    def waits_s(self) -> float | None:
        """How long the rank has been waiting for others, None if it is not."""
        if self.told is None or self.told["cell"] is None:
            return None
        collective = self.told["collective"]
        if collective is not None:
            return float(collective["waits_s"])
        if self.told["call"] is None:
            return None
        return self.answered_at - self.still_since  # e.g. in init_process_group, where nothing is recorded


def _place(told: Mapping[str, Any]) -> tuple[Any, ...]:
    cell = told["cell"] or {}
    return cell.get("number"), told["call"], told["stack"] and tuple(map(tuple, told["stack"]))


def explain(looks: Mapping[int, Look], idle: Iterable[int]) -> list[str]:
    """Say who waits where and who is missing, one line for ranks that do the same.

    Parameters
    ----------
    looks
        Of the ranks that run the cell.
    idle
        Ranks that have ended it, or never ran it.
    """
    groups: dict[str, list[int]] = {}
    for rank, look in sorted(looks.items()):
        groups.setdefault(_doing(look), []).append(rank)
    if idle:
        groups.setdefault("in no cell" if looks else "idle", []).extend(idle)
    lines = [f"{label_ranks(ranks)}: {what}" for what, ranks in groups.items()]
    return [*_mismatches(looks), *lines]


def _doing(look: Look) -> str:
    told = look.told
    if look.silent_s > PATIENCE_SECONDS:
        seen = f", last seen {_at(told)}" if told is not None and told["line"] else ""
        return f"not responding for {look.silent_s:.0f} s{seen}"
    if told is None or told["cell"] is None:
        return "between cells"
    if look.collective is not None:
        return f"waits in {_name(look.collective)} {_at(told)}"
    if told["call"] is not None:
        return f"waits in {told['call']} {_at(told)}"
    return f"in Python code {_at(told)}"


def _at(told: Mapping[str, Any]) -> str:
    stack = told["stack"]
    if not stack:
        return "outside the cell's own code"
    filename, _line, _name, text = stack[0]
    own = [frame for frame in stack if frame[0] == filename]
    code = own[-1][3] or text
    return f"at line {told['line']}" + (f": {code}" if code else "")


def _name(collective: Mapping[str, Any]) -> str:
    sizes = ", ".join("x".join(map(str, size)) or "scalar" for size in collective["sizes"][:3])
    dtypes = ", ".join(dict.fromkeys(collective["dtypes"]))
    what = f" ({dtypes} {sizes})" if sizes else ""
    return f"{collective['name']} number {collective['number']}{what}"


def _mismatches(looks: Mapping[int, Look]) -> list[str]:
    """Name collectives that can't go together: other operations, or other sizes, under one number."""
    by_number: dict[tuple[Any, Any], dict[tuple[str, str], list[int]]] = {}
    for rank, look in sorted(looks.items()):
        found = look.collective
        if found is not None and not found["is_p2p"]:
            kind = (found["name"], str(found["sizes"]))
            by_number.setdefault((found["group"], found["number"]), {}).setdefault(kind, []).append(rank)
    lines = []
    for (_group, number), kinds in by_number.items():
        if len(kinds) > 1:
            said = "; ".join(f"{label_ranks(ranks)} in {name} of {sizes}" for (name, sizes), ranks in kinds.items())
            lines.append(f"collective number {number} is not the same on all ranks, so it can't end well: {said}")
    return lines
