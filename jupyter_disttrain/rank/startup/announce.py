"""Schedule the hello messages that a new process sends to the client.

Covers: sending often until the first acknowledgement, seldom after it, not at all once the client knows the process.
Does not cover: the message and its socket (``app``, ``rank.nanny.nanny``).

A process's first message may be lost because the client or the connection to it is not ready yet. But if 256 ranks and
their nannies kept repeating their hellos until the last has registered, they would delay each other's start.
"""

from __future__ import annotations

import time

from ...protocol.time_limits import FIRST_PAUSE_SECONDS, HELLOS_REPEAT_SECONDS, LONGEST_PAUSE_SECONDS


class Hellos:
    """The schedule of one process's hello messages."""

    def __init__(self) -> None:
        self.is_known = False  # the client knows the process: send no more
        self.next_at = 0.0  # time of the next hello, by ``time.monotonic``
        self._pause = FIRST_PAUSE_SECONDS

    def is_due(self) -> bool:
        """Whether to send a hello now; if so, schedule the next one."""
        now = time.monotonic()
        if self.is_known or now < self.next_at:
            return False
        self.next_at = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return True

    def delay(self) -> None:
        """Delay the next hello, which the client has acknowledged; may be called from any thread."""
        self.next_at = time.monotonic() + HELLOS_REPEAT_SECONDS
