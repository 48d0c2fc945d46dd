"""Interrupts that wait for their turn.

Covers: SIGINT of the main thread while processes are started, while a cell is sent, and while it is waited for.
Does not cover: what an interrupt does to the ranks (``cell_run``).

Raised in the midst of sending, KeyboardInterrupt would leave a cell that runs on some ranks and that nobody waits for.
"""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import StartInterruptedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENT_INTERRUPTS = 3  # that wait for their turn
DEAF_SECONDS = 1.0  # without a look at them, and the next one is raised

_current: Held | None = None  # of the main thread


class Held:
    """Interrupts, as they come and as they are obeyed."""

    def __init__(self) -> None:
        self.pressed = 0
        self.obeyed = 0
        self._heard_at = time.monotonic()
        self.wake: Callable[[], None] = lambda: None  # tells whoever waits that one has come

    @property
    def waiting(self) -> bool:
        """Whether there is one that was not obeyed yet."""
        return self.pressed > self.obeyed

    def on_sigint(self, _number: int, _frame: Any) -> None:
        """Take note; a person who presses again and again while nobody looks at it gets KeyboardInterrupt at once."""
        if self.pressed - self.obeyed < PATIENT_INTERRUPTS:
            self.pressed += 1
        elif time.monotonic() - self._heard_at > DEAF_SECONDS:
            raise KeyboardInterrupt
        self.wake()

    def heard(self) -> None:
        """Say that somebody looks at what was pressed."""
        self._heard_at = time.monotonic()


@contextmanager
def held_interrupts() -> Iterator[Held]:
    """Hold interrupts back, where this thread is the one they would hit; within another such block, that one's.

    Raises
    ------
    KeyboardInterrupt
        At the end of the block, if one came that was not obeyed within.
    """
    global _current  # noqa: PLW0603  (a process has one handler of SIGINT)
    if threading.current_thread() is not threading.main_thread():
        yield Held()
        return
    if _current is not None:
        yield _current
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield Held()  # the program has a handler of its own
        return
    held = _current = Held()
    signal.signal(signal.SIGINT, held.on_sigint)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _current = None
    if held.waiting:
        raise KeyboardInterrupt


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Raise an interrupt that comes meanwhile only at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def raise_interrupted(error: BaseException) -> None:
    """Raise what a person reads whose interrupt has ended a start; nothing of it is left by then."""
    if isinstance(error, KeyboardInterrupt) and not isinstance(error, StartInterruptedError):
        raise StartInterruptedError("the start was interrupted; nothing of it is left running") from None
