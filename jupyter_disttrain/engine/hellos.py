"""When a new process says hello to the client.

Covers: soon again while nobody seems to listen, seldom once it was heard, no more once it is known.
Does not cover: what is said, and on which socket (``app``, ``nanny``).

The first words of a process may be lost: the client, or the way to it, may not be there yet. But 256 ranks and their
nannies that repeat theirs until the last of them has come keep each other from coming.
"""

from __future__ import annotations

import time

FIRST_PAUSE_SECONDS = 0.05  # then twice as long each time
LONGEST_PAUSE_SECONDS = 1.0
HEARD_SECONDS = 5.0  # from being heard to the next hello: who has heard it may go, and another client come


class Hellos:
    """The hellos of one process."""

    def __init__(self) -> None:
        self.is_known = False  # nothing more has to be said
        self.next_at = 0.0  # as ``time.monotonic`` counts
        self._pause = FIRST_PAUSE_SECONDS

    def is_due(self) -> bool:
        """Whether it is time to say hello; then it is taken as said."""
        now = time.monotonic()
        if self.is_known or now < self.next_at:
            return False
        self.next_at = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return True

    def was_heard(self) -> None:
        """Wait long before the next one; may be called from any thread."""
        self.next_at = time.monotonic() + HEARD_SECONDS
