"""Publish a nanny's own messages: node and rank figures, metrics, use of the rank, records that the client requests.

Covers: publishing them without the replay buffer, because a client that attaches later does not need them; whether the
rank was used, so that an unused cluster can end.
Does not cover: a rank's output (``output_batching``), when figures are read
(``features.telemetry.rank.process_stats``), ending the cluster (``client.transport.controller``).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from ...protocol.environment import REPORT_USE
from ...protocol.messages import FIGURES_TOPIC, USED_TOPIC, Used

if TYPE_CHECKING:
    import zmq
    from jupyter_client.session import Session

    from ...protocol.messages import Record
    from .ipc import NannyEnd


class SideChannel:
    """Publish on the nanny's own socket."""

    def __init__(self, pub: zmq.Socket[bytes], session: Session) -> None:
        self._pub = pub
        self._session = session
        self.engine = ""  # the rank's engine, named in every message

    def publish(self, msg_type: str, content: dict[str, Any], topic: bytes = b"asked") -> None:
        """Publish a message to the current subscribers."""
        self._session.send(self._pub, msg_type, content, ident=topic, metadata={"engine": self.engine})

    def publish_figures(self, record: Record) -> None:
        """Publish figures of the rank or of its node."""
        self.publish_packed(record.msg_type, self._session.pack(record.to_content()))

    def publish_packed(self, msg_type: str, data: bytes) -> None:
        """Publish figures, or metrics that the rank logged and ``metric_blocks.pack`` has packed."""
        self._pub.send_multipart([FIGURES_TOPIC + msg_type.encode(), self.engine.encode(), data])


class ActivityReporter:
    """Publish once per period that the rank was used, if there was a cell or a request."""

    def __init__(self, wire: NannyEnd, channel: SideChannel) -> None:
        self._wire, self._channel = wire, channel
        self._reported = 0
        self._pause = float(os.environ.get(REPORT_USE, "0"))
        self.due = time.monotonic() + self._pause if self._pause else None

    def report_due(self) -> None:
        """Publish use, if a report is due and there was any."""
        if self.due is None or time.monotonic() < self.due:
            return
        self.due = time.monotonic() + self._pause
        uses = self._wire.uses()
        if uses != self._reported or uses % 2:
            self._reported = uses
            self._channel.publish(Used.msg_type, {}, USED_TOPIC)
