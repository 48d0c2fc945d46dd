"""What Python writes down by itself when it crashes, or when it is asked where it is.

Covers: having faulthandler do it, and keep doing it.
Does not cover: reading it (``witness``).

faulthandler sets its handlers past the signal module, which goes on saying that they are the default's. A library that
puts all handlers back as it has found them, as Lightning does after each fit, would take them away, and who asks a
rank where it is would kill it then.
"""

from __future__ import annotations

import faulthandler
import functools
import signal
from typing import TYPE_CHECKING, Any

from .witness import STACK_SIGNAL

if TYPE_CHECKING:
    from .wire import Wire

OURS = {STACK_SIGNAL, signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL}


_wire: Wire | None = None


def enable_reports() -> None:
    """Report crashes again, whatever a program has done about it."""
    if _wire is not None:
        faulthandler.enable(file=_wire.crash_file, all_threads=False)
        faulthandler.register(STACK_SIGNAL, file=_wire.stack_file, all_threads=False)


def begin_reports(wire: Wire) -> None:
    """From now on name the cell's line after a crash in C code, and on request."""
    global _wire  # noqa: PLW0603
    _wire = wire
    enable_reports()
    original = signal.signal

    @functools.wraps(original)
    def set_handler(signalnum: Any, handler: Any) -> Any:
        if signalnum in OURS and handler == signal.SIG_DFL:
            return signal.getsignal(signalnum)  # it is what the signal module takes for the default
        return original(signalnum, handler)

    signal.signal = set_handler
