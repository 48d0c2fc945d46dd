"""Interrupts that come at a bad moment.

Covers: putting off an interrupt until the code at hand can bear it.
Does not cover: what an interrupt does (``kernel``), what an import leaves that is cut off (``cut_imports``).

KeyboardInterrupt is raised wherever the main thread happens to be. In some places that does lasting harm:

- Python forgets a package whose import was cut off, but not the parts of it that had been imported: the next import
  finds these and makes a package without them. Larger parts of torch are imported by the first step of a training
  loop and the first ``torch.compile``; cut off there, both would fail until the rank is replaced. So the import of a
  library is left whole, however often the user presses stop, until ``CUT_AFTER_SECONDS`` after the first press: the
  next press then cuts it off. The user's own modules, whose import may be a whole training run, are cut off at once.
- ``logging`` and ``threading`` take locks in Python code, one step before the ``try`` that gives them back. Cut off
  there, the lock is never given back, and the thread that releases stuck ranks would wait for it.
- A DataLoader that is cut off while it starts its workers, or ends them, leaves some behind.
- What is raised in ``__del__``, or in the functions that run around a fork, Python only prints: the interrupt is lost.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .own_code import CELL, is_own

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

INSTALLED = re.compile(r"/(site|dist)-packages/")
PACKAGE = str(Path(__file__).parents[1])
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
CUT_AFTER_SECONDS = 10.0  # from the first press; only then may another one cut off the import of a library
LONGEST_SECONDS = 2.0  # for other code that should be left whole: what takes longer hangs, and is cut off
LOOK_SECONDS = 1.0  # between two looks at whether an import has ended whose end was not seen
WAITS = ("_wait_for_program", "_wait_for_command", "wait_for_staging")  # the functions that an interrupt may end


_WHOLE = {  # functions that are left whole, by a part of their file's name
    threading.__file__: ("__enter__", "__exit__"),
    "/multiprocessing/": ("start", "_Popen", "__init__", "_launch"),
    "torch/utils/data/dataloader.py": ("__init__", "_shutdown_workers"),
}


class Untimely:
    """Decides, in the handler of SIGINT, whether an interrupt has to wait.

    The handler may run in the midst of anything, of itself too, so it takes no lock and starts no thread.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._since: float | None = None  # an interrupt waits
        self._is_overdue = False
        self._limits: queue.SimpleQueue[tuple[float, float]] = queue.SimpleQueue()  # whose put() a handler may call
        self._turns = threading.Lock()  # of a signal that is overdue and the begin of a cell
        threading.Thread(target=self._watch, name="untimely interrupts", daemon=True).start()

    def begin_cell(self) -> None:
        """Forget an interrupt of an earlier cell; SIGINT must mean nothing while this is called."""
        self._stop_tracing()
        with self._turns:
            self._since, self._is_overdue = None, False

    @property
    def waits(self) -> bool:
        """Whether an interrupt waits until the code at hand has been left."""
        return self._since is not None

    def puts_off(self, frame: FrameType | None) -> bool:
        """Return whether to do nothing now; the handler is called again once the code at hand has been left."""
        if os.getpid() != self._pid:
            return False  # a forked child has no thread that watches
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
            self._limits.put((self._since, time.monotonic() + (LOOK_SECONDS if place.is_import else LONGEST_SECONDS)))
        if not self._is_tracing:
            self._trace(place.caller)
        return True

    def is_bad_moment(self, frame: FrameType | None) -> bool:
        """Return whether an exception raised now would do lasting harm."""
        return _place(frame) is not None

    def _may_cut_off(self, place: Place, *, is_overdue: bool) -> bool:
        """Return whether code that should be left whole has had its time."""
        if not place.is_import:
            return is_overdue
        is_late = self._since is not None and time.monotonic() - self._since >= CUT_AFTER_SECONDS
        return is_late and not is_overdue

    # Being called when the code has been left

    def _trace(self, caller: FrameType) -> None:
        if sys.gettrace() is not None:
            return  # a debugger's; the limit remains

        def on_event(frame: FrameType, event: str, _argument: Any) -> Any:
            if event in ("line", "opcode"):
                self._stop_tracing()
                self._since = None
                handler = signal.getsignal(signal.SIGINT)
                if callable(handler):
                    handler(signal.SIGINT, frame)
                return None  # what is returned is traced on
            return on_event

        self._traced = caller
        caller.f_trace, caller.f_trace_opcodes = on_event, True
        sys.settrace(_trace_no_other)

    @property
    def _is_tracing(self) -> bool:
        return sys.gettrace() is _trace_no_other

    def _stop_tracing(self) -> None:
        if self._is_tracing:
            sys.settrace(None)
            self._traced.f_trace, self._traced.f_trace_opcodes = None, False
            del self._traced

    def _watch(self) -> None:
        while True:
            since, until = self._limits.get()
            time.sleep(max(0.0, until - time.monotonic()))
            with self._turns:
                if self._since == since:
                    self._is_overdue = True
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _trace_no_other(_frame: FrameType, _event: str, _argument: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Place:
    """Code that should not be cut off."""

    caller: FrameType  # of it
    is_import: bool = False  # of a library


def _place(frame: FrameType | None) -> Place | None:
    """Return what the cell's code is in the midst of, if that should not be cut off."""
    frames = list(outwards(frame))
    cell = next((at for at, each in enumerate(frames) if each.f_code.co_name == "run_code"), len(frames))
    library = next((at for at in reversed(range(cell)) if is_body_of_library(frames[at])), None)
    if library is not None:
        return Place(_caller(frames, library, _is_importlib), is_import=True)
    for at, each in enumerate(frames[:-1]):
        name, file = each.f_code.co_name, each.f_code.co_filename
        for part, names in _WHOLE.items():
            if part in file and name in names:
                return Place(_caller(frames, at, _is_in(part)))
        if file == logging.__file__:
            return Place(_caller(frames, at, _is_in(file)))
        if name == "__del__":
            return Place(frames[at + 1])
    return _place_of_ours(frames)


def _place_of_ours(frames: list[FrameType]) -> Place | None:
    """Return the same of what is called by a line of Python code: its import statement, or this package."""
    ours = _caller(frames, -1, _is_standard)
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


def _caller(frames: list[FrameType], at: int, is_part: Callable[[FrameType], bool]) -> FrameType:
    """Return the first frame further out that is not a part of the same thing."""
    return next((each for each in frames[at + 1 :] if not is_part(each)), frames[-1])


def _is_in(file: str) -> Callable[[FrameType], bool]:
    return lambda frame: file in frame.f_code.co_filename


def is_body_of_library(frame: FrameType) -> bool:
    """Whether it is the code of a module that is imported, of a library or of Python's own."""
    name, file = frame.f_code.co_name, frame.f_code.co_filename
    is_library = bool(INSTALLED.search(file)) or _is_standard(frame)
    is_program = frame.f_globals.get("__name__") == "__main__" or is_own(file)
    return name == "<module>" and is_library and not is_program


def _is_importlib(frame: FrameType) -> bool:
    """Whether it is code of Python's import itself, which keeps locks and lists of modules."""
    return frame.f_code.co_filename.startswith("<frozen importlib")


def _is_standard(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return _is_importlib(frame) or (file.startswith(STANDARD_LIBRARY) and not INSTALLED.search(file))


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name not in WAITS
