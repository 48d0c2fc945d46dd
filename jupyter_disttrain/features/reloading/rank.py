"""Update the user's own modules on this rank, for ``%dist_sync_code``.

Covers: which modules are the user's own and which of them were edited since their import, writing files from the
notebook's machine, reloading in the order of imports.
Does not cover: which files are sent (``features.reloading.client``), scripts, which import such modules again
(``features.scripts.runner``).

Reloading is IPython's own, as in its ``%autoreload``. Where that fails half-way, old and new code would stay mixed, and
every later attempt would fail as well.
"""

from __future__ import annotations

import gc
import hashlib
import os
import socket
import sys
import traceback
from contextlib import suppress
from enum import Enum
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from ...rank.interrupts.deferral import INSTALLED, PACKAGE, STANDARD_LIBRARY
from ...rank.kernel.tracebacks import is_of_user
from ...rank.process_group.object_replacement import thaw
from ...source_imports import imported

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from types import ModuleType

_SEEN = "_disttrain_seen"  # attribute of a module's loader: mtime and size of the file that it has read
_at_start: frozenset[str] = frozenset(sys.modules)  # the rank's own imports


def note_modules() -> None:
    """Record the imported modules as the rank's own: they stay, whichever folder they are in."""
    global _at_start  # noqa: PLW0603  (a process is one rank)
    _at_start = frozenset(sys.modules)


def note_files() -> None:
    """Patch the import system to record mtime and size of each file that it reads."""
    original = SourceFileLoader.path_stats
    if hasattr(original, _SEEN):
        return

    def path_stats(self: SourceFileLoader, path: str) -> Any:
        stats = original(self, path)
        setattr(self, _SEEN, (stats["mtime"], stats["size"]))
        return stats

    setattr(path_stats, _SEEN, True)
    SourceFileLoader.path_stats = path_stats  # type: ignore[method-assign]


class LocalModules:
    """The modules of this rank that the user may edit."""

    def __init__(self) -> None:
        self._folder = Path.cwd()  # the rank's initial directory: cells may change it
        self._old_objects: dict[Any, Any] = {}  # state of IPython's reloader

    def state(self) -> dict[str, Any]:
        """Return the rank's initial folder, the files of the user's modules by name, and the edited modules."""
        files = {name: str(module.__file__) for name, module in _own().items()}
        return {"folder": str(self._folder), "files": files, "edited": [name for name in files if _is_edited(name)]}

    def compare(self, folder: str, hashes: Mapping[str, str]) -> list[str]:
        """Return the files that are missing here or differ from those in the notebook's folder."""
        return [name for name, hashed in hashes.items() if _hash(self._place(folder, name)) != hashed]

    def write(self, folder: str, names: Sequence[str], contents: Sequence[Any]) -> None:
        """Write files of the notebook's folder where this rank imports them, in place of links to files.

        Raises a ValueError for a folder that is a link to somewhere else: others may use what is in it, and it may hold
        more files than are sent.
        """
        for name, content in zip(names, contents, strict=True):
            path = self._place(folder, name)
            if self._is_elsewhere(folder, path.parent):
                raise ValueError(
                    f"{name} differs from the one in the notebook's folder, and {path.parent} is reached through a "
                    f"link to {path.parent.resolve()}, which is not written to; copy the file there, or replace the "
                    "link with a folder"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            # Another rank may write the same file on a file system that hosts share.
            new = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.new")
            new.write_bytes(content)
            new.replace(path)  # atomic: a rank that imports it now reads the old or the new file

    def remove(self, folder: str, hashes: Mapping[str, str]) -> list[str]:
        """Remove files with these contents, and folders that become empty; return the removed files."""
        removed = []
        for name, hashed in hashes.items():
            path = self._place(folder, name)
            if _hash(path) != hashed or self._is_elsewhere(folder, path.parent):
                continue
            try:
                path.unlink()
            except FileNotFoundError:  # a rank of another host has removed it, on a file system that both share
                continue
            Path(cache_from_source(str(path))).unlink(missing_ok=True)
            removed.append(name)
            _remove_empty(path.parent, Path(name).parent)
        return removed

    def _place(self, folder: str, name: str) -> Path:
        """Return a file's path here; a module that is a link, or in a linked folder, is imported through the link."""
        base = self._base(folder)
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{name} is outside of {base}")
        return base / name

    def _base(self, folder: str) -> Path:
        """Return the same folder if it exists here, else the rank's initial folder."""
        return Path(folder) if Path(folder).is_dir() else self._folder

    def _is_elsewhere(self, folder: str, path: Path) -> bool:
        return not path.resolve().is_relative_to(self._base(folder).resolve())

    def reload(self, variables: dict[str, Any]) -> dict[str, list[str]]:
        """Reload the edited modules; ``variables`` of cells that hold their classes get the new ones.

        Returns names of modules (``reloaded``), locations and reasons (``failed``), and classes whose objects keep the
        old code (``kept``). A module that imports one that failed is reloaded nevertheless.
        """
        found: dict[str, list[str]] = {"reloaded": [], "failed": [], "kept": []}
        for name in _in_order([name for name in _own() if _is_edited(name)]):
            try:
                found["kept"] += _reload(sys.modules[name], self._old_objects, variables)
            except Exception as error:  # noqa: BLE001  (the module's own code may raise anything)
                found["failed"].append(_reason(error, name))
            else:
                found["reloaded"].append(name)
        return found


def _reload(module: ModuleType, old_objects: dict[Any, Any], variables: dict[str, Any]) -> list[str]:
    """Execute a module's file again; the module is unchanged if that fails. Returns what keeps the old code."""
    from IPython.extensions import autoreload  # noqa: PLC0415  (few sessions need it)

    # Python takes compiled code for current if the file has the same size and second: two edits within one second.
    Path(cache_from_source(str(module.__file__))).unlink(missing_ok=True)
    kept: dict[str, None] = {}

    def is_of_module(value: Any) -> bool:
        return bool(value.__module__ == module.__name__)

    def fits(old: Any, new: Any) -> bool:
        """Whether a function can take the other's code; if not, the class gets the other function."""
        if not (isinstance(old, FunctionType) and isinstance(new, FunctionType) and is_of_module(old)):
            return False
        return len(old.__code__.co_freevars) == len(new.__code__.co_freevars)

    def move_objects(old: type, new: type) -> None:
        for each in gc.get_referrers(old):
            if type(each) is old:
                try:
                    object.__setattr__(each, "__class__", new)
                except TypeError as error:
                    kept[f"{old.__module__}.{old.__qualname__} ({error})"] = None

    # IPython's own rules would also change what the module only uses, such as the class torch.optim.SGD that one of its
    # attributes was set to. A class gets the new object for whatever no rule applies to.
    rules = [
        (fits, autoreload.update_function),
        (
            lambda old, new: isinstance(old, type) and isinstance(new, type) and is_of_module(old),
            autoreload.update_class,
        ),
        (
            lambda old, new: fits(getattr(old, "__func__", None), getattr(new, "__func__", None)),
            lambda old, new: autoreload.update_function(old.__func__, new.__func__),
        ),
    ]
    before = dict(module.__dict__)
    thaw()  # gc.get_referrers does not search objects that were frozen
    try:
        with patch.multiple(autoreload, UPDATE_RULES=rules, update_instances=move_objects):
            autoreload.superreload(module, old_objects=old_objects)
    except BaseException:  # an interrupt too, after which IPython's reloader leaves the module empty
        module.__dict__.clear()
        module.__dict__.update(before)
        raise
    _rebind(before, module, [variables, *map(vars, _own().values())])
    return list(kept)


def _rebind(before: Mapping[str, Any], module: ModuleType, namespaces: Iterable[dict[str, Any]]) -> None:
    """Give variables that hold a class of a reloaded module, or a member of its enums, the new one; keep submodules."""
    for name, value in before.items():
        if value is sys.modules.get(f"{module.__name__}.{name}"):  # Python sets them only when it imports them
            module.__dict__.setdefault(name, value)
    olds = [old for old in before.values() if isinstance(old, type) and old.__module__ == module.__name__]
    new_of = {id(old): getattr(module, old.__qualname__, None) for old in olds}
    for variables in namespaces:
        for name, value in list(variables.items()):
            new = new_of.get(id(value))
            if isinstance(new, type):
                variables[name] = new
            elif isinstance(value, Enum) and type(value).__module__ == module.__name__:
                kind = getattr(module, type(value).__qualname__, None)
                variables[name] = getattr(kind, "__members__", {}).get(value.name, value)


def _own() -> dict[str, ModuleType]:
    """Return the imported modules that are the user's own, wherever they are, and can be imported again."""
    own: dict[str, ModuleType] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name in _at_start or name in ("__main__", "__mp_main__") or not isinstance(file, str):
            continue
        # Other files are e.g. of C code, which can't be imported again.
        if file.endswith(".py") and not (INSTALLED.search(file) or file.startswith((STANDARD_LIBRARY, PACKAGE))):
            own[name] = module
    return own


def _is_edited(name: str) -> bool:
    module = sys.modules[name]
    seen = getattr(getattr(module.__spec__, "loader", None), _SEEN, None)
    try:
        now = Path(str(module.__file__)).stat()
    except OSError:
        return False  # the file was removed or renamed: keep the imported module
    return seen is not None and seen != (now.st_mtime, now.st_size)


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _remove_empty(folder: Path, below: Path) -> None:
    """Remove empty folders upwards, at most as many as ``below`` has parts: they could be imported as packages."""
    for _ in below.parts:
        with suppress(OSError):  # missing or not empty
            (folder / "__pycache__").rmdir()
        try:
            folder.rmdir()
        except OSError:
            return  # not empty
        folder = folder.parent


def _in_order(names: Collection[str]) -> list[str]:
    """Return the modules in an order in which each follows those that it imports."""
    ordered: list[str] = []
    begun: set[str] = set()

    def visit(name: str) -> None:
        if name not in begun:
            begun.add(name)
            module = sys.modules[name]
            content = Path(str(module.__file__)).read_bytes()
            for other in sorted(imported(content, module.__package__ or "") & set(names)):
                visit(other)
            ordered.append(name)

    for name in sorted(names):
        visit(name)
    return ordered


def _reason(error: Exception, name: str) -> str:
    """Return where in the user's files a reload failed, and why."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_of_user(frame.filename)]
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else name
    return f"{place}: {type(error).__name__}: {error}"
