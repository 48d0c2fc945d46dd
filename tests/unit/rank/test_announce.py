"""How often a rank process announces itself."""

from __future__ import annotations

import time

from jupyter_disttrain.rank.startup.announce import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Hellos


def test_hello_is_rare_after_a_receipt_and_stops_after_registration() -> None:
    hellos = Hellos()
    assert hellos.is_due()
    assert hellos.next_at - time.monotonic() <= FIRST_PAUSE_SECONDS
    hellos.delay()
    assert hellos.next_at - time.monotonic() > LONGEST_PAUSE_SECONDS  # but it is repeated: the receiver may have exited
    hellos.next_at = 0.0
    hellos.is_known = True
    assert not hellos.is_due()
