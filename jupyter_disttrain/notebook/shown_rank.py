"""Decide which of several stopped ranks a front end shows that shows one stopped thread.

The first rank that stops is shown, and stays so while it is stepped through. If a step does not end in time, because
the rank waits for others, or if the rank goes on for another reason, the lowest of those that are stopped is shown.

:class:`ShownRank` has no I/O: events in, events for the front end out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..features.debugger.client import FIRST_THREAD

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..features.debugger.client import Message


class ShownRank:
    """The stopped rank that a front end shows; ``rank`` is None while it shows none."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self._steps = 0  # counts the steps of the shown rank that have been asked for
        self._is_stepping = False  # it goes on until its step ends

    def take(self, rank: int, event: Message, stopped: Mapping[int, Message]) -> list[Message]:
        """Take an event of a rank; ``stopped`` has the bodies of the events of all ranks that are stopped now."""
        if event["event"] != "stopped":
            return self._next(stopped) if rank == self.rank else []
        if self.rank not in (None, rank) and (self._is_stepping or self.rank in stopped):
            return []
        self.rank, self._is_stepping = rank, False
        return [event]

    def again(self, stopped: Mapping[int, Message]) -> list[Message]:
        """Have the front end read the frames of all stopped ranks again, as others have stopped since."""
        if self._is_stepping or self.rank is None or self.rank not in stopped:
            return []
        return [_stopped(stopped[self.rank])]

    def look_at(self, rank: int, stopped: Mapping[int, Message]) -> None:
        """Show a rank of which the user has chosen a frame."""
        if rank in stopped:
            self.rank, self._is_stepping = rank, False

    def step(self, rank: int) -> int:
        """Expect that a rank stops again; return the number of this step."""
        self.rank, self._is_stepping = rank, True
        self._steps += 1
        return self._steps

    def pass_turn(self, step: int, stopped: Mapping[int, Message]) -> list[Message]:
        """Show another rank if the shown one has not stopped after this step."""
        is_under_way = self._is_stepping and step == self._steps and self.rank not in stopped
        return self._next(stopped) if is_under_way else []

    def go_on(self) -> None:
        """Show none: the user has let all ranks go on."""
        self.rank, self._is_stepping = None, False

    def _next(self, stopped: Mapping[int, Message]) -> list[Message]:
        before, self.rank, self._is_stepping = self.rank, min(stopped, default=None), False
        if self.rank is not None:
            return [_stopped(stopped[self.rank])]
        body = {"threadId": FIRST_THREAD + (before or 0), "allThreadsContinued": False}
        return [{"type": "event", "event": "continued", "body": body}]


def _stopped(body: Message) -> Message:
    return {"type": "event", "event": "stopped", "body": body}
