"""Have faulthandler write the stack when Python crashes or receives the stack signal.

Covers: installing faulthandler's handlers and keeping them installed; a forked child's report, which goes to stderr.
Does not cover: reading the stacks (``rank.nanny.exit_report``).

faulthandler bypasses the signal module, which still reports the default handlers. A library that restores all handlers
as it found them, as Lightning does after each fit, would remove faulthandler's; the stack signal would then kill the
rank.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
from typing import TYPE_CHECKING, Any

from .nanny.exit_report import STACK_SIGNAL

if TYPE_CHECKING:
    from .nanny.ipc import Wire

OURS = {STACK_SIGNAL, signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL}


_wire: Wire | None = None


def enable_reports() -> None:
    """Install faulthandler's handlers, also if a program has disabled them."""
    if _wire is not None:
        faulthandler.enable(file=_wire.crash_file, all_threads=False)
        faulthandler.register(STACK_SIGNAL, file=_wire.stack_file, all_threads=False)


def _report_on_stderr() -> None:
    """Write the crash of a forked child to its stderr: in the file it would be taken for the rank's own."""
    global _wire  # noqa: PLW0603
    _wire = None
    faulthandler.enable(file=2, all_threads=False)


def begin_reports(wire: Wire) -> None:
    """Write stacks after a crash in C code and on request from now on, and protect the handlers from being replaced."""
    global _wire  # noqa: PLW0603
    _wire = wire
    enable_reports()
    os.register_at_fork(after_in_child=_report_on_stderr)
    original = signal.signal

    @functools.wraps(original)
    def set_handler(signalnum: Any, handler: Any) -> Any:
        if signalnum in OURS and handler == signal.SIG_DFL:
            return signal.getsignal(signalnum)  # the signal module takes faulthandler's handler for the default
        return original(signalnum, handler)

    signal.signal = set_handler
