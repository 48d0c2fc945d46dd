"""Merge the failures of several ranks.

Covers: which failures are the same, how each rank's failure differs.
Does not cover: ranks that only waited for another (``cell_state``), display (``errors``).

Errors of one type at one line of the cell are one failure: it has one traceback, and for every other rank only the
difference is kept. Failures without a line are the same if they differ only in numbers and addresses.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING

from ...protocol.messages import CellFailure

if TYPE_CHECKING:
    from collections.abc import Iterable

# Incidental differences between ranks: addresses, repetition counts, and the file name that IPython gives the cell.
_INCIDENTAL = re.compile(
    r"0x[0-9a-fA-F]+|\(\d+ times\)|repeated \d+ (?:more )?times|ipykernel_\d+[/\\]\d+\.py|In ?\[\d+\]"
)
PROGRAM_EXIT = "ProgramExit"  # raised for a program in a child process: see features.scripts.subprocess_run
RANK_DIED = "RankDied"
_WITH_OWN_TRACEBACK = {PROGRAM_EXIT, RANK_DIED}  # their last lines are all that is known of them
_NUMBER = re.compile(r"\d+")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_WORD = re.compile(r"\s+|\w+|[^\w\s]")
SHORT_TEXT = 200  # characters; shorter texts are shown whole
AROUND = 40  # characters of context around a difference
COMPARED_WORDS = 500  # longest middle part to compare in detail, in tokens


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
    first = group[0] if is_program else min(group, key=lambda failure: failure.ranks)
    others = sorted((failure for failure in group if failure is not first), key=lambda failure: failure.ranks)
    variants = ((other.ranks[0], _difference(other, first)) for other in others)
    evalue = first.evalue
    if is_program and len(group) > 1:  # the others may have ended because of it
        evalue += f"; rank {group[0].ranks[0]}'s was the first"
    return CellFailure(
        ranks=tuple(sorted(failure.ranks[0] for failure in group)),
        hosts=tuple(dict.fromkeys(each.hosts[0] for each in sorted(group, key=lambda each: each.ranks))),
        ename=first.ename,
        evalue=evalue,
        traceback=first.traceback,
        line=first.line,
        file=first.file,
        time_s=group[0].time_s,
        details=first.details,
        raised_at=first.raised_at,
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
