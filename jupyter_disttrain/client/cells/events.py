"""Define the events of a cell, for its state machine and its listeners.

Every event has the rank and the time, in seconds since the epoch, at which it happened or arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...protocol.messages import LogTrouble, OutputElided, RankDeath


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event of one rank."""

    rank: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed(Event):
    """Text on stdout or stderr; lines may be unfinished."""

    stream: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Displayed(Event):
    """A rich display, a result, or an update of a display."""

    kind: str  # "display_data", "execute_result", "update_display_data"
    data: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared(Event):
    """A call of ``clear_output``."""

    wait: bool  # clear only when the next output comes


@dataclass(frozen=True, slots=True, kw_only=True)
class CommSent(Event):
    """A widget's message to the front end."""

    msg_type: str
    content: dict[str, Any]
    metadata: dict[str, Any]
    buffers: list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Elided(Event):
    """The rank printed more than is sent; the rest is in its log."""

    record: OutputElided


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFailed(Event):
    """The rank's log can't be written."""

    record: LogTrouble


@dataclass(frozen=True, slots=True, kw_only=True)
class Replied(Event):
    """The rank ended the cell."""

    content: dict[str, Any]
    buffers: list[Any]
    quiet: bool  # the rank published nothing in this cell, so no OutputEnded follows


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputEnded(Event):
    """All output of the rank in this cell has arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Died(Event):
    """The rank's process ended."""

    record: RankDeath
