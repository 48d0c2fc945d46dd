"""Relay the comm messages of a rank's widgets to the notebook.

Covers: a rank's comm messages to the front end, and the front end's to the rank; which progress bars are unfinished.

A rank's comm is opened again in the notebook's kernel under the same id, so that the front end has a kernel for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import comm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ...client.cells.events import CommSent

BAR_MODELS = ("FloatProgressModel", "IntProgressModel")
ENDED_STYLES = ("success", "danger")  # styles that tqdm gives to a closed bar


class CommRelay:
    """Relay comm messages both ways."""

    def __init__(self, send_to_rank: Callable[[int, dict[str, Any], list[Any]], None]) -> None:
        self._send_to_rank = send_to_rank
        self._comms: dict[str, Any] = {}

    def forward(self, event: CommSent) -> None:
        """Forward a rank's message to the front end."""
        content = event.content
        comm_id = content["comm_id"]
        extra = {"data": content.get("data"), "metadata": event.metadata, "buffers": event.buffers}
        if event.msg_type == "comm_open":
            opened = comm.create_comm(target_name=content["target_name"], comm_id=comm_id, **extra)
            opened.on_msg(lambda message: self._return(event.rank, comm_id, message))
            self._comms[comm_id] = opened
            return
        known = self._comms.get(comm_id)
        if known is None:
            return  # opened before this notebook listened
        if event.msg_type == "comm_msg":
            known.send(**extra)
        else:
            known.close(**extra)
            del self._comms[comm_id]

    def _return(self, rank: int, comm_id: str, message: dict[str, Any]) -> None:
        content = {"comm_id": comm_id, "data": message["content"]["data"]}
        self._send_to_rank(rank, content, list(message.get("buffers", ())))


class WidgetBars:
    """The progress bars among the widgets of one cell."""

    def __init__(self) -> None:
        self._states: dict[str, dict[str, Any]] = {}  # by comm

    def take(self, event: CommSent) -> None:
        """Update the bar's state from a rank's message."""
        comm_id, data = event.content["comm_id"], event.content.get("data")
        state = data.get("state") if isinstance(data, dict) else None
        if event.msg_type == "comm_close":
            self._states.pop(comm_id, None)
        elif not isinstance(state, dict):
            return  # the user's own comm may send anything
        elif comm_id in self._states or state.get("_model_name") in BAR_MODELS:
            self._states.setdefault(comm_id, {}).update(state)

    @property
    def has_bar(self) -> bool:
        """Whether a bar has started and is unfinished."""
        return any(map(_goes_on, self._states.values()))


def _goes_on(state: Mapping[str, Any]) -> bool:
    low, value, high = (state.get(name, 0) for name in ("min", "value", "max"))
    if not all(isinstance(each, (int, float)) for each in (low, value, high)):
        return False  # NaN, which JSON lacks, arrives as text
    return bool(low < value < high) and state.get("bar_style") not in ENDED_STYLES
