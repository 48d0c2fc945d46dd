"""Find the cell that started the current thread or task.

Covers: threads, items of thread pools, asyncio tasks; each belongs to the cell that started it.
Does not cover: sending their output (``rank.output.streams``); threads that C code starts, which belong to the running
cell.
"""

from __future__ import annotations

import concurrent.futures.thread
import functools
import threading
from contextvars import ContextVar
from typing import Any

_NAME = "_disttrain_cell"  # an attribute of threads and of the items of pools
_OF_ALL_CELLS = ("tqdm._monitor",)  # modules whose threads print for the cell that runs at the time
_cell: ContextVar[dict[str, Any] | None] = ContextVar(_NAME, default=None)  # tasks inherit it
_current: list[dict[str, Any]] = []  # the header of the running cell, or of the last one


def attribute_to(header: dict[str, Any]) -> None:
    """Attribute threads and tasks started from now on to this request."""
    _current[:] = [header]
    _cell.set(header)


def earlier_cell() -> dict[str, Any] | None:
    """Return the header of the request that started this thread or task; None if it is the latest request."""
    header = _own_cell()
    return None if header is None or header is _current[0] else header


def _own_cell() -> dict[str, Any] | None:
    # Not current_thread(), which would make an object for a thread that C code has started.
    thread = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]  # noqa: SLF001
    header: dict[str, Any] | None = _cell.get()
    # A task has its own header on whatever thread its loop runs: IPython's %%bash runs its loop on a thread that the
    # first cell with %%bash started.
    if header is None and thread is not None and thread is not threading.main_thread():
        header = thread.__dict__.get(_NAME)
    return header


def watch_threads() -> None:
    """Patch threads and thread pools to record the cell that starts a thread or submits an item."""
    start = threading.Thread.start
    item: Any = concurrent.futures.thread._WorkItem  # noqa: SLF001
    make, run = item.__init__, item.run

    @functools.wraps(start)
    def on_start(thread: threading.Thread) -> None:
        thread.__dict__[_NAME] = None if type(thread).__module__ in _OF_ALL_CELLS else _own_cell()
        start(thread)

    @functools.wraps(make)
    def on_make(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        setattr(self, _NAME, _own_cell())

    @functools.wraps(run)
    def on_run(self: Any, *args: Any, **options: Any) -> None:
        setattr(threading.current_thread(), _NAME, getattr(self, _NAME))
        _cell.set(getattr(self, _NAME))  # in Python 3.14 a thread may inherit its starter's context
        run(self, *args, **options)

    threading.Thread.start = on_start  # type: ignore[method-assign,assignment]
    item.__init__, item.run = on_make, on_run
