"""Defer interrupts of the main thread.

Covers: SIGINT while processes are started, while a cell is sent, and during the wait for it.
Does not cover: the effect of an interrupt on the ranks (``client.cells.cell_run``).

A KeyboardInterrupt raised while a cell is sent would leave it running on some ranks without a thread that waits for it.
"""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .errors import StartInterruptedError
from .protocol.time_limits import DEAF_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENT_INTERRUPTS = 3  # maximum number of pending interrupts

_current: DeferredSigint | None = None  # the deferred interrupts of the main thread


class DeferredSigint:
    """Counts of interrupts that were received and that were handled."""

    def __init__(self) -> None:
        self.pressed = 0
        self.obeyed = 0
        self.is_installed = False  # whether SIGINT calls :meth:`on_sigint`
        self._raises = False
        self._is_withdrawn = False
        self._checked_at = time.monotonic()
        self.wake: Callable[[], None] = lambda: None  # wakes the thread that waits for a cell

    @property
    def waiting(self) -> bool:
        """Whether there is an interrupt that was not handled yet."""
        return self.pressed > self.obeyed

    def on_sigint(self, _number: int, _frame: Any) -> None:
        """Count the interrupt; a further one raises KeyboardInterrupt at once if the pending ones are not checked.

        That is so once ``PATIENT_INTERRUPTS`` are pending and :meth:`mark_checked` was not called for
        ``DEAF_SECONDS``.
        """
        if self._is_withdrawn:
            raises, self._raises, self._is_withdrawn = self._raises, False, False
            if raises:
                raise KeyboardInterrupt
            return
        if self.pressed - self.obeyed < PATIENT_INTERRUPTS:
            self.pressed += 1
            if self._raises:
                self._raises = False
                raise KeyboardInterrupt
        elif time.monotonic() - self._checked_at > DEAF_SECONDS:
            raise KeyboardInterrupt
        self.wake()

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Let an interrupt raise KeyboardInterrupt within the block, e.g. while the user is asked; it counts too."""
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def withdraw(self) -> None:
        """End the main thread's :meth:`raising` block as an interrupt would, without counting one.

        Called on another thread, while the main thread is in the block or leaves it.
        """
        if self.is_installed:
            self._is_withdrawn = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def mark_checked(self) -> None:
        """Record that the pending interrupts are being checked."""
        self._checked_at = time.monotonic()


@contextmanager
def held_interrupts() -> Iterator[DeferredSigint]:
    """Defer interrupts within the block, if this is the main thread; a nested block shares those of the outer one.

    Raises a KeyboardInterrupt at the end of the outermost block, if an interrupt came that was not handled within.
    """
    global _current  # noqa: PLW0603  (a process has one handler of SIGINT)
    if threading.current_thread() is not threading.main_thread():
        yield DeferredSigint()
        return
    if _current is not None:
        yield _current
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield DeferredSigint()  # the program has its own handler
        return
    held = _current = DeferredSigint()
    signal.signal(signal.SIGINT, held.on_sigint)
    held.is_installed = True
    try:
        yield held
    finally:
        held.is_installed = False
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _current = None
    if held.waiting:
        raise KeyboardInterrupt


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer interrupts to the end of the block, and raise KeyboardInterrupt there."""
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
    """Raise a StartInterruptedError in place of a KeyboardInterrupt; call it once nothing of the start is left."""
    if isinstance(error, KeyboardInterrupt) and not isinstance(error, StartInterruptedError):
        raise StartInterruptedError("the start was interrupted; all processes that it had started have ended") from None
