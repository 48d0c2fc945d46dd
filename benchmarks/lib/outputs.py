"""Compute a cell's final output from the messages of a kernel, and check the lines in it.

Covers: the outputs as nbclient builds them, their text, the rank in the label of each line.
Does not cover: receiving the messages (kernel).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_LINE = re.compile(r"rank (\d+) line (\d+)")
_LABEL = re.compile(r"(?:ranks?|stdout|stderr)\b\W{0,3}([\d][\d,\-]*)|^\W{0,3}([\d][\d,\-]*)\W", re.IGNORECASE)


def strip_ansi(text: str) -> str:
    """Remove terminal control sequences."""
    return _ANSI.sub("", text)


def text_of(kind: str, content: dict[str, Any]) -> str:
    """Return the plain text of one message, without control sequences."""
    if kind == "stream":
        return strip_ansi(content["text"])
    if kind in {"display_data", "update_display_data", "execute_result"}:
        return strip_ansi(str(content.get("data", {}).get("text/plain", "")))
    if kind == "error":
        return strip_ansi("\n".join([*content.get("traceback", ()), content.get("evalue", "")]))
    return ""


def final_text(messages: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """Return the text of a cell's output after its end.

    As in nbclient, streams are joined, a display with an id shows its last update, and ``clear_output`` clears.
    """
    blocks: list[list[str]] = []  # one per output; the parts of a stream are joined once, at the end
    stream: str | None = None
    by_id: dict[str, list[list[str]]] = {}
    clear_next = False
    for kind, content in messages:
        if kind == "clear_output":
            clear_next = bool(content.get("wait"))
            if not clear_next:
                blocks, stream = [], None
            continue
        display_id = content.get("transient", {}).get("display_id")
        if kind == "update_display_data":
            for block in by_id.get(display_id, ()):
                block[:] = [text_of(kind, content)]
            continue
        if kind not in {"stream", "display_data", "execute_result", "error"}:
            continue
        if clear_next:
            blocks, stream, clear_next = [], None, False
        if kind == "stream" and stream == content["name"]:
            blocks[-1].append(text_of(kind, content))
            continue
        stream = content["name"] if kind == "stream" else None
        blocks.append([text_of(kind, content)])
        if display_id is not None:
            by_id.setdefault(display_id, []).append(blocks[-1])
    return "\n".join("".join(block).rstrip("\n") for block in blocks)


@dataclass(slots=True)
class LineCheck:
    """Counts of the lines that the ranks printed, as found in a cell's output."""

    ranks: int
    lines_per_rank: int
    seen: dict[int, list[int]] = field(default_factory=dict)
    mislabelled: int = 0

    @property
    def present(self) -> int:
        return sum(len(set(lines)) for lines in self.seen.values())

    @property
    def expected(self) -> int:
        return self.ranks * self.lines_per_rank

    @property
    def ordered(self) -> bool:
        return all(lines == sorted(lines) for lines in self.seen.values())

    @property
    def problem(self) -> str:
        """Describe what is wrong; empty if nothing is."""
        found = []
        total = sum(len(lines) for lines in self.seen.values())
        if self.present != self.expected:
            found.append(f"{self.expected - self.present} of {self.expected} lines missing")
        if total > self.present:
            found.append(f"{total - self.present} lines duplicated")
        if not self.ordered:
            found.append("out of order within a rank")
        if self.mislabelled:
            found.append(f"{self.mislabelled} lines without the label of their rank")
        return ", ".join(found)


def _labelled_ranks(text: str) -> set[int]:
    match = _LABEL.search(text)
    if match is None:
        return set()
    ranks: set[int] = set()
    for part in filter(None, (match[1] or match[2]).split(",")):
        first, _, last = part.partition("-")
        if first:
            ranks.update(range(int(first), int(last or first) + 1))
    return ranks


def check_lines(text: str, ranks: int, lines_per_rank: int) -> LineCheck:
    """Check that every ``rank R line I`` is present once, in order, and labelled with R.

    A label is a prefix of the line or a heading above it.
    """
    check = LineCheck(ranks, lines_per_rank)
    heading: set[int] = set()
    for line in text.splitlines():
        match = _LINE.search(line)
        if match is None:
            heading = _labelled_ranks(line) or heading
            continue
        rank = int(match[1])
        label = _labelled_ranks(line[: match.start()])
        if label:
            heading = label  # some tools label only the first of several lines
        if rank not in heading:
            check.mislabelled += 1
        check.seen.setdefault(rank, []).append(int(match[2]))
    return check
