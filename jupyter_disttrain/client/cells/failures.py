"""Make the failures of a cell from replies and deaths of ranks, and merge those of several ranks.

Covers: the last lines of a dead rank's stderr and faulthandler's report of its crash, with the cell's or script's line;
which failures are the same, how each rank's failure differs.
Does not cover: how a process ended (``protocol.rank_death``), ranks that only waited for another (``cell_state``),
display (``errors``).

Errors of one type at one line of the cell are one failure: it has one traceback, and for every other rank only the
difference is kept. Failures without a line are the same if they differ only in numbers and addresses.
"""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING

from ...protocol.messages import CellFailure

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .events import Died, Replied

# Incidental differences between ranks: addresses, repetition counts, and the file name that IPython gives the cell.
_INCIDENTAL = re.compile(
    r"0x[0-9a-fA-F]+|\(\d+ times\)|repeated \d+ (?:more )?times|ipykernel_\d+[/\\]\d+\.py|In ?\[\d+\]"
)
PROGRAM_EXIT = "ProgramExit"  # raised for the exit of a program: see features.scripts.runner
RANK_DIED = "RankDied"
_WITH_OWN_TRACEBACK = {PROGRAM_EXIT, RANK_DIED}  # their last lines are all that is known of them
_NUMBER = re.compile(r"\d+")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_WORD = re.compile(r"\s+|\w+|[^\w\s]")
SHORT_TEXT = 200  # characters; shorter texts are shown whole
AROUND = 40  # characters of context around a difference
COMPARED_WORDS = 500  # longest middle part to compare in detail, in tokens

LINES = 12  # of stderr or a crash report
_NO_NEWS = "Extension modules:"  # start of a line that lists all loaded extension modules
_GLOO_MISMATCH = "Received data size doesn't match expected size"
_OF_GLOO = (
    "ranks passed tensors of different sizes or types to one collective, or to a send and its recv, and Gloo aborts a "
    "process that receives more than its tensor holds; compare the shapes on all ranks"
)
_RUNS_SCRIPT = "/jupyter_disttrain/features/scripts/in_own_process.py"  # file of the frame that calls a script
_WATCHDOG = re.compile(r"[Ww]atchdog (caught|thread terminated)|can't be released")
_FRAME = re.compile(r'File "(.*)", line (\d+)')
_CELL = re.compile(r'File ".*ipykernel_\d+/\d+\.py", line (\d+)')


def failure_of(reply: Replied, host: str) -> CellFailure:
    """Return the failure that a rank has replied with."""
    content = reply.content
    if content.get("crash"):
        traceback, file, line = _death_lines("", content["crash"])
        content = content | {"traceback": traceback, "file": file, "line": line}
    return CellFailure(
        ranks=(reply.rank,),
        hosts=(host,),
        ename=content.get("ename", "Error"),
        evalue=content.get("evalue", ""),
        traceback=tuple(content.get("traceback", ())),
        line=content.get("line"),
        file=content.get("file", ""),
        time_s=content.get("time_s", reply.time_s),
        details=tuple(content.get("details", ())),
        raised_at=content.get("raised_at", ""),
        of_group=content.get("group_error", False) and content["ename"] != "KeyboardInterrupt",
    )


def death_of(death: Died, host: str) -> CellFailure:
    """Return the death of a rank as its failure."""
    record = death.record
    why = _root_line(record.stderr_tail)
    cause = record.cause if record.host_silent_s else f"process {record.pid} {record.cause}{why and f': {why[:300]}'}"
    traceback, file, line = _death_lines(record.stderr_tail, record.crash)
    return CellFailure(
        ranks=(death.rank,),
        hosts=(host,),
        ename=RANK_DIED,
        evalue=cause,
        traceback=traceback,
        line=line,
        file=file,
        time_s=death.time_s,
    )


def _root_line(stderr_tail: str) -> str:
    """Return why Gloo, CUDA or NCCL ended the process, according to stderr; empty if they did not."""
    if _GLOO_MISMATCH in stderr_tail:
        return _OF_GLOO
    lines = [line.strip() for line in stderr_tail.splitlines()]
    found = next((line for line in lines if "CUDA error:" in line), "")
    return found or next((line for line in lines if _WATCHDOG.search(line)), "")


def _death_lines(stderr_tail: str, crash: str) -> tuple[tuple[str, ...], str, int | None]:
    """Return the lines to show, and from the crash report the script's file (empty for a cell) and its line."""
    last_lines = stderr_tail.strip().splitlines()[-LINES:]
    reported, file, line = _up_to_own(crash)
    return (*(["Last lines on stderr:", *last_lines] if last_lines else []), *reported), file, line


def _up_to_own(crash: str) -> tuple[list[str], str, int | None]:
    """Return the report's lines up to the frame of the cell or script, with the file and line of that frame.

    Frames are listed from the innermost on; those that called the cell or the script are left out.
    """
    lines = [line for line in crash.splitlines() if line and not line.startswith(_NO_NEWS)]
    for index, line in enumerate(lines):
        match = _CELL.search(line)
        if match:
            return [*lines[:index], _CELL.sub(r"Cell, line \1", line)], "", int(match[1])
        script = _FRAME.search(lines[index - 1]) if index and _RUNS_SCRIPT in line else None
        if script:
            return lines[:index], script[1].rpartition("/")[2], int(script[2])
    return lines[:LINES], "", None


def merge_failures(failures: Iterable[CellFailure]) -> tuple[CellFailure, ...]:
    """Return each distinct failure once with all its ranks, in order of time."""
    groups: dict[tuple[object, ...], list[CellFailure]] = {}
    for failure in sorted(failures, key=lambda failure: failure.time_s):
        groups.setdefault(_likeness(failure), []).append(failure)
    return tuple(_merge(group) for group in groups.values())


def _likeness(failure: CellFailure) -> tuple[object, ...]:
    """Return the key under which failures count as the same."""
    if failure.line and failure.ename not in _WITH_OWN_TRACEBACK:
        return failure.ename, failure.file, failure.line
    message = _NUMBER.sub("#", _INCIDENTAL.sub("", failure.evalue))
    lines = [_COLOUR.sub("", line) for line in failure.traceback]  # colours mark the failed part of a line
    lines = [line for line in lines if not line.startswith(f"{failure.ename}: ")]
    return (failure.ename, message, *(_INCIDENTAL.sub("", line) for line in lines))


def _merge(group: list[CellFailure]) -> CellFailure:
    is_program = group[0].ename == PROGRAM_EXIT
    in_order = sorted(group, key=lambda failure: failure.ranks)
    first = group[0] if is_program else in_order[0]
    variants = ((other.ranks[0], _difference(other, first)) for other in in_order if other is not first)
    evalue = first.evalue
    if is_program and len(group) > 1:  # the others may have ended because of it
        evalue += f"; rank {group[0].ranks[0]}'s was the first"
    return replace(
        first,
        ranks=tuple(failure.ranks[0] for failure in in_order),
        hosts=tuple(dict.fromkeys(failure.hosts[0] for failure in in_order)),
        evalue=evalue,
        time_s=group[0].time_s,
        variants=tuple((rank, text) for rank, text in variants if text),
    )


def _difference(failure: CellFailure, first: CellFailure) -> str:
    """Return how a rank's failure differs from the first one's; empty if in nothing that matters."""
    if failure.ename == "KeyboardInterrupt":
        return ""
    parts = []
    if _same(failure.evalue) != _same(first.evalue):
        parts.append(f"{failure.ename}: {differing_part(failure.evalue, first.evalue)}")
    for at, detail in enumerate(failure.details):
        known = first.details[at] if at < len(first.details) else ""
        if _same(detail) != _same(known):
            parts.append(differing_part(detail, known))
    if _same(failure.raised_at) != _same(first.raised_at):
        parts.append(f"raised at {failure.raised_at}")
    return shorten("; ".join(parts), 2 * SHORT_TEXT)


def _same(text: str) -> str:
    return _INCIDENTAL.sub("", text)


def differing_part(text: str, other: str) -> str:
    """Return a text on one line; if it is long, only its differences from ``other`` with some context."""
    if len(text) <= SHORT_TEXT:
        return text if "\n" not in text else " ".join(text.split())
    words, others = _WORD.findall(text), _WORD.findall(other)
    pieces, begin, left = [], 0, SHORT_TEXT
    for first, last in _differing_places(words, others):
        before, after = _beginning(words[begin:first][::-1])[::-1], _beginning(words[last:])
        piece = shorten("".join(words[first:last]), max(left, AROUND))
        pieces.append(f"{''.join(before).lstrip()}{piece}{''.join(after).rstrip()}")
        begin, left = last, left - len(piece) - AROUND
        if left <= 0:
            break
    return " ".join(f"… {' … '.join(pieces)} …".split())


def _beginning(words: list[str]) -> list[str]:
    """Return the first few tokens, up to ``AROUND`` characters."""
    lengths = accumulate(map(len, words))
    return [word for word, length in takewhile(lambda pair: pair[1] <= AROUND, zip(words, lengths, strict=True))]


def shorten(text: str, limit: int) -> str:
    """Leave out the middle of a text longer than ``limit`` characters."""
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-(limit // 2) :]}"


def _differing_places(words: list[str], others: list[str]) -> list[tuple[int, int]]:
    """Return the ranges of tokens at which a text differs from another."""
    start = _common(words, others)
    end = _common(words[start:][::-1], others[start:][::-1])
    middle, other_middle = words[start : len(words) - end], others[start : len(others) - end]
    if max(len(middle), len(other_middle)) > COMPARED_WORDS:
        return [(start, len(words) - end)]
    places = [(start, start)]
    for kind, _, _, first, last in SequenceMatcher(None, other_middle, middle, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        if len("".join(words[places[-1][1] : start + first])) < 2 * AROUND:
            places[-1] = places[-1][0], start + last
        else:
            places.append((start + first, start + last))
    return places


def _common(words: list[str], others: list[str]) -> int:
    """Return the number of tokens that both begin with."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(words, others, strict=False))))
