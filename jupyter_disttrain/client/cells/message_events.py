"""Convert the messages that ranks publish on iopub to events.

Covers: output, displays, comms, idle messages, deaths, errors of logs.
Does not cover: replies to cells (``executor``), vitals and metrics (``features.telemetry.client``).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ...protocol.messages import LogTrouble, OutputElided, RankDeath
from .events import Cleared, CommSent, Died, Displayed, Elided, Event, LogFailed, OutputEnded, Printed

if TYPE_CHECKING:
    from collections.abc import Callable

_DISPLAYS = ("display_data", "execute_result", "update_display_data")
_COMMS = ("comm_open", "comm_msg", "comm_close")


def event_from(rank: int, message: dict[str, Any]) -> Event | None:
    """Return the event for a message; None for messages that no cell needs."""
    msg_type: str = message["header"]["msg_type"]
    content = message["content"]
    now = time.time()
    if msg_type == "stream":
        return Printed(rank=rank, time_s=now, stream=content["name"], text=content["text"])
    if msg_type in _DISPLAYS:
        display_id = content.get("transient", {}).get("display_id")
        return Displayed(
            rank=rank,
            time_s=now,
            kind=msg_type,
            data=content["data"],
            metadata=content["metadata"],
            display_id=display_id,
        )
    if msg_type in _COMMS:
        return CommSent(
            rank=rank,
            time_s=now,
            msg_type=msg_type,
            content=content,
            metadata=message["metadata"],
            buffers=[bytes(buffer) for buffer in message["buffers"]],
        )
    reader = _READERS.get(msg_type)
    return None if reader is None else reader(rank, now, content)


def _silent(rank: int, now: float, content: dict[str, Any]) -> Event | None:
    return OutputEnded(rank=rank, time_s=now) if content["execution_state"] == "idle" else None


_READERS: dict[str, Callable[[int, float, dict[str, Any]], Event | None]] = {
    "status": _silent,
    "clear_output": lambda rank, now, content: Cleared(rank=rank, time_s=now, wait=content["wait"]),
    OutputElided.msg_type: lambda rank, now, content: Elided(
        rank=rank, time_s=now, record=OutputElided.from_content(content)
    ),
    LogTrouble.msg_type: lambda rank, now, content: LogFailed(
        rank=rank, time_s=now, record=LogTrouble.from_content(content)
    ),
    RankDeath.msg_type: lambda rank, now, content: Died(rank=rank, time_s=now, record=RankDeath.from_content(content)),
}
