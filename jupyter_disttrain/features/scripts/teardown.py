"""Run at the end of a script what Python runs at a program's end, in a process that continues.

Covers: work in thread pools is finished, threads are waited for, registered exit functions are called, processes of
``multiprocessing`` end.
Does not cover: what a script has changed (``isolation``).
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import sys
import threading
import traceback
import weakref
from concurrent import futures
from concurrent.futures import process as process_pools
from concurrent.futures import thread as thread_pools
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import util
from typing import TYPE_CHECKING, Any

from ...rank.interrupts.deferral import INSTALLED, STANDARD_LIBRARY
from ...rank.output import user_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OF_TORCH = "/torch/"  # keeps some pools for every later program


@contextmanager
def program_end(names: dict[str, Any]) -> Iterator[None]:
    """Run at the end of this block what Python runs at a program's end; clears the names of its ``__main__``."""
    threads = set(threading.enumerate())
    children = set(multiprocessing.active_children())
    finalizers = set(util._finalizer_registry)  # type: ignore[attr-defined]  # noqa: SLF001
    with ExitStack() as stack:
        submitted = stack.enter_context(_submitted())
        functions = stack.enter_context(_exit_functions())
        try:
            yield
        finally:
            for future in list(submitted):
                _wait_for(future)
            for thread in set(threading.enumerate()) - threads:
                if not thread.daemon and not _is_of_pool(thread):
                    thread.join()
            for function in reversed(functions):
                _call(function)
            for thread in set(threading.enumerate()) - threads:
                _silence(thread)
            names.clear()
            gc.collect()
            _end_processes(children, finalizers)


@contextmanager
def _submitted() -> Iterator[weakref.WeakSet[Any]]:
    """Collect what is submitted to thread pools: a pool's threads never end, but its work does."""
    handed: weakref.WeakSet[Any] = weakref.WeakSet()
    original = futures.ThreadPoolExecutor.submit

    def submit(self: Any, fn: Any, /, *args: Any, **options: Any) -> Any:
        future = original(self, fn, *args, **options)
        handed.add(future)
        return future

    futures.ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
    try:
        yield handed
    finally:
        futures.ThreadPoolExecutor.submit = original  # type: ignore[method-assign]


def _wait_for(future: Any) -> None:
    """Wait for work submitted to a pool; ``futures.wait`` would wait forever for what was cancelled."""
    with suppress(futures.CancelledError):
        future.exception()


def _silence(thread: threading.Thread) -> None:
    """Silence errors of a thread that outlives the program, because the program's names are cleared."""
    thread._invoke_excepthook = lambda _: None  # type: ignore[attr-defined]  # noqa: SLF001


def _is_of_pool(thread: threading.Thread) -> bool:
    pools: tuple[Any, ...] = (thread_pools._threads_queues, process_pools._threads_wakeups)  # noqa: SLF001
    return any(thread in pool for pool in pools)


def _end_processes(children: set[Any], finalizers: set[Any]) -> None:
    """End the processes that the program has left: pools close, daemons are ended, the others are waited for."""
    for thread in _managers():
        if thread.executor_reference() is None:
            thread.join()  # of a pool that is no longer referenced: it ends by itself
    registry: dict[Any, Any] = util._finalizer_registry  # type: ignore[attr-defined]  # noqa: SLF001
    new = sorted((key for key in registry.keys() - finalizers if key[0] is not None), reverse=True)
    for key in new:
        finalizer = registry.get(key)
        if finalizer is not None:
            _call(finalizer)
    left = [child for child in multiprocessing.active_children() if child not in children]
    for child in left:
        if child.daemon:
            child.terminate()
    for child in left:
        if child.daemon or not _is_of_process_pool(child):
            child.join()


def _is_of_process_pool(child: Any) -> bool:
    """Whether a process works for a pool, which ends it once the pool is no longer referenced."""
    return any(child in manager.processes.values() for manager in _managers())


def _managers() -> list[Any]:
    """Return the threads of process pools."""
    kind = process_pools._ExecutorManagerThread  # noqa: SLF001
    return [thread for thread in threading.enumerate() if isinstance(thread, kind)]


def _call(function: Callable[[], Any]) -> None:
    """Call an exit function; print what it raises, and continue."""
    try:
        function()
    except Exception:  # noqa: BLE001  (the program's)
        traceback.print_exc()


@contextmanager
def _exit_functions() -> Iterator[list[Callable[[], Any]]]:
    """Collect the exit functions of a program; those that libraries keep for later programs stay."""
    collected: list[tuple[Callable[..., Any], Callable[[], Any]]] = []
    calls: list[Callable[[], Any]] = []
    register, unregister = atexit.register, atexit.unregister

    def collect(function: Callable[..., Any], /, *args: Any, **options: Any) -> Callable[..., Any]:
        if _is_for_process(sys._getframe(1)):  # noqa: SLF001
            return register(function, *args, **options)
        collected.append((function, lambda: function(*args, **options)))
        calls.append(collected[-1][1])
        return function

    def forget(function: Callable[..., Any]) -> None:
        unregister(function)
        for each, call in collected:
            if each == function and call in calls:
                calls.remove(call)

    atexit.register, atexit.unregister = collect, forget
    try:
        yield calls
    finally:
        atexit.register, atexit.unregister = register, unregister


def _is_for_process(frame: Any) -> bool:
    """Whether an exit function is registered by a library that is being imported, or by torch or Python itself."""
    file = frame.f_code.co_filename
    is_installed = INSTALLED.search(file) is not None
    if not is_installed and not file.startswith(STANDARD_LIBRARY):
        return False
    if not is_installed or OF_TORCH in file:
        return True
    while frame is not None and not user_code.is_own(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
