"""Many ranks of one machine, and the one process that forks them.

Covers: 64 ranks from start to end through a notebook, ranks whose forking process was killed, what keeps many small.
Does not cover: what they cost (``benchmarks.overhead.control_plane``).
"""

from __future__ import annotations

import time

from jupyter_disttrain.engine.hellos import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Hellos


def test_a_process_that_was_heard_says_hello_seldom_and_one_that_is_known_never() -> None:
    hellos = Hellos()
    assert hellos.is_due()
    assert hellos.next_at - time.monotonic() <= FIRST_PAUSE_SECONDS
    hellos.was_heard()
    assert hellos.next_at - time.monotonic() > LONGEST_PAUSE_SECONDS  # but again: who has heard it may be gone
    hellos.next_at = 0.0
    hellos.is_known = True
    assert not hellos.is_due()
