"""Clean up after imports that an interrupt aborted.

Covers: modules whose import had begun and did not finish, modules imported meanwhile that refer to them, the names of
libraries that may be damaged permanently.
Does not cover: when an import may be interrupted (``deferral``).

Python removes a module whose code fails from ``sys.modules``, but not the submodules of a package that were complete by
then: the next import finds these and makes a package that does not have them as attributes. Nor does it remove a module
that caught the interrupt of one of its own imports and went on without that import. This module removes all of them,
and all modules that were imported meanwhile and hold an object of theirs, so that the next import starts from the
beginning. Complete modules that hold nothing of them stay.

Two kinds of modules can't be imported a second time. C extensions stay and are put back into their package when it is
imported. A module that has registered itself somewhere fails at its second import. In that case, and whenever the
import of a library was interrupted, the cell's reply names the module.
"""

from __future__ import annotations

import importlib.machinery
import sys
import traceback
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from ..kernel.error_chain import chain
from ..libraries.import_hooks import before_import
from .deferral import INSTALLED, STANDARD_LIBRARY, is_body_of_library, outwards

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from types import FrameType


@dataclass(frozen=True, slots=True)
class _Cut:
    """The imports that one interrupt aborted."""

    stack: Mapping[str, ModuleType | None]  # modules whose import was under way, innermost first
    begun: Mapping[str, ModuleType]  # all modules whose import began since that of the outermost on the stack
    library: str  # the outermost module on the stack that belongs to a library or is a C extension; empty if none


class CutImports:
    """The imports that interrupts aborted in this process."""

    def __init__(self) -> None:
        self._cuts: list[_Cut] = []  # in the running cell
        self._taken_out: dict[str, str] = {}  # removed modules, each with the module to report (its library, if any)
        self._libraries: set[str] = set()

    def note(self, frame: FrameType | None) -> None:
        """Record what is being imported; a SIGINT handler calls this right before it raises."""
        stack: dict[str, ModuleType | None] = {}
        library = ""
        for each in outwards(frame):
            spec = _spec_of(each)
            if spec is None:
                continue
            module = sys.modules.get(spec.name)
            stack.setdefault(spec.name, module if isinstance(module, ModuleType) else None)
            if is_body_of_library(each) or isinstance(spec.loader, importlib.machinery.ExtensionFileLoader):
                library = spec.name
        if not stack:
            return
        modules = dict(sys.modules)
        names = list(modules)
        outermost = next(reversed(stack))
        first = names.index(outermost) if outermost in modules else len(names)
        begun = {name: module for name in names[first:] if isinstance(module := modules[name], ModuleType)}
        self._cuts.append(_Cut(stack, begun, library))

    def clean_up(self) -> list[str]:
        """Remove modules that the cell's interrupts left incomplete; return those that may still be damaged."""
        cuts, self._cuts = self._cuts, []
        damaged = []
        for cut in cuts:
            whole = [name for name, module in cut.stack.items() if _is_whole(name, module)]
            if next(iter(cut.stack)) in whole:
                continue  # the innermost module's own code handled the interrupt
            half = [name for name in cut.stack if name not in whole]
            for name in _take_out({*half, *whole[:1]}, cut):
                self._taken_out[name] = cut.library or name
            if cut.library:
                self._libraries.add(cut.library)
                damaged.append(cut.library)
            elif whole:
                damaged.append(half[-1])  # the module that caught the interrupt went on without it
        return damaged

    def behind(self, error: BaseException) -> list[str]:
        """Return the modules with an earlier interrupted import from which an error seems to come."""
        found: dict[str, None] = {}
        for name in (name for link in chain(error) for name in _modules_in(link)):
            culprit = self._taken_out.get(name, "")
            if culprit in self._libraries or (culprit and name not in sys.modules):  # else it is complete by now
                found[culprit] = None
        return list(found)


def _modules_in(error: BaseException) -> Iterator[str]:
    """Yield the modules on an error's traceback, and the module in which an import or attribute was not found."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield str(frame.f_globals.get("__name__", ""))
    if isinstance(error, ImportError):
        yield str(error.name)
    holder = error.obj if isinstance(error, AttributeError) else None
    if isinstance(holder, ModuleType):
        yield holder.__name__


def _spec_of(frame: FrameType) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of the module that a frame is importing; None if it imports none."""
    spec: Any = None
    if frame.f_code.co_name == "<module>":
        spec = frame.f_globals.get("__spec__")
    elif frame.f_code.co_name == "_load_unlocked" and frame.f_code.co_filename.startswith("<frozen importlib"):
        spec = frame.f_locals.get("spec")
    is_importing = isinstance(spec, importlib.machinery.ModuleSpec) and getattr(spec, "_initializing", False)
    return spec if is_importing else None


def _is_whole(name: str, module: ModuleType | None) -> bool:
    """Whether the import of a module has finished since."""
    return module is not None and sys.modules.get(name) is module


def _take_out(first: Collection[str], cut: _Cut) -> set[str]:
    """Remove modules, and those imported meanwhile that hold an object of theirs; return the names of all."""
    modules = {**cut.begun, **{name: module for name, module in cut.stack.items() if module is not None}}
    extensions = {name: module for name, module in modules.items() if _is_extension(module)}
    kept = {name for name, module in modules.items() if name in extensions or not (cut.library or _is_own(module))}
    out = set(first)
    while True:
        objects = {id(modules[name]) for name in out if name in modules}
        more = {
            name
            for name, module in modules.items()
            if name not in out and name not in kept and (name.rpartition(".")[0] in out or _holds(module, out, objects))
        }
        if not more:
            break
        out |= more
    for name in out:
        module = modules.get(name)
        if sys.modules.get(name) is module or name in first:
            sys.modules.pop(name, None)
        package, _, last = name.rpartition(".")
        parent = sys.modules.get(package)
        if isinstance(parent, ModuleType) and module is not None and vars(parent).get(last) is module:
            delattr(parent, last)
        if module is not None:
            _unregister_operators(module)
    for name, module in extensions.items():
        package, _, last = name.rpartition(".")
        if package in out:
            before_import(package, partial(_set, last, module))
    return out


def _set(name: str, extension: ModuleType, package: ModuleType) -> None:
    setattr(package, name, extension)


def _holds(module: ModuleType, names: Collection[str], objects: Collection[int]) -> bool:
    """Whether a module holds one of these modules, or an object that one of them defines.

    This accesses no attribute of an ordinary value: that could make a library's object import more.
    """
    return any(id(value) in objects or _defined_in(value) in names for value in list(vars(module).values()))


def _defined_in(value: Any) -> str:
    kind = type(value)
    holder = value if kind is FunctionType or issubclass(kind, type) else kind
    name = getattr(holder, "__module__", None)
    return name if isinstance(name, str) else ""


def _unregister_operators(module: ModuleType) -> None:
    """Unregister a module's operators from torch, which refuses to register them a second time."""
    library = getattr(sys.modules.get("torch.library"), "Library", None)
    for name, value in list(vars(module).items()) if library is not None else ():
        if type(value) is library:
            setattr(module, name, None)  # usually the last reference; deleting the library unregisters its operators


def _is_extension(module: ModuleType) -> bool:
    spec = vars(module).get("__spec__")
    return isinstance(getattr(spec, "loader", None), importlib.machinery.ExtensionFileLoader)


def _is_own(module: ModuleType) -> bool:
    """Whether a module is the user's own; a complete library that it imported is kept."""
    file = str(vars(module).get("__file__"))
    return not (INSTALLED.search(file) or file.startswith(STANDARD_LIBRARY))
