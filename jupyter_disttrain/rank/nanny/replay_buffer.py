"""Keep the messages that a rank published since its latest cell began, for a client that attaches later.

Covers: keeping published messages up to a limit, returning them.
Does not cover: output of earlier cells; all text is in the rank's log.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import zmq

LIMIT_BYTES = 16 << 20


class ReplayBuffer:
    """Publish on a socket and keep the messages since the cell began; beyond ``LIMIT_BYTES`` the oldest are dropped."""

    def __init__(self, socket: zmq.Socket[bytes], *, keeps: bool) -> None:
        self._socket = socket
        self.keeps = keeps  # a client may attach later; otherwise only publish
        self._kept: deque[list[bytes]] = deque()
        self._size = 0
        self._lost = 0

    def begin_cell(self) -> None:
        """Drop the messages of earlier cells."""
        self._kept.clear()
        self._size = self._lost = 0

    def send_multipart(self, frames: Sequence[Any], *_args: Any, is_kept: bool = True, **_kwargs: Any) -> None:
        """Publish a message, and keep it unless only the present client can use it."""
        self._socket.send_multipart(frames)
        if not self.keeps or not is_kept:
            return
        message = [bytes(frame) for frame in frames]
        self._kept.append(message)
        self._size += sum(map(len, message))
        while self._size > LIMIT_BYTES:
            self._size -= sum(map(len, self._kept.popleft()))
            self._lost += 1

    def dump(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return the number of frames of each message and the number of dropped messages, and all frames in a list."""
        content = {"counts": [len(message) for message in self._kept], "lost": self._lost}
        return content, [frame for message in self._kept for frame in message]
