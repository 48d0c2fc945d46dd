"""Widgets that a rank makes, shown in the notebook.

Covers: a rank's comm messages to the front end, and the front end's to the rank.

A rank's comm is opened again in the notebook's kernel under the same id, so the front end talks to a kernel that it
knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import comm

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..cluster.events import CommSent


class CommRelay:
    """Carry comm messages both ways."""

    def __init__(self, send_to_rank: Callable[[int, dict[str, Any], list[Any]], None]) -> None:
        self._send_to_rank = send_to_rank
        self._comms: dict[str, Any] = {}

    def forward(self, event: CommSent) -> None:
        """Pass a rank's message on to the front end."""
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

    def close(self) -> None:
        """Forget the comms: their ranks are gone."""
        self._comms.clear()
