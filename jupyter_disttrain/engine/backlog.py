"""What a rank said in its present cell, kept for who joins the cluster later.

Covers: keeping published messages within a limit, handing them out.
Does not cover: what was said before that cell; all text is in the rank's log.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import zmq

LIMIT_BYTES = 16 << 20


class Backlog:
    """Publishes on a socket, and keeps what it has published since the cell began; the oldest goes first.

    Parameters
    ----------
    keeps
        Whether anybody may join later: otherwise it only publishes.
    """

    def __init__(self, socket: zmq.Socket[bytes], *, keeps: bool) -> None:
        self._socket = socket
        self.keeps = keeps
        self._kept: deque[list[bytes]] = deque()
        self._size = 0
        self._lost = 0

    def begin_cell(self) -> None:
        """Forget what was said in earlier cells."""
        self._kept.clear()
        self._size = self._lost = 0

    def send_multipart(self, frames: Sequence[Any], *_args: Any, **_kwargs: Any) -> None:
        """Publish and keep a message."""
        self._socket.send_multipart(frames)
        if not self.keeps:
            return
        message = [bytes(frame) for frame in frames]
        self._kept.append(message)
        self._size += sum(map(len, message))
        while self._size > LIMIT_BYTES:
            self._size -= sum(map(len, self._kept.popleft()))
            self._lost += 1

    def dump(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return how many frames each message has with how many messages are lost, and all frames in a row."""
        told = {"counts": [len(message) for message in self._kept], "lost": self._lost}
        return told, [frame for message in self._kept for frame in message]
