"""Refuse processes that would have to import a cell.

Covers: what a cell passes to a new process that is not forked: by ``Process`` (and so by a DataLoader), by a pool's
tasks, by ``ProcessPoolExecutor``; ``mp.spawn`` and other launchers of processes to train on.
Does not cover: libraries that send code by value, such as joblib.

Such a process finds functions and classes by importing their module, and a cell's is ``__main__``, without a file. In
the process that fails: a pool then starts another one, again and again, and the cell waits.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import reduction
from types import FunctionType
from typing import TYPE_CHECKING, Any

from .. import user_code
from .import_hooks import on_import

if TYPE_CHECKING:
    from collections.abc import Callable


LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


class SpawnInCellError(RuntimeError):
    """A cell starts processes that can't import it."""

    # A process pool would show its place in this package as the cause.
    __cause__ = property(lambda _self: None, lambda _self, _cause: None)


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


def refuse_spawn() -> None:
    """Refuse in cells what starts processes to train on: ``mp.spawn``, and launchers for notebooks without ranks.

    Processes of ``mp.spawn`` could not import the cell's functions; forked ones would be ranks of ranks.
    """
    on_import("torch.distributed.launcher.api", _refuse_launches)
    import torch.multiprocessing as mp  # noqa: PLC0415

    inner = sys.modules["torch.multiprocessing.spawn"]  # the package has a function of this name
    for name in ("spawn", "start_processes"):
        refusing = _refusing(getattr(mp, name), name)
        setattr(mp, name, refusing)
        setattr(inner, name, refusing)


def _refusing(original: Any, name: str) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def spawn(*args: Any, **options: Any) -> Any:
        asked = signature.bind(*args, **options)
        asked.apply_defaults()
        fn = asked.arguments["fn"]
        module, function = str(getattr(fn, "__module__", "")), getattr(fn, "__name__", "fn")
        if user_code.script_name():
            return original(*args, **options)
        if module.partition(".")[0] in LIGHTNING:
            raise SpawnInCellError(
                "this strategy of Lightning starts its own processes, but the ranks are already such processes; use "
                "Trainer(strategy='ddp', devices=...) with the number of ranks"
            )
        if module == "__main__" and asked.arguments.get("start_method") != "fork":
            raise SpawnInCellError(
                f"mp.{name} starts processes that import the function {function}, and a cell can't be imported; the "
                f"ranks are already such processes, so call {function}(rank, ...) in the cell, or run everything as a "
                "script: %dist_run --per-node train.py"
            )
        return original(*args, **options)

    return spawn


def _refuse_launches(module: Any) -> None:
    """Refuse torchrun's launcher, by which ``accelerate.notebook_launcher`` starts processes, before it makes files."""
    original = module.LaunchConfig.__post_init__

    @functools.wraps(original)
    def prepare(self: Any) -> None:
        if not user_code.script_name():
            raise SpawnInCellError(
                "a launcher within a cell would start training processes, but the ranks are already such processes; "
                "call the launched function itself in the cell"
            )
        original(self)

    module.LaunchConfig.__post_init__ = prepare
