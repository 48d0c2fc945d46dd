"""Restore after a script what it changes in its process.

Covers: working directory, environment, arguments, built-ins, streams, signals and timers, logging, warnings, the start
method of ``multiprocessing``, random numbers of Python and numpy: as in a new process while the script runs, restored
after it.
Does not cover: modules (``modules``), torch's switches (``torch_state``), state of training libraries
(``library_states``), how a program ends (``teardown``).
"""

from __future__ import annotations

import builtins
import copy
import decimal
import faulthandler
import gc
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import warnings
from contextlib import ExitStack, contextmanager
from multiprocessing import context, forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...rank.crash_reports import enable_reports
from ...rank.interrupts.deferral import INSTALLED, STANDARD_LIBRARY
from ...rank.output.streams import flush_all
from .library_states import libraries_as_imported
from .modules import Modules
from .torch_state import as_in_a_new_process

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


@contextmanager
def put_back() -> Iterator[Modules]:
    """Restore at the end of the block what a program changes in it."""
    keepers = (
        *(_directory, _environment, _interpreter, _collector, _streams, _signals, _logging),
        *(_multiprocessing, _random_numbers, _printing, _arithmetic, _limits, as_in_a_new_process),
    )
    with ExitStack() as stack:
        for keep in keepers:
            stack.enter_context(keep())
        stack.enter_context(warnings.catch_warnings())
        modules = Modules()  # last, for what it hides would be lost if a keeper could not start
        stack.callback(modules.put_back)
        stack.enter_context(libraries_as_imported())  # of the script's modules, so before the session's are back
        yield modules


@contextmanager
def _directory() -> Iterator[None]:
    before, mask = _working_directory(), os.umask(0)
    os.umask(mask)
    try:
        yield
    finally:
        os.umask(mask)
        _go_back(before)


def _working_directory() -> Path:
    try:
        return Path.cwd()
    except OSError:  # it was removed; Linux still has its name
        return Path(str(Path("/proc/self/cwd").readlink()).removesuffix(" (deleted)"))


def _go_back(before: Path) -> None:
    """Enter the directory of cells, or if it was removed the nearest existing one above it."""
    why = ""
    for place in (before, *before.parents):
        try:
            os.chdir(place)
        except OSError as error:
            why = why or error.strerror or str(error)
            continue
        if why:
            sys.stderr.write(f"the working directory {before} can't be entered any more ({why}); changed to {place}\n")
        return


@contextmanager
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


@contextmanager
def _interpreter() -> Iterator[None]:
    """Keep the state of :mod:`sys`, the built-in names, and ``__main__``."""
    names = ("argv", "path", "excepthook", "unraisablehook", "stdin", "stdout", "stderr", "displayhook")
    before = {name: getattr(sys, name) for name in names}
    lists = {name: list(getattr(sys, name)) for name in ("argv", "path", "meta_path", "path_hooks")}
    built_in, thread_hook = dict(vars(builtins)), threading.excepthook
    limit, main = sys.getrecursionlimit(), sys.modules["__main__"]
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in before.items():
            setattr(sys, name, value)
        for name, values in lists.items():
            getattr(sys, name)[:] = values
        for name in vars(builtins).keys() - built_in.keys():
            delattr(builtins, name)
        vars(builtins).update(built_in)  # e.g. a print() that works on rank 0 only
        threading.excepthook = thread_hook
        sys.setrecursionlimit(limit)


@contextmanager
def _collector() -> Iterator[None]:
    was_on, thresholds = gc.isenabled(), gc.get_threshold()
    try:
        yield
    finally:
        (gc.enable if was_on else gc.disable)()
        gc.set_threshold(*thresholds)


@contextmanager
def _streams() -> Iterator[None]:
    """Keep the two pipes to the nanny: a script may close or redirect them.

    A free descriptor number is given to the next file that any thread opens, so one that the script closes is kept
    open, as a file that can't be written to.
    """
    kept = {number: os.dup(number) for number in (0, 1, 2)}
    nothing, original, process = os.open(os.devnull, os.O_RDONLY), os.close, os.getpid()

    def close(fd: int) -> None:
        if fd in kept and os.getpid() == process:
            os.dup2(nothing, fd)
        else:
            original(fd)

    os.close = close
    try:
        yield
    finally:
        os.close = original
        try:
            flush_all(sys.stdout, sys.stderr)
        finally:
            for number, kept_as in kept.items():
                os.dup2(kept_as, number)
                os.close(kept_as)
            os.close(nothing)


@contextmanager
def _signals() -> Iterator[None]:
    """Keep handlers, and cancel alarms that a script has set."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    quiet = [timer for timer in TIMERS if signal.getitimer(timer) == (0.0, 0.0)]
    try:
        yield
    finally:
        for timer in quiet:
            signal.setitimer(timer, 0)
        faulthandler.cancel_dump_traceback_later()
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextmanager
def _logging() -> Iterator[None]:
    """Start without log handlers; restore those from before.

    A handler that a script adds would write each line again in the next run. What a library sets up for itself when it
    is imported stays, because it is imported once.
    """
    root = logging.root
    before = {name: _state(each) for name, each in _loggers().items()}
    disabled = root.manager.disable
    root.handlers[:], root.manager.disable = [], 0
    root.setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.manager.disable = disabled
        left: list[logging.Handler] = []
        for name, logger in _loggers().items():
            if name in before:
                left += _set_state(logger, before[name])
            elif not _is_of_library(name):
                left += _set_state(logger, ([], logging.NOTSET, True, False))
        flush_all(*left)


def _loggers() -> dict[str, logging.Logger]:
    found: dict[str, Any] = {"": logging.root, **logging.root.manager.loggerDict}
    return {name: each for name, each in found.items() if isinstance(each, logging.Logger)}


def _is_of_library(name: str) -> bool:
    file = getattr(sys.modules.get(name.partition(".")[0]), "__file__", None) or ""
    return INSTALLED.search(file) is not None or file.startswith(STANDARD_LIBRARY)


def _state(logger: logging.Logger) -> tuple[list[logging.Handler], int, bool, bool]:
    return list(logger.handlers), logger.level, logger.propagate, logger.disabled


def _set_state(logger: logging.Logger, state: tuple[list[logging.Handler], int, bool, bool]) -> list[logging.Handler]:
    """Set the state, and return the handlers that the logger had beside these."""
    left = [handler for handler in logger.handlers if handler not in state[0]]
    logger.handlers[:], _, logger.propagate, logger.disabled = state
    logger.setLevel(state[1])
    return left


@contextmanager
def _multiprocessing() -> Iterator[None]:
    """Let a script choose the start method of processes, which a program may do once."""
    default: Any = context._default_context  # noqa: SLF001
    before, default._actual_context = default._actual_context, None  # noqa: SLF001
    server: Any = forkserver._forkserver  # noqa: SLF001
    kept = dict(vars(server))
    vars(server).update(vars(forkserver.ForkServer()))
    folder = tempfile.tempdir
    try:
        yield
    finally:
        tempfile.tempdir = folder
        default._actual_context = before  # noqa: SLF001
        if server._forkserver_pid is not None:  # noqa: SLF001
            # It has this script's environment and modules. What it started has ended; a fork may still keep it alive.
            os.kill(server._forkserver_pid, signal.SIGKILL)  # noqa: SLF001
            server._stop()  # noqa: SLF001
        vars(server).update(kept)


@contextmanager
def _arithmetic() -> Iterator[None]:
    """Keep what numpy and decimal do about overflow, division by 0 and rounding."""
    numpy: Any = sys.modules.get("numpy")
    errors = None if numpy is None else numpy.geterr()
    numbers = decimal.getcontext().copy()
    digits = sys.get_int_max_str_digits() if hasattr(sys, "get_int_max_str_digits") else None  # an early Python 3.10
    try:
        yield
    finally:
        decimal.setcontext(numbers)
        if digits is not None:
            sys.set_int_max_str_digits(digits)
        if errors is not None:
            numpy.seterr(**errors)


@contextmanager
def _limits() -> Iterator[None]:
    """Keep the limit of open files and the thread switch interval; crashes are reported as before."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    interval = sys.getswitchinterval()
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
        enable_reports()


@contextmanager
def _random_numbers() -> Iterator[None]:
    """Start with random numbers that are not seeded."""
    python = random.getstate()
    random.seed()
    numpy: Any = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    if numpy is not None:
        numpy.random.seed()
    try:
        yield
    finally:
        random.setstate(python)
        if state is not None:
            numpy.random.set_state(state)


@contextmanager
def _printing() -> Iterator[None]:
    """Keep how arrays and tensors are printed."""
    numpy: Any = sys.modules.get("numpy")
    tensors: Any = sys.modules.get("torch._tensor_str")
    arrays = None if numpy is None else numpy.get_printoptions()
    options = None if tensors is None else copy.copy(vars(tensors.PRINT_OPTS))
    try:
        yield
    finally:
        if arrays is not None:
            numpy.set_printoptions(**arrays)
        if options is not None:
            vars(tensors.PRINT_OPTS).update(options)
