"""Clean up after imports that an interrupt cut off.

Covers: modules whose import had begun and did not end, those that were imported meanwhile and refer to them, the names
of libraries that may be damaged for good.
Does not cover: when an import may be cut off (``untimely``).

Python takes a module out of ``sys.modules`` whose code fails, but not the parts of a package that were whole by then:
the next import finds these and makes a package that does not have them as attributes. Nor does it take out a module
that caught the interrupt of an import of its own and went on without it. Here all of them are taken out, and whatever
was imported meanwhile and holds something of theirs, so that the next import begins from the start. Modules that were
whole and hold nothing of them stay.

Two kinds can't be imported a second time. C extensions stay, and are put back into their package when that is imported.
What has registered itself somewhere fails at its second import; then, and whenever the import of a library was cut off,
the cell's reply names the module.
"""

from __future__ import annotations

import importlib.machinery
import sys
import traceback
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from .on_import import before_import
from .untimely import is_body_of_library, outwards

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from types import FrameType


@dataclass(frozen=True, slots=True)
class _Cut:
    """What an interrupt cut off."""

    stack: Mapping[str, ModuleType | None]  # modules whose import had begun and not ended, innermost first
    begun: Mapping[str, ModuleType]  # all modules whose import had begun since the outermost of these
    library: str  # the outermost module on the stack that is a library's, or C code; empty if there is none


class CutImports:
    """The imports that interrupts cut off in this process."""

    def __init__(self) -> None:
        self._cuts: list[_Cut] = []  # of the cell that runs
        self._taken_out: set[str] = set()
        self._damaged: set[str] = set()  # libraries

    def note(self, frame: FrameType | None) -> None:
        """Note what is being imported; called by a handler of SIGINT, right before it raises."""
        stack: dict[str, ModuleType | None] = {}
        library = ""
        for each in outwards(frame):
            spec = _spec_of(each)
            if spec is None:
                continue
            stack.setdefault(spec.name, sys.modules.get(spec.name))
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
        """Take out what the cell's interrupts left half imported; return the modules that may still be damaged."""
        cuts, self._cuts = self._cuts, []
        told = []
        for cut in cuts:
            whole = [name for name, module in cut.stack.items() if _is_whole(name, module)]
            if next(iter(cut.stack)) in whole:
                continue  # the innermost one's own code dealt with the interrupt
            half = [name for name in cut.stack if name not in whole]
            taken = _take_out({*half, *whole[:1]}, cut)
            self._taken_out |= taken
            if cut.library:
                self._damaged.add(cut.library)
                told.append(cut.library)
            elif whole:
                told.append(half[-1])  # what caught the interrupt has gone on without it
        return told

    def behind(self, error: BaseException) -> list[str]:
        """Return which modules, whose import was cut off earlier, an error comes from."""
        libraries = {name.partition(".")[0]: name for name in self._damaged}
        found: dict[str, None] = {}
        link: BaseException | None = error
        seen: set[int] = set()
        while link is not None and id(link) not in seen:
            seen.add(id(link))
            for frame, _ in traceback.walk_tb(link.__traceback__):
                name = str(frame.f_globals.get("__name__", ""))
                if frame.f_code.co_name == "<module>" and name in self._taken_out and name not in sys.modules:
                    found[name] = None
                if library := libraries.get(name.partition(".")[0]):
                    found[library] = None
            link = link.__cause__ or link.__context__
        return list(found)


def _spec_of(frame: FrameType) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of the module that a frame is importing, if it is."""
    spec: Any = None
    if frame.f_code.co_name == "<module>":
        spec = frame.f_globals.get("__spec__")
    elif frame.f_code.co_name == "_load_unlocked" and frame.f_code.co_filename.startswith("<frozen importlib"):
        spec = frame.f_locals.get("spec")
    is_importing = isinstance(spec, importlib.machinery.ModuleSpec) and getattr(spec, "_initializing", False)
    return spec if is_importing else None


def _is_whole(name: str, module: ModuleType | None) -> bool:
    """Whether a module that was being imported has been imported since."""
    return module is not None and sys.modules.get(name) is module


def _take_out(first: Collection[str], cut: _Cut) -> set[str]:
    """Take modules out, and those imported meanwhile that hold something of them; return the names of all."""
    modules = {**cut.begun, **{name: module for name, module in cut.stack.items() if module is not None}}
    kept = {name: module for name, module in modules.items() if _is_extension(module)}
    out = set(first)
    while True:
        objects = {id(modules[name]) for name in out if name in modules}
        more = {
            name
            for name, module in modules.items()
            if name not in out and name not in kept and (_parent(name) in out or _holds(module, out, objects))
        }
        if not more:
            break
        out |= more
    for name in out:
        module = modules.get(name)
        if sys.modules.get(name) is module or name in first:
            sys.modules.pop(name, None)
        parent = sys.modules.get(_parent(name))
        if parent is not None and module is not None and vars(parent).get(_last(name)) is module:
            delattr(parent, _last(name))
        if module is not None:
            _unregister_operators(module)
    for name, module in kept.items():
        if _parent(name) in out:
            before_import(_parent(name), _Put(_last(name), module))
    return out


@dataclass(frozen=True, slots=True)
class _Put:
    """Puts a C extension back into its package."""

    name: str
    extension: ModuleType

    def __call__(self, package: ModuleType) -> None:
        setattr(package, self.name, self.extension)


def _holds(module: ModuleType, names: Collection[str], objects: Collection[int]) -> bool:
    """Whether a module holds one of these modules, or something that one of them defines.

    Nothing is asked of the values themselves: those of libraries may import more when they are.
    """
    return any(id(value) in objects or _defined_in(value) in names for value in list(vars(module).values()))


def _defined_in(value: Any) -> str:
    kind = type(value)
    holder = value if kind is FunctionType or issubclass(kind, type) else kind
    name = getattr(holder, "__module__", None)
    return name if isinstance(name, str) else ""


def _unregister_operators(module: ModuleType) -> None:
    """Let go of the operators that a module registered with torch, which refuses to register them a second time."""
    library = getattr(sys.modules.get("torch.library"), "Library", None)
    for name, value in list(vars(module).items()) if library is not None else ():
        if type(value) is library:
            setattr(module, name, None)  # nothing else holds it, as a rule; its end unregisters them


def _is_extension(module: ModuleType) -> bool:
    spec = vars(module).get("__spec__")
    return isinstance(getattr(spec, "loader", None), importlib.machinery.ExtensionFileLoader)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
