"""Tests of walking tracebacks and making new ones."""

from __future__ import annotations

import signal
import sys
from types import FrameType, TracebackType

from jupyter_disttrain.rank.kernel.error_chain import line_of, linked, walk

LOOP = "\nfor i in range(10**12):\n    if i < 0:\n        pass"


def test_entry_interrupted_in_the_jump_at_the_end_of_a_loop_has_its_last_line() -> None:
    """Python 3.11 gives no line to that jump, and it is where this loop handles signals."""

    def interrupt(_signal: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code.co_filename == "<loop>":
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.001)
    try:
        exec(compile(LOOP, "<loop>", "exec"), {})
    except KeyboardInterrupt as error:
        entries = list(walk(error.__traceback__))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert line_of(entries[1]) in (2, 3, 4)
    assert [entry.tb_lineno for entry in walk(linked(entries))] == [line_of(entry) for entry in entries]


def test_entry_without_any_line_has_the_first_of_its_function() -> None:
    def here() -> FrameType:
        return sys._getframe()

    here.__code__ = here.__code__.replace(co_linetable=b"")
    frame = here()
    entry = TracebackType(None, frame, frame.f_lasti, -1)
    assert line_of(entry) == frame.f_code.co_firstlineno
