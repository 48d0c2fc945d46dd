"""Know which cell has started the thread or the task that is running.

Covers: threads, items of thread pools, asyncio tasks; each belongs to the cell in which it was started.
Does not cover: sending what they print (``streams``), threads that C code starts: they belong to the cell that runs.
"""

from __future__ import annotations

import concurrent.futures.thread
import functools
import threading
from contextvars import ContextVar
from typing import Any

_NAME = "_disttrain_cell"  # an attribute of threads and of the items of pools
_cell: ContextVar[dict[str, Any] | None] = ContextVar(_NAME, default=None)  # tasks take it along
_current: list[dict[str, Any]] = []  # the header of the cell that runs, or ran last


def begin_cell(header: dict[str, Any]) -> None:
    """Take what is started from now on as started by this request."""
    _current[:] = [header]
    _cell.set(header)


def earlier_cell() -> dict[str, Any] | None:
    """Return the header of the request that has started this thread or task; None if it is the latest one."""
    header = _own_cell()
    return None if header is None or header is _current[0] else header


def _own_cell() -> dict[str, Any] | None:
    # Not current_thread(): it makes an object for a thread that C code has started.
    thread = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]  # noqa: SLF001
    header: dict[str, Any] | None = _cell.get()
    # A task has one, on whichever thread its loop runs: that of IPython's %%bash is of the first cell with it.
    if header is None and thread is not None and thread is not threading.main_thread():
        header = thread.__dict__.get(_NAME)
    return header


def watch_threads() -> None:
    """From now on take note of who starts a thread, or gives one of a pool something to do."""
    start = threading.Thread.start
    item: Any = concurrent.futures.thread._WorkItem  # noqa: SLF001
    make, run = item.__init__, item.run

    @functools.wraps(start)
    def on_start(thread: threading.Thread) -> None:
        thread.__dict__[_NAME] = _own_cell()
        start(thread)

    @functools.wraps(make)
    def on_make(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        setattr(self, _NAME, _own_cell())

    @functools.wraps(run)
    def on_run(self: Any, *args: Any, **options: Any) -> None:
        setattr(threading.current_thread(), _NAME, getattr(self, _NAME))
        _cell.set(getattr(self, _NAME))  # Python 3.14 may have a thread begin with its starter's
        run(self, *args, **options)

    for place, name, wrapper in (
        (threading.Thread, "start", on_start),
        (item, "__init__", on_make),
        (item, "run", on_run),
    ):
        setattr(place, name, wrapper)
