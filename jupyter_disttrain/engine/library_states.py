"""What training libraries keep for the whole process.

Covers: accelerate's states, DeepSpeed's groups and configuration: as just after the import while a script runs, the
session's own after it, whoever imported the library first.
Does not cover: the process groups that these hold (``process_group``), Horovod (``horovod_world``).
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import weakref
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from .on_import import on_import

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Modules whose global variables are what a program has configured or started. In other modules of DeepSpeed they are
# what it knows of itself, collected over several imports.
NOTED = (
    "deepspeed.comm.comm",
    "deepspeed.utils.groups",
    "deepspeed.runtime.activation_checkpointing.checkpointing",
    "deepspeed.runtime.pipe.p2p",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp",
    "deepspeed.runtime.tensor_parallel.init_utils",
    "deepspeed.runtime.torch_autocast",
)

_as_imported: weakref.WeakKeyDictionary[ModuleType, dict[str, Any]] = weakref.WeakKeyDictionary()


class _Place(NamedTuple):
    """Where a library keeps something, and how that begins."""

    holder: Any
    name: str
    make: Callable[[], Any]


def note_imports() -> None:
    """From now on take note of how each of these modules begins."""
    for name in NOTED:
        on_import(name, _note)


@contextmanager
def libraries_as_imported() -> Iterator[None]:
    """Begin with each library as it is just after its import; put back what the session has made of it."""
    kept = [(place.holder, place.name, vars(place.holder)[place.name]) for place in _places()]
    _begin_anew()
    try:
        yield
    finally:
        _begin_anew()  # of a library that the script has imported the session has made nothing yet
        for holder, name, value in kept:
            setattr(holder, name, value)


def _begin_anew() -> None:
    for place in _places():
        setattr(place.holder, place.name, place.make())


def _places() -> Iterator[_Place]:
    yield from _places_of_accelerate()
    for name in NOTED:
        module = sys.modules.get(name)
        for variable, value in _as_imported.get(module, {}).items() if module is not None else ():
            if variable in vars(module):
                yield _Place(module, variable, functools.partial(_renewed, value))


def _places_of_accelerate() -> Iterator[_Place]:
    """Yield the dictionaries that all objects of a class share, and the warnings that are given once."""
    for each in list(getattr(sys.modules.get("accelerate.state"), "__dict__", {}).values()):
        if isinstance(each, type) and "_shared_state" in vars(each):
            # Another dictionary, for the session's objects hold theirs; on a TPU each thread has its own.
            yield _Place(each, "_shared_state", type(vars(each)["_shared_state"]))
    adapter: Any = getattr(sys.modules.get("accelerate.logging"), "MultiProcessAdapter", None)
    once: Any = getattr(adapter, "warning_once", None)
    if hasattr(once, "cache_info"):
        yield _Place(adapter, "warning_once", functools.partial(functools.cache, once.__wrapped__))


def _note(module: ModuleType) -> None:
    _as_imported[module] = {
        name: _renewed(value)
        for name, value in vars(module).items()
        if not (name.startswith("__") or isinstance(value, (type, ModuleType)) or inspect.isroutine(value))
    }


def _renewed(value: Any) -> Any:
    """Return a value that can be changed without changing this one: a copy of what is a library's own, or Python's."""
    if type(value) in (dict, list, set):
        return value.copy()
    if not type(value).__module__.startswith("deepspeed."):
        return value
    made = copy.copy(value)
    if made is not value:
        for name, part in getattr(made, "__dict__", {}).items():
            setattr(made, name, _renewed(part))
    return made
