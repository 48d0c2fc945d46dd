"""Refuse processes that would have to import a cell.

Covers: what a cell passes to a new process that is not forked: by ``Process`` (and so by a DataLoader), by a pool's
tasks, by ``ProcessPoolExecutor``.
Does not cover: libraries that send code by value, such as joblib; ``mp.spawn`` of the cell's own function
(``features.scripts.script_compat``).

Such a process finds functions and classes by importing their module, and a cell's is ``__main__``, without a file. In
the process that fails: a pool then starts another one, again and again, and the cell waits.
"""

from __future__ import annotations

import functools
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import reduction
from types import FunctionType
from typing import TYPE_CHECKING, Any

from ...features.scripts.script_compat import SpawnInCellError
from .import_hooks import on_import

if TYPE_CHECKING:
    from collections.abc import Callable


class _Pickler(reduction.ForkingPickler):
    """Pickle what a new process can import, and refuse what it can't."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)) and _is_of_cell(obj):
            raise SpawnInCellError(
                f"{obj.__qualname__} is defined in a cell, and a process that is not forked would have to import it, "
                f"but a cell can't be imported; put {obj.__qualname__} into a module, e.g. with %%writefile, or fork: "
                "multiprocessing.get_context('fork'), DataLoader(multiprocessing_context='fork')"
            )
        return NotImplemented


def _is_of_cell(obj: Any) -> bool:
    """Whether a function or class is a cell's; Python itself refuses those without a name of their own in a module."""
    if getattr(obj, "__module__", None) != "__main__" or "<" in obj.__qualname__:
        return False
    main = sys.modules["__main__"]
    return getattr(main, "__file__", None) is None and getattr(main, "__spec__", None) is None


class _Checked:
    """A value sent to a new process: it is checked while it is pickled, and unpickled as the value itself."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (bytes(_Pickler.dumps(self._value)),)


def refuse_cells() -> None:
    """Refuse from now on to pass objects defined in cells to processes that are not forked."""
    reduction.dump = _dump  # used to start processes that are not forked
    on_import("multiprocessing.pool", _check_tasks)
    submit: Any = ProcessPoolExecutor.submit

    @functools.wraps(submit)
    def checked(self: Any, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        if self._mp_context.get_start_method() == "fork":
            return submit(self, fn, *args, **options)
        return submit(self, _Checked(functools.partial(fn, *args, **options)))

    ProcessPoolExecutor.submit = checked  # type: ignore[method-assign]


def _dump(obj: Any, file: Any, protocol: int | None = None) -> None:
    _Pickler(file, protocol).dump(obj)


def _check_tasks(module: Any) -> None:
    """Check the tasks of pools."""
    original = module.Pool._handle_tasks  # noqa: SLF001

    def handle(taskqueue: Any, put: Callable[[Any], None], outqueue: Any, pool: list[Any], cache: Any) -> None:
        def put_checked(task: Any) -> None:
            put(task if task is None else _Checked(task))  # None marks the end

        method = getattr(pool[0], "_start_method", "fork")  # a pool of threads has none
        original(taskqueue, put if method == "fork" else put_checked, outqueue, pool, cache)

    module.Pool._handle_tasks = staticmethod(handle)  # noqa: SLF001
