"""What ranks were seen doing, and what that means together.

Covers: one look at one rank; who waits in which collective, who is missing and where; collectives that don't match.
Does not cover: asking the ranks (``guardian``), drawing (``notebook.screen``).
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..ranks import label_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..messages import RankVitals

_FRAME = re.compile(r'File "(.*?)", line (\d+) in (.*)')  # as faulthandler writes it
_CELL = "ipykernel_"  # in the path of a cell's code
PATIENCE_SECONDS = 1.0  # for a rank to answer; its control thread may wait for Python's lock
DEFAULT_GROUP = "0"  # its name, as torch counts groups
_WITH_ROOT = ("broadcast", "reduce", "gather", "scatter")
# Collectives in which every rank gives tensors of one size; in others the root, or everybody, may differ.
_ONE_SIZE = ("all_reduce", "broadcast", "reduce", "_all_gather_base", "reduce_scatter", "_reduce_scatter_base")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One rank, as it was seen last; times are those of ``time.monotonic``."""

    asked_at: float
    answered_at: float = -1.0
    told: dict[str, Any] | None = None  # see ``engine.where``
    outside: str = ""  # the stack that its nanny got out of it, the innermost call first
    still_since: float = 0.0  # since when it was seen at the same place of the same call

    def asked_again(self, now: float) -> Look:
        """Return the look with a question under way."""
        return replace(self, asked_at=now)

    def answered(self, now: float, told: dict[str, Any] | None) -> Look:
        """Return the look with an answer; None if the rank could not say."""
        same = self.told is not None and told is not None and _place(self.told) == _place(told)
        return replace(self, answered_at=now, told=told, outside="", still_since=self.still_since if same else now)

    def seen_from_outside(self, stack: str) -> Look:
        """Return the look with what the nanny found."""
        return replace(self, outside=stack)

    @property
    def silent_s(self) -> float:
        """How long a question is unanswered, in seconds."""
        return 0.0 if self.answered_at >= self.asked_at else time.monotonic() - self.asked_at

    @property
    def collective(self) -> dict[str, Any] | None:
        """The collective that the rank waits in, as the flight recorder tells it."""
        return None if self.told is None or self.told["cell"] is None else self.told["collective"]

    @property
    def called(self) -> list[dict[str, Any]]:
        """The collective that the rank waits in, and those that it called where others wait."""
        told = [] if self.told is None else self.told["called"]
        return told if self.collective is None else [self.collective, *told]

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

    @property
    def program(self) -> str:
        """The program in a process of its own that the rank waits for, in words; empty if for none."""
        return "" if self.told is None or self.told["cell"] is None else str(self.told.get("program", ""))

    def is_hang(self, after_s: float) -> bool:
        """Whether the rank waits, or says nothing, for longer than that."""
        if self.waits_s is None:
            return self.silent_s >= max(after_s, PATIENCE_SECONDS)
        return self.waits_s >= after_s


def _place(told: Mapping[str, Any]) -> tuple[Any, ...]:
    cell = told["cell"] or {}
    return cell.get("number"), told["call"], told.get("values"), told["stack"] and tuple(map(tuple, told["stack"]))


def explain(looks: Mapping[int, Look], idle: Iterable[int], ended: Mapping[int, str] | None = None) -> list[str]:
    """Say who waits where and who is missing, one line for ranks that do the same.

    Parameters
    ----------
    looks
        Of the ranks that run the cell.
    idle
        Ranks that run no cell.
    ended
        Those of them that have ended the cell which the others run, with the error it ended with, if any.
    """
    groups: dict[str, list[int]] = {}
    for rank, look in sorted(looks.items()):
        groups.setdefault(_doing(look), []).append(rank)
    for rank in idle:
        groups.setdefault(_done(rank, ended or {}) if looks else "idle", []).append(rank)
    lines = [f"{label_ranks(ranks)}: {what}" for what, ranks in groups.items()]
    collectives = [look.collective for look in looks.values()]
    if len(lines) == 1 and collectives and collectives[0] is not None and collectives[0]["name"] in _WITH_ROOT:
        lines.append("all of them wait in it: do they name the same src or dst?")
    return lines


def explain_figures(figures: Mapping[int, RankVitals], after_s: float) -> list[str]:
    """Say the same as far as figures tell it, for who looks on while the notebook that holds the cluster is not there.

    Parameters
    ----------
    figures
        What each rank told of itself last.
    after_s
        Nothing is said before a rank has waited this long, in seconds.
    """
    waits = [told.waits_s for told in figures.values() if told.state == "in collective"]
    if not waits or max(waits) < after_s:
        return []
    groups: dict[str, list[int]] = {}
    for rank, told in sorted(figures.items()):
        at = f" at line {told.line}" if told.line else ""
        if told.state == "in collective":
            doing = f"waits in {told.call}{at}"
        elif told.state in ("not responding", "stopped"):
            doing = f"not responding for {told.silent_s:.0f} s{at}" if told.silent_s else told.state
        else:
            doing = "in no cell" if told.cell is None else f"in Python code{at}"
        groups.setdefault(doing, []).append(rank)
    return [f"{label_ranks(ranks)}: {doing}" for doing, ranks in groups.items()]


def waited_for(looks: Iterable[Look]) -> list[tuple[Any, Any, Any]]:
    """Return the collectives that ranks wait in, by group, number and backend: each backend of a group counts alone."""
    found = (look.collective for look in looks)
    return sorted({_key(each) for each in found if each is not None and not each["is_p2p"]})


def _key(collective: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    return collective["group"], collective["number"], collective.get("backend", "")


def _doing(look: Look) -> str:
    told = look.told
    if look.silent_s > PATIENCE_SECONDS:
        return f"not responding for {look.silent_s:.0f} s{_from_outside(look)}"
    if told is None or told["cell"] is None:
        return "between cells"
    if look.collective is not None:
        return f"waits in {_name(look.collective)}{_at(told)}"
    if told["call"] is not None:
        return f"waits in {told['call']}{_at(told)}"
    return f"waits for {look.program}" if look.program else f"in Python code{_at(told)}"


def _done(rank: int, ended: Mapping[int, str]) -> str:
    if rank not in ended:
        return "in no cell"
    first = ended[rank].partition("\n")[0]
    return f"its cell failed: {first:.200}" if first else "has ended the cell"


def _from_outside(look: Look) -> str:
    """Say where a rank is that does not answer: in C code that holds Python's lock, or nowhere if it is stopped."""
    frames = _FRAME.findall(look.outside)
    own = [(line, name) for path, line, name in frames if _CELL in path]
    if own:
        inner = f" (in {frames[0][2]})" if _CELL not in frames[0][0] else ""
        return f", in code that lets no other thread run, at line {own[0][0]}{inner}"
    return f", last seen{_at(look.told)}" if look.told is not None and look.told["line"] else ""


def _at(told: Mapping[str, Any]) -> str:
    stack = told["stack"]
    if not stack:
        return " outside the cell's own code"
    if not told["line"]:
        return ""  # of what a magic has the ranks run
    filename, _line, _name, text = stack[0]
    own = [frame for frame in stack if frame[0] == filename]
    code = own[-1][3] or text
    place = f"{told['file']}:{told['line']}" if told.get("file") else f"line {told['line']}"
    return f" at {place}" + (f": {code}" if code else "")


def _name(collective: Mapping[str, Any]) -> str:
    group = collective["group"]
    of_group = "" if group == DEFAULT_GROUP else f" of group {group}"
    if collective["number"] is None:
        return f"{collective['name']}{_shape(collective)}"  # Horovod's, which have names instead
    return f"{collective['name']} number {collective['number']}{of_group}{_shape(collective)}"


def _kind(collective: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what has to be the same on all ranks; how many numbers, but not in which shape."""
    if collective["name"] not in _ONE_SIZE:
        return (collective["name"],)
    return collective["name"], tuple(collective["dtypes"]), tuple(math.prod(size) for size in collective["sizes"])


def _shape(collective: Mapping[str, Any]) -> str:
    sizes = ", ".join("x".join(map(str, size)) or "scalar" for size in collective["sizes"][:3])
    dtypes = ", ".join(dict.fromkeys(collective["dtypes"]))
    return f" ({dtypes} {sizes})" if sizes else ""


def mismatches(looks: Mapping[int, Look]) -> list[str]:
    """Name collectives that can't go together: ranks wait in one of them, and others called another in its place.

    ``looks`` are those of all ranks, also of those that run nothing: Gloo lets some of them go on.
    """
    found: dict[tuple[Any, Any, Any], dict[tuple[Any, ...], tuple[str, dict[int, None]]]]
    found = {place: {} for place in waited_for(looks.values())}
    for rank, look in sorted(looks.items()):
        for each in look.called:
            kinds = found.get(_key(each))
            if kinds is not None:
                kinds.setdefault(_kind(each), (each["name"] + _shape(each), {}))[1][rank] = None
    lines = []
    for (_group, number, _backend), kinds in found.items():
        if len(kinds) > 1:
            said = "; ".join(f"{label_ranks(ranks)} in {words}" for words, ranks in kinds.values())
            lines.append(f"collective number {number} is not the same on all ranks, so it can't end well: {said}")
    return lines


def waits_in_mpi(told: Iterable[Mapping[str, Any]]) -> str:
    """Return what a release has to end in MPI, by what ranks do: "many" requests at once, "one" call, or nothing."""
    seen = {each.get("mpi") for each in told}
    return next((each for each in ("many", "one") if each in seen), "")
