"""Defer interrupts that arrive where KeyboardInterrupt would do lasting harm.

Covers: deferring an interrupt until the running code can be interrupted.
Does not cover: what an interrupt does (``rank.kernel.kernel``), what an interrupted import leaves behind
(``cut_imports``).

KeyboardInterrupt is raised wherever the main thread happens to be. In some places that does lasting harm:

- Python drops a package whose import was interrupted, but not its submodules that had been imported: the next import
  finds these and makes a package without them. Larger parts of torch are imported by the first step of a training loop
  and the first ``torch.compile``; interrupted there, both would fail until the rank is replaced. So the import of a
  library is not interrupted, however often the user presses stop, until ``CUT_AFTER_SECONDS`` after the first press:
  the next press then interrupts it. The user's own modules, whose import may be a whole training run, are interrupted
  at once.
- ``logging`` and ``threading`` acquire locks in Python code, one step before the ``try`` that releases them.
  Interrupted there, the lock is never released, and the thread that releases stuck ranks would wait for it.
- A DataLoader that is interrupted while it starts or ends its workers leaves some behind.
- Python only prints what is raised in ``__del__``, in the callback of a weak reference, or in the functions that run
  around a fork: the interrupt is lost. ``__del__`` is not interrupted; an interrupt that was lost elsewhere is raised
  again at the next line of what runs then.
- Between two statements of a cell IPython's own code runs. Interrupted there, the error would have no line of the cell,
  so the interrupt is raised at the first line of the next statement.
- This package's own code, which a cell calls when it prints, would be left half done.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import signal
import sys
import sysconfig
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell

from ...protocol.time_limits import CUT_AFTER_SECONDS, DEFERRED_IMPORT_POLL_SECONDS, LONGEST_SECONDS
from ..user_code import CELL, is_cell, is_own

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from ..cell_started import CellStarted

INSTALLED = re.compile(r"/(site|dist)-packages/")
PACKAGE = str(Path(__file__).parents[2])
_TRACER, _DEBUGGER = (f"{PACKAGE}/features/debugger/rank/{name}.py" for name in ("tracer", "debugger"))
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_RUN_STATEMENTS = InteractiveShell.run_ast_nodes.__code__
# Functions that an interrupt may end.
WAITS = ("_wait_for_program", "_wait_for_mpi", "_wait_for_command", "wait_for_staging", "wait_for_build")
FOR_USER = "_wait_for_answer"  # the function that waits for the user, which an interrupt ends wherever it was called


_WHOLE = {  # functions that must not be interrupted, by a part of their file's name; none for all functions
    logging.__file__: (),
    threading.__file__: ("__enter__", "__exit__"),
    "/multiprocessing/": ("start", "_Popen", "__init__", "_launch"),
    "torch/utils/data/dataloader.py": ("__init__", "_shutdown_workers"),
}


class InterruptDeferral:
    """Decide, in the handler of SIGINT, whether an interrupt has to be deferred.

    The handler may run during any code, its own included, so it takes no lock and starts no thread.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._since: float | None = None  # when the deferred interrupt arrived
        self._is_overdue = False
        self._limits: queue.SimpleQueue[tuple[float, float]] = queue.SimpleQueue()  # put() is safe in a signal handler
        self._turns = threading.Lock()  # between sending an overdue signal and the start of a cell
        self._on_call: Callable[[FrameType, str, Any], Any] | None = None  # Python's trace function, while it is ours
        self._report_unraisable = sys.unraisablehook
        sys.unraisablehook = self._on_unraisable
        threading.Thread(target=self._watch, name="interrupt deferral", daemon=True).start()

    def drop_interrupt(self, _cell: CellStarted) -> None:
        """Drop an interrupt of an earlier cell; SIGINT must have no effect while this is called."""
        self._stop_tracing()
        with self._turns:
            self._since, self._is_overdue = None, False

    @property
    def waits(self) -> bool:
        """Whether an interrupt is deferred until the running code has been left."""
        return self._since is not None

    def puts_off(self, frame: FrameType | None) -> bool:
        """Return whether to defer the interrupt; the handler is called again once the running code has been left."""
        if os.getpid() != self._pid:
            return False  # a forked child has no watching thread
        is_overdue, self._is_overdue = self._is_overdue, False
        place = _place(frame)
        if place is None or self._may_cut_off(place, is_overdue=is_overdue):
            self._stop_tracing()
            self._since = None
            return False
        is_first = self._since is None
        if self._since is None:
            self._since = time.monotonic()
        if is_first or is_overdue:
            limit_s = DEFERRED_IMPORT_POLL_SECONDS if place.is_import else LONGEST_SECONDS
            self._limits.put((self._since, time.monotonic() + limit_s))
        if not self._is_tracing:
            self._trace(place)
        return True

    def is_bad_moment(self, frame: FrameType | None) -> bool:
        """Return whether an exception raised now would do lasting harm."""
        return _place(frame) is not None

    def _may_cut_off(self, place: Place, *, is_overdue: bool) -> bool:
        """Return whether code that should not be interrupted has had its time."""
        if not place.is_import:
            return is_overdue
        is_late = self._since is not None and time.monotonic() - self._since >= CUT_AFTER_SECONDS
        return is_late and not is_overdue

    def _on_unraisable(self, unraisable: Any) -> None:
        """Raise an interrupt again that Python would only print."""
        caller = sys._getframe().f_back  # noqa: SLF001  (documented as such)
        is_lost = issubclass(unraisable.exc_type, KeyboardInterrupt) and os.getpid() == self._pid
        if not is_lost or caller is None or threading.current_thread() is not threading.main_thread():
            self._report_unraisable(unraisable)
        elif self._since is None:
            self._since = time.monotonic()
            self._limits.put((self._since, self._since + DEFERRED_IMPORT_POLL_SECONDS))
            self._trace(Place(caller))

    # Tracing, to be called when the code has been left

    def _trace(self, place: Place) -> None:
        if sys.gettrace() is not None:
            return  # a debugger's; the limit remains

        def on_event(frame: FrameType, event: str, _argument: Any) -> Any:
            if event in ("line", "opcode"):
                self._stop_tracing()
                frame.f_trace = None
                self._since = None
                handler = signal.getsignal(signal.SIGINT)
                if callable(handler):
                    handler(signal.SIGINT, frame)
                return None  # the return value would be traced on
            return on_event

        def on_call(frame: FrameType, _event: str, _argument: Any) -> Any:
            return on_event if place.is_between and is_statement(frame) else None

        self._traced, self._on_call = place.caller, on_call
        place.caller.f_trace, place.caller.f_trace_opcodes = on_event, True
        sys.settrace(on_call)

    @property
    def _is_tracing(self) -> bool:
        return self._on_call is not None and sys.gettrace() is self._on_call

    def _stop_tracing(self) -> None:
        if self._is_tracing:
            sys.settrace(None)
            self._traced.f_trace, self._traced.f_trace_opcodes = None, False
            self._on_call = None
            del self._traced

    def _watch(self) -> None:
        while True:
            since, until = self._limits.get()
            time.sleep(max(0.0, until - time.monotonic()))
            with self._turns:
                if self._since == since:
                    self._is_overdue = True
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Place:
    """Code that should not be interrupted."""

    caller: FrameType  # the frame that called it
    is_import: bool = False  # the import of a library
    is_between: bool = False  # between two statements of a cell; the next one is such a caller, too


def _place(frame: FrameType | None) -> Place | None:
    """Return the code that must not be interrupted and that the cell is in; None if there is none."""
    frames = _without_tracer(list(outwards(frame)))
    innermost = _caller(frames, -1, is_standard)
    if innermost.f_code.co_name == FOR_USER and innermost.f_code.co_filename.startswith(PACKAGE):
        return None
    between = next((at for at, each in enumerate(frames) if each.f_code is _RUN_STATEMENTS), None)
    if between is not None and not any(map(is_statement, frames[:between])):
        return Place(_caller(frames, between, _runs_statements), is_between=True)
    cell = next((at for at, each in enumerate(frames) if each.f_code.co_name == "run_code"), len(frames))
    library = next((at for at in reversed(range(cell)) if is_body_of_library(frames[at])), None)
    if library is not None:
        return Place(_caller(frames, library, _is_importlib), is_import=True)
    for at, each in enumerate(frames[:-1]):
        name, file = each.f_code.co_name, each.f_code.co_filename
        for part, names in _WHOLE.items():
            if part in file and (name in names or not names):
                return Place(_caller(frames, at, partial(_is_in, part)))
        if name == "__del__":
            return Place(frames[at + 1])
    return _place_of_ours(frames)


def _without_tracer(frames: list[FrameType]) -> list[FrameType]:
    """Leave out the trace function, which Python has called and not the code; not while the debugger is stopped."""
    files = [each.f_code.co_filename for each in frames]
    outermost = max((at for at, file in enumerate(files) if file == _TRACER), default=-1)
    return frames if _DEBUGGER in files[: outermost + 1] else frames[outermost + 1 :]


def _place_of_ours(frames: list[FrameType]) -> Place | None:
    """Return the same for what a line of Python code calls: its import statement, or this package."""
    ours = _caller(frames, -1, is_standard)
    if any(_is_importlib(each) for each in frames[: frames.index(ours)]):
        return Place(ours)
    if _is_ours(ours) and any(CELL in each.f_code.co_filename for each in frames):
        return Place(_caller(frames, frames.index(ours), _is_ours))
    return None


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Return a frame and those that called it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_statement(frame: FrameType) -> bool:
    """Whether the frame is the whole cell, or a statement of it, that IPython has called."""
    caller = frame.f_back
    return caller is not None and caller.f_code.co_name == "run_code" and is_cell(frame.f_code.co_filename)


def _runs_statements(frame: FrameType) -> bool:
    """Whether the frame is IPython's method that runs the statements of a cell, or the shell's override of it."""
    return frame.f_code.co_name == _RUN_STATEMENTS.co_name


def _caller(frames: list[FrameType], at: int, is_part: Callable[[FrameType], bool]) -> FrameType:
    """Return the first frame further out that is not a part of the same thing."""
    return next((each for each in frames[at + 1 :] if not is_part(each)), frames[-1])


def _is_in(file: str, frame: FrameType) -> bool:
    return file in frame.f_code.co_filename


def is_body_of_library(frame: FrameType) -> bool:
    """Whether the frame is the body of a module being imported, of a library or of the standard library."""
    name, file = frame.f_code.co_name, frame.f_code.co_filename
    is_library = bool(INSTALLED.search(file)) or is_standard(frame)
    is_program = frame.f_globals.get("__name__") == "__main__" or is_own(file)
    return name == "<module>" and is_library and not is_program


def _is_importlib(frame: FrameType) -> bool:
    """Whether the frame is code of Python's import itself, which holds locks and lists of modules."""
    return frame.f_code.co_filename.startswith("<frozen importlib")


def is_standard(frame: FrameType) -> bool:
    """Whether the frame is code of the standard library."""
    file = frame.f_code.co_filename
    return _is_importlib(frame) or (file.startswith(STANDARD_LIBRARY) and not INSTALLED.search(file))


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name not in WAITS
