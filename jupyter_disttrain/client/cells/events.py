"""Define the events of a cell, for its state machine and its listeners, and read them from the ranks' messages.

Covers: output, displays, comms, questions to the user, idle messages, deaths, errors of logs.
Does not cover: reading replies to cells (``executor``), vitals and metrics (``features.telemetry.client``).

Every event has the rank and the time, in seconds since the epoch, at which it happened or arrived.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...protocol.messages import LogTrouble, OutputElided, Question, QuestionEnded, Record
from ...protocol.rank_death import RankDeath

if TYPE_CHECKING:
    from collections.abc import Callable


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
class Asked(Event):
    """The rank asks the user a question."""

    record: Question


@dataclass(frozen=True, slots=True, kw_only=True)
class AskingEnded(Event):
    """The rank waits for an answer no more."""

    record: QuestionEnded


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


# By message type: the event that holds a record, and the record.
_OF_RECORDS: dict[str, tuple[Callable[..., Event], type[Record]]] = {
    OutputElided.msg_type: (Elided, OutputElided),
    Question.msg_type: (Asked, Question),
    QuestionEnded.msg_type: (AskingEnded, QuestionEnded),
    LogTrouble.msg_type: (LogFailed, LogTrouble),
    RankDeath.msg_type: (Died, RankDeath),
}


def event_from(rank: int, message: dict[str, Any]) -> Event | None:
    """Return the event for a message that a rank has published on iopub; None for messages that no cell needs."""
    content = message["content"]
    event: Callable[..., Event]
    fields: dict[str, Any]
    match message["header"]["msg_type"]:
        case "stream":
            event, fields = Printed, {"stream": content["name"], "text": content["text"]}
        case "display_data" | "execute_result" | "update_display_data" as kind:
            display_id = content.get("transient", {}).get("display_id")
            shown = {"data": content["data"], "metadata": content["metadata"]}
            event, fields = Displayed, {"kind": kind, "display_id": display_id, **shown}
        case "comm_open" | "comm_msg" | "comm_close" as msg_type:
            sent = {"content": content, "metadata": message["metadata"]}
            event, fields = CommSent, {"msg_type": msg_type, "buffers": list(map(bytes, message["buffers"])), **sent}
        case "clear_output":
            event, fields = Cleared, {"wait": content["wait"]}
        case "status" if content["execution_state"] == "idle":
            event, fields = OutputEnded, {}
        case msg_type if msg_type in _OF_RECORDS:
            event, record = _OF_RECORDS[msg_type]
            fields = {"record": record.from_content(content)}
        case _:
            return None
    return event(rank=rank, time_s=time.time(), **fields)
