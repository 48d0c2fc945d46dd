"""What a script changes in its process, and what the next program must not find.

Covers: working directory, environment, arguments, modules, streams, signals, logging, warnings, torch's switches and
random numbers: as they are in a new process while it runs, as they were after it.
Does not cover: the process group (``process_group``), what libraries keep to themselves.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import warnings
from contextlib import ExitStack, contextmanager
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .streams import flush_all
from .untimely import INSTALLED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

TORCH_SEED = 67280421310721  # of torch's generators in a new process: c10/core/GeneratorImpl.h, default_rng_seed_val

_at_start: frozenset[str] = frozenset(sys.modules)  # of the rank: what is no program's


def note_modules() -> None:
    """Take what is imported by now for no program's: it stays, whichever folder it is in."""
    global _at_start  # noqa: PLW0603  (a process is one rank)
    _at_start = frozenset(sys.modules)


class Modules:
    """The modules that a script imports from its own folder: each run imports them anew, as they are then."""

    def __init__(self) -> None:
        self._hidden: dict[str, ModuleType] = {}
        self._folder: str | None = None

    def forget_modules_of(self, folder: str) -> None:
        """Hide what cells have imported from there."""
        self._folder = folder
        self._hidden = self._take()

    def put_back(self) -> None:
        """Forget what the script has imported from there."""
        if self._folder is not None:
            self._take()
            sys.modules.update(self._hidden)

    def _take(self) -> dict[str, ModuleType]:
        found = {name: each for name, each in sys.modules.items() if self._is_own(name, each)}
        for name in found:
            del sys.modules[name]
        return found

    def _is_own(self, name: str, module: ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        if name in _at_start or not isinstance(file, str) or INSTALLED.search(file):
            return False
        spec = getattr(module, "__spec__", None)
        if isinstance(getattr(spec, "loader", None), ExtensionFileLoader):
            return False  # C code can't be imported a second time
        return Path(file).is_relative_to(self._folder or os.sep)


@contextmanager
def put_back(folder: str) -> Iterator[Modules]:
    """Enter ``folder`` and let a program change what it likes; afterwards all is as it was."""
    modules = Modules()
    with ExitStack() as stack:
        for keep in (_directory, _environment, _interpreter, _streams, _signals, _logging, _torch):
            stack.enter_context(keep())
        stack.enter_context(warnings.catch_warnings())
        stack.callback(modules.put_back)
        os.chdir(folder)
        yield modules


@contextmanager
def _directory() -> Iterator[None]:
    before, mask = Path.cwd(), os.umask(0)
    os.umask(mask)
    try:
        yield
    finally:
        os.chdir(before)
        os.umask(mask)


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
    """Keep what is in :mod:`sys`, and ``__main__``."""
    names = ("argv", "path", "excepthook", "stdin", "stdout", "stderr", "displayhook")
    before = {name: getattr(sys, name) for name in names}
    lists = {name: list(before[name]) for name in ("argv", "path")}
    limit, main = sys.getrecursionlimit(), sys.modules["__main__"]
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in before.items():
            setattr(sys, name, value)
        for name, values in lists.items():
            before[name][:] = values
        sys.setrecursionlimit(limit)
        gc.collect()  # what the script held on its device


@contextmanager
def _streams() -> Iterator[None]:
    """Keep the two pipes to the nanny: a script may close them, or put files in their place."""
    kept = {number: os.dup(number) for number in (0, 1, 2)}
    try:
        yield
    finally:
        flush_all(sys.stdout, sys.stderr)
        for number, copy in kept.items():
            if not _is_same(number, copy):
                os.dup2(copy, number)
            os.close(copy)


def _is_same(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False  # it was closed


@contextmanager
def _signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextmanager
def _logging() -> Iterator[None]:
    """Keep who writes what is logged: a handler that a script adds would write each line once more in the next run."""
    names: dict[str, Any] = {"": logging.root, **logging.root.manager.loggerDict}
    before = {name: _state(each) for name, each in names.items() if isinstance(each, logging.Logger)}
    disabled = logging.root.manager.disable
    try:
        yield
    finally:
        logging.root.manager.disable = disabled
        after: dict[str, Any] = {"": logging.root, **logging.root.manager.loggerDict}
        for name, logger in after.items():
            if isinstance(logger, logging.Logger):
                _set_state(logger, before.get(name, ([], logging.NOTSET, True, False)))


def _state(logger: logging.Logger) -> tuple[list[logging.Handler], int, bool, bool]:
    return list(logger.handlers), logger.level, logger.propagate, logger.disabled


def _set_state(logger: logging.Logger, state: tuple[list[logging.Handler], int, bool, bool]) -> None:
    for handler in logger.handlers:
        if handler not in state[0]:
            handler.flush()
    logger.handlers[:], _, logger.propagate, logger.disabled = state
    logger.setLevel(state[1])


@contextmanager
def _torch() -> Iterator[None]:
    """Begin with torch as it is in a new process; keep the session's switches and random numbers."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    switches = list(_switches(torch))
    before = [read() for read, _, _ in switches]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(TORCH_SEED)
        for _, write, usual in switches:
            write(usual)
        try:
            yield
        finally:
            for (_, write, _), value in zip(switches, before, strict=True):
                write(value)
            if devices:
                torch.cuda.set_device(devices[0])
                torch.cuda.empty_cache()


def _switches(torch: Any) -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any], Any]]:
    """Yield how each of torch's switches is read and set, and what it is in a new process."""
    yield torch.get_default_dtype, torch.set_default_dtype, torch.float32
    yield torch.is_grad_enabled, torch.set_grad_enabled, True
    yield torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"
    yield torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, False
    yield torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, False
    threads = torch.get_num_threads()
    yield lambda: threads, torch.set_num_threads, threads  # what the rank was started with
    device = torch.get_default_device()
    yield lambda: None if device.type == "cpu" else device, torch.set_default_device, None
    cudnn = torch.backends.cudnn
    for name, usual in (("benchmark", False), ("deterministic", False), ("allow_tf32", True), ("enabled", True)):
        yield lambda name=name: getattr(cudnn, name), lambda value, name=name: setattr(cudnn, name, value), usual  # type: ignore[misc]
