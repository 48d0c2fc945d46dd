"""Publish a nanny's own messages: node and rank figures, metrics, use of the rank, records that the client requests.

Covers: publishing them without the replay buffer, because a client that attaches later does not need them.
Does not cover: a rank's output (``output_batching``), when figures are read
(``features.telemetry.rank.process_stats``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...protocol.messages import FIGURES_TOPIC, METRICS, USED_TOPIC, Used

if TYPE_CHECKING:
    import zmq
    from jupyter_client.session import Session

    from ...protocol.messages import Record


class SideChannel:
    """Publish on the nanny's own socket."""

    def __init__(self, pub: zmq.Socket[bytes], session: Session) -> None:
        self._pub = pub
        self._session = session
        self.engine = ""  # the rank's engine, named in every message

    def publish(self, msg_type: str, content: dict[str, Any], topic: bytes = b"asked") -> None:
        """Publish a message to the current subscribers."""
        self._session.send(self._pub, msg_type, content, ident=topic, metadata={"engine": self.engine})

    def publish_use(self) -> None:
        """Publish that the rank is used."""
        self.publish(Used.msg_type, {}, USED_TOPIC)

    def publish_figures(self, record: Record) -> None:
        """Publish figures of the rank or of its node."""
        self._send(record.msg_type, self._session.pack(record.to_content()))

    def publish_metrics(self, data: bytes) -> None:
        """Publish metrics that the rank logged, packed by ``metric_blocks.pack``."""
        self._send(METRICS, data)

    def _send(self, msg_type: str, data: bytes) -> None:
        self._pub.send_multipart([FIGURES_TOPIC + msg_type.encode(), self.engine.encode(), data])
