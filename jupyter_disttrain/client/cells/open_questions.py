"""Decide which question of a cell's ranks the user is asked next, and who gets the answer.

Covers: ``input()`` on several ranks, debuggers on several ranks, the commands ``cast`` and ``rank`` at their prompts,
prompts with the rank's label.
Does not cover: asking (the cell's listener), waiting for the answer on the rank (``rank.user_input.questions``).

The user sees one prompt at a time. After a command the debugger that got it asks next, unless its code does not come
back in time, e.g. because it waits for the other ranks.

:class:`OpenQuestions` has no I/O: events and answers in, the next question out.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING

from ...protocol.ranks import label_ranks
from ...protocol.time_limits import DEBUGGER_TURN_SECONDS, FIRST_QUESTION_SECONDS, INTERRUPTED_QUESTION_SECONDS
from .events import Asked, AskingEnded, Died, Replied

if TYPE_CHECKING:
    from collections.abc import Collection

    from .events import Event

_CAST = re.compile(r"\s*cast\s+(?P<command>\S.*)", re.DOTALL)
_RANK = re.compile(r"\s*rank\s+(?P<rank>\d+)\s*")


def prompt_of(question: Asked) -> str:
    """Return the prompt that the user sees, with the rank's label."""
    between = " " if question.record.is_debugger else ": "
    return f"rank {question.rank}{between}{question.record.prompt}"


class OpenQuestions:
    """The questions of one cell that wait for an answer."""

    def __init__(self) -> None:
        self._open: dict[int, Asked] = {}  # by rank
        self._turn: int | None = None  # the rank whose debugger asks next
        self._awaited: set[int] = set()  # ranks whose debuggers got a command and have not asked since
        self._until = -math.inf  # how long to wait for them
        self._since: float | None = None  # since when questions are open; None while none is
        self._interrupted: dict[int, Asked] = {}  # questions that an interrupt is about to end
        self._interrupt_until = -math.inf  # how long to wait for that
        self._answered: Counter[int] = Counter()  # questions of each rank
        self._hint = ""
        self._hinted: list[int] = []  # the ranks of the last hint

    def apply(self, event: Event) -> None:
        """Apply an event of the cell."""
        rank = event.rank
        if isinstance(event, Asked):
            self._open[rank] = event
            self._awaited.discard(rank)
        elif isinstance(event, AskingEnded):
            if rank in self._open and self._open[rank].record.number == event.record.number:
                del self._open[rank]
        elif isinstance(event, (Replied, Died)):
            self._open.pop(rank, None)
            self._awaited.discard(rank)

    def is_open(self, question: Asked) -> bool:
        """Whether a question still waits for an answer."""
        return self._open.get(question.rank) is question

    def next(self, now: float, running: Collection[int]) -> Asked | None:
        """Return the question to ask now; None if there is none, or others that come first may follow soon."""
        ending = self._interrupted if now < self._interrupt_until else {}
        asked = {rank: each for rank, each in self._open.items() if ending.get(rank) is not each}
        if not asked:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        is_first = now < self._since + FIRST_QUESTION_SECONDS and len(asked) < len(running)
        if (is_first and self._turn not in asked) or (self._awaited and now < self._until):
            return None
        self._awaited.clear()
        return asked[self._turn if self._turn in asked else min(asked, key=lambda rank: (self._answered[rank], rank))]

    def on_interrupt(self, now: float) -> None:
        """Ask none of these questions again soon: the ranks are interrupted, which ends them."""
        self._interrupted, self._interrupt_until = dict(self._open), now + INTERRUPTED_QUESTION_SECONDS

    def hint(self, question: Asked) -> str:
        """Return a line to show above the prompt; empty if there is none."""
        hint, self._hint = self._hint, ""
        others = [rank for rank in self._debuggers() if rank != question.rank] if question.record.is_debugger else []
        if others and others != self._hinted and not hint:
            wait = "waits" if len(others) == 1 else "wait"
            hint = (
                f"{label_ranks(others)} also {wait} in a debugger: 'cast COMMAND' sends a command to all, "
                f"'rank {others[0]}' switches to rank {others[0]}"
            )
            self._hinted = others
        return hint

    def _debuggers(self) -> list[int]:
        return sorted(rank for rank, each in self._open.items() if each.record.is_debugger)

    def take_answer(self, question: Asked, text: str, now: float) -> dict[int, tuple[int, str]]:
        """Take the user's answer; return what each rank gets: the number of its question, and a text."""
        if not self.is_open(question):
            return {}
        self._answered[question.rank] += 1
        if not question.record.is_debugger:
            return {question.rank: (self._open.pop(question.rank).record.number, text)}
        if turn := _RANK.fullmatch(text):
            self._turn_to(int(turn["rank"]))
            return {}
        cast = _CAST.fullmatch(text)
        ranks = self._debuggers() if cast else [question.rank]
        self._turn = question.rank
        self._awaited, self._until = set(ranks), now + DEBUGGER_TURN_SECONDS
        command = cast["command"] if cast else text
        return {rank: (self._open.pop(rank).record.number, command) for rank in ranks}

    def _turn_to(self, rank: int) -> None:
        waiting = self._debuggers()
        if rank in waiting:
            self._turn = rank
        else:
            self._hint = f"rank {rank} doesn't wait in a debugger; {label_ranks(waiting)} can be named"
