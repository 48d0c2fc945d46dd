"""Explain hangs from the state that ranks report.

Covers: the state of one rank; which ranks wait in which collective, which are missing and where they are; mismatched
collectives.
Does not cover: requesting the state (``stack_collection``), drawing (``notebook.output.renderer``).
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...protocol.ranks import label_ranks
from ...protocol.states import RankActivity
from ...protocol.time_limits import HANG_PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ...protocol.messages import RankVitals

_FRAME = re.compile(r'File "(.*?)", line (\d+) in (.*)')  # as faulthandler writes it
_CELL = "ipykernel_"  # part of the path of a cell's code
DEFAULT_GROUP = "0"  # torch's name for the default group
_WITH_ROOT = ("broadcast", "reduce", "gather", "scatter")
# Collectives that need tensors of one size on every rank; in others the root's, or all sizes, may differ.
_ONE_SIZE = ("all_reduce", "broadcast", "reduce", "_all_gather_base", "reduce_scatter", "_reduce_scatter_base")


@dataclass(frozen=True, slots=True, kw_only=True)
class HangReport:
    """The latest known state of one rank; times are those of ``time.monotonic``."""

    asked_at: float
    answered_at: float = -1.0
    reply: dict[str, Any] | None = None  # the rank's reply: see ``features.telemetry.rank.stacks``
    outside: str = ""  # the rank's stack as obtained by its nanny, the innermost call first
    vitals: RankVitals | None = None  # at that time, if the rank still sent heartbeats: then no code holds the GIL
    still_since: float = 0.0  # time since which replies show the same place of the same call

    def answered(self, now: float, reply: dict[str, Any] | None) -> HangReport:
        """Return a copy with this reply; None if the rank failed to report its state."""
        same = self.reply is not None and reply is not None and _place(self.reply) == _place(reply)
        still_since = self.still_since if same else now
        return replace(self, answered_at=now, reply=reply, outside="", vitals=None, still_since=still_since)

    @property
    def silent_s(self) -> float:
        """Seconds since a request that the rank has not replied to; 0.0 if it has."""
        return 0.0 if self.answered_at >= self.asked_at else time.monotonic() - self.asked_at

    @property
    def collective(self) -> dict[str, Any] | None:
        """The collective in which the rank waits, from the flight recorder; None if it waits in none."""
        return None if self.reply is None or self.reply["cell"] is None else self.reply["collective"]

    @property
    def called(self) -> list[dict[str, Any]]:
        """The collective in which the rank waits, and those it has called at positions where other ranks wait."""
        calls = [] if self.reply is None else self.reply["called"]
        return calls if self.collective is None else [self.collective, *calls]

    @property
    def waits_s(self) -> float | None:
        """How long the rank, or its program, has been waiting, in seconds; None if it is not waiting."""
        if self.collective is not None:
            return float(self.collective["waits_s"])
        reply = self.reply
        if reply is None or reply["cell"] is None or (reply["call"] is None and not reply.get("outside")):
            return None
        # E.g. in init_process_group, which the recorder does not record, or in a program that holds the GIL.
        return self.answered_at - self.still_since

    @property
    def asks(self) -> str:
        """What waits for the user's answer on the rank, e.g. "a debugger"; empty if nothing does."""
        return "" if self.reply is None or self.reply["cell"] is None else str(self.reply.get("asks", ""))

    @property
    def program(self) -> str:
        """A description of the separate process that the rank waits for; empty if it waits for none."""
        return "" if self.reply is None or self.reply["cell"] is None else str(self.reply.get("program", ""))

    def is_hang(self, after_s: float) -> bool:
        """Whether the rank has waited, or has not replied, for at least this many seconds."""
        if self.waits_s is None:
            return self.silent_s >= max(after_s, HANG_PATIENCE_SECONDS)
        return self.waits_s >= after_s


def _place(reply: Mapping[str, Any]) -> tuple[Any, ...]:
    cell = reply["cell"] or {}
    return cell.get("number"), reply["call"], reply.get("values"), reply["stack"] and tuple(map(tuple, reply["stack"]))


def explain(reports: Mapping[int, HangReport], idle: Iterable[int], ended: Mapping[int, str]) -> list[str]:
    """Return lines on where ranks wait and which are missing; ranks in the same state share a line.

    The ranks of ``reports`` run a cell, those of ``idle`` run none. ``ended`` has those of ``idle`` that have ended the
    cell which the others run, with its error; empty text for none.
    """
    groups: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        groups.setdefault(_doing(report), []).append(rank)
    for rank in idle:
        groups.setdefault(_done(rank, ended) if reports else "idle", []).append(rank)
    lines = [f"{label_ranks(ranks)}: {what}" for what, ranks in groups.items()]
    collectives = [report.collective for report in reports.values()]
    if len(lines) == 1 and collectives and collectives[0] is not None and collectives[0]["name"] in _WITH_ROOT:
        lines.append("all of them wait in it; check that they pass the same src or dst")
    return lines


def explain_figures(figures: Mapping[int, RankVitals], after_s: float) -> list[str]:
    """Return the same lines from the ranks' vitals alone, once a rank has waited ``after_s`` seconds.

    For observers of a cluster that no notebook holds.
    """
    waits = [vitals.waits_s for vitals in figures.values() if vitals.state == RankActivity.IN_COLLECTIVE]
    if not waits or max(waits) < after_s:
        return []
    groups: dict[str, list[int]] = {}
    for rank, vitals in sorted(figures.items()):
        groups.setdefault(_shown_by(vitals), []).append(rank)
    return [f"{label_ranks(ranks)}: {doing}" for doing, ranks in groups.items()]


def _shown_by(vitals: RankVitals) -> str:
    """Return what a rank is doing according to its vitals."""
    at = f" at line {vitals.line}" if vitals.line else ""
    if vitals.state == RankActivity.IN_COLLECTIVE:
        return f"waits in {vitals.call}{at}"
    if vitals.state in (RankActivity.NOT_RESPONDING, RankActivity.STOPPED):
        return f"not responding for {vitals.silent_s:.0f} s{at}" if vitals.silent_s else vitals.state
    return "in no cell" if vitals.cell is None else f"in Python code{at}"


def waited_for(reports: Iterable[HangReport]) -> list[tuple[Any, Any, Any, str]]:
    """Return group, number, backend and run of each collective that ranks wait in.

    Each backend has its own numbers. The run is that of a script, which has groups of its own; empty for the session's.
    """
    found = (report.collective for report in reports)
    return sorted({_key(each) for each in found if each is not None and not each["is_p2p"]})


def _key(collective: Mapping[str, Any]) -> tuple[Any, Any, Any, str]:
    return collective["group"], collective["number"], collective.get("backend", ""), collective.get("run", "")


def _doing(report: HangReport) -> str:
    reply = report.reply
    if report.silent_s > HANG_PATIENCE_SECONDS:
        if report.vitals is None:
            return f"not responding for {report.silent_s:.0f} s{_from_outside(report)}"
        return _shown_by(report.vitals)  # its thread for requests is busy, e.g. it releases the process group
    if reply is None or reply["cell"] is None:
        return "between cells"
    waits_in = reply["call"] if report.collective is None else _name(report.collective)
    if report.asks or waits_in is not None:
        return f"{f'{report.asks} waits for the user' if report.asks else f'waits in {waits_in}'}{_at(reply)}"
    if reply.get("outside"):
        return f"{report.program} holds the GIL{_at_outside(reply['outside'])}"
    return f"in Python code{_at(reply)}" if reply["stack"] or not report.program else f"waits for {report.program}"


def _done(rank: int, ended: Mapping[int, str]) -> str:
    if rank not in ended:
        return "in no cell"
    first = ended[rank].partition("\n")[0].removesuffix(": ")
    return f"its cell failed: {first:.200}" if first else "has ended the cell"


def _from_outside(report: HangReport) -> str:
    """Return where a rank is that does not reply: in C code that holds the GIL, or unknown if it is stopped."""
    frames = _FRAME.findall(report.outside)
    own = [line for path, line, _name in frames if _CELL in path]
    if own:
        inner = f" (in {frames[0][2]})" if _CELL not in frames[0][0] else ""
        return f", in code that holds the GIL, at line {own[0]}{inner}"
    return f", last seen{_at(report.reply)}" if report.reply is not None and report.reply["line"] else ""


def _at_outside(stack: str) -> str:
    """Return the innermost place of a program's stack as faulthandler writes it."""
    frames = _FRAME.findall(stack)
    return f" at {frames[0][0].rpartition('/')[2]}:{frames[0][1]}" if frames else ""


def _at(reply: Mapping[str, Any]) -> str:
    stack = reply["stack"]
    if not stack:
        return " outside the cell's own code"
    if not reply["line"]:
        return ""  # code that a magic runs on the ranks
    filename, _line, _name, text = stack[0]
    own = [frame for frame in stack if frame[0] == filename]
    code = own[-1][3] or text
    place = f"{reply['file']}:{reply['line']}" if reply.get("file") else f"line {reply['line']}"
    return f" at {place}" + (f": {code}" if code else "")


def _name(collective: Mapping[str, Any]) -> str:
    group = collective["group"]
    of_group = "" if group == DEFAULT_GROUP else f" of group {group}"
    if collective["number"] is None:
        return f"{collective['name']}{_shape(collective)}"  # Horovod's collectives have names instead of numbers
    return f"{collective['name']} number {collective['number']}{of_group}{_shape(collective)}"


def _kind(collective: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what must match on all ranks: the name, and for some collectives dtypes and element counts, not shapes."""
    if collective["name"] not in _ONE_SIZE:
        return (collective["name"],)
    return collective["name"], tuple(collective["dtypes"]), tuple(math.prod(size) for size in collective["sizes"])


def _shape(collective: Mapping[str, Any]) -> str:
    sizes = ", ".join("x".join(map(str, size)) or "scalar" for size in collective["sizes"][:3])
    dtypes = ", ".join(dict.fromkeys(collective["dtypes"]))
    return f" ({dtypes} {sizes})" if sizes else ""


def mismatches(reports: Mapping[int, HangReport]) -> list[str]:
    """Return lines on mismatched collectives: ranks wait in one of them, and others called another in its place.

    ``reports`` has the state of all ranks, also of those that run no cell: with Gloo some ranks return from a
    mismatched collective.
    """
    found: dict[tuple[Any, Any, Any, str], dict[tuple[Any, ...], tuple[str, dict[int, None]]]]
    found = {place: {} for place in waited_for(reports.values())}
    for rank, report in sorted(reports.items()):
        for each in report.called:
            kinds = found.get(_key(each))
            if kinds is not None:
                kinds.setdefault(_kind(each), (each["name"] + _shape(each), {}))[1][rank] = None
    lines = []
    for (_group, number, *_), kinds in found.items():
        if len(kinds) > 1:
            calls = "; ".join(f"{label_ranks(ranks)} in {call}" for call, ranks in kinds.values())
            lines.append(f"collective number {number} is not the same on all ranks, so it can't complete: {calls}")
    return lines


def waits_in_mpi(replies: Iterable[Mapping[str, Any]]) -> str:
    """Return the kind of MPI call that a release has to end, see ``MpiCall``: the most difficult; empty if none."""
    seen = {each.get("mpi") for each in replies}
    return next((each for each in ("partitioned", "many", "one") if each in seen), "")
