"""Give scripts fresh copies of the process-wide state of training libraries.

Covers: accelerate's states, DeepSpeed's groups and configuration: while a script runs they are as just after the
import, and afterwards the session's own again, no matter which of them imported the library first.
Does not cover: the process groups that these hold (``rank.process_group.group``), Horovod (``features.horovod.world``).
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

from ...rank.libraries.import_hooks import on_import

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Modules whose global variables hold what a program has configured or started. In other modules of DeepSpeed they hold
# DeepSpeed's own registries, filled over several imports.
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
    """An attribute that holds a library's state, and a function that makes its initial value."""

    holder: Any
    name: str
    make: Callable[[], Any]


def note_imports() -> None:
    """Record the initial state of each of these modules when it is imported."""
    for name in NOTED:
        on_import(name, _note)


@contextmanager
def libraries_as_imported() -> Iterator[None]:
    """Run the body with each library as just after its import; restore the session's state afterwards."""
    kept = [(place.holder, place.name, vars(place.holder)[place.name]) for place in _places()]
    _reset()
    try:
        yield
    finally:
        _reset()  # for libraries that the script imported first, for which the session has no state yet
        for holder, name, value in kept:
            setattr(holder, name, value)


def _reset() -> None:
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
    """Yield the dicts that all objects of a class share, and the cache of warnings that are shown once."""
    for each in list(getattr(sys.modules.get("accelerate.state"), "__dict__", {}).values()):
        if isinstance(each, type) and "_shared_state" in vars(each):
            # A new dict, because the session's objects hold the old one; on a TPU each thread has its own.
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
    """Return a copy that can be modified independently, if the value is a built-in container or the library's own."""
    if type(value) in (dict, list, set):
        return value.copy()
    if not type(value).__module__.startswith("deepspeed."):
        return value
    made = copy.copy(value)
    if made is not value:
        for name, part in getattr(made, "__dict__", {}).items():
            setattr(made, name, _renewed(part))
    return made
