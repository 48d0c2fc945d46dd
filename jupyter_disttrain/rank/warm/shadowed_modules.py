"""Let a script's own files replace modules that the warm process has imported, as they would in a new Python.

Covers: files beside the script; files in folders that the script puts at the beginning of ``sys.path``.
Does not cover: what other imported modules have taken from the replaced one: they keep it.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import FrozenImporter, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import ModuleType

# Imported at each start of Python, before a script can replace them; so are built-in and frozen modules.
_AT_START = frozenset(
    ("__main__", "abc", "codecs", "encodings", "genericpath", "io", "os", "posixpath", "site", "stat")
)


class ShadowedModules:
    """Forgets the modules that are replaced; ``forgotten`` has them by name."""

    def __init__(self) -> None:
        self.forgotten: dict[str, ModuleType] = {}
        self._from_start = dict(sys.modules)

    def forget(self, folder: str, path: Sequence[str]) -> None:
        """Forget modules that were imported at the start and that files in a folder of a search path replace."""
        names = {file.stem for file in Path(folder).glob("*.py")}
        names |= {file.parent.name for file in Path(folder).glob("*/__init__.py")}
        names -= {*_AT_START, *sys.builtin_module_names, __name__.partition(".")[0]}
        importlib.invalidate_caches()
        for name in names:
            if self._is_from_start(name) and _is_replaced(sys.modules[name], name, path):
                self._forget(name)

    def _is_from_start(self, name: str) -> bool:
        return name in sys.modules and sys.modules[name] is self._from_start.get(name)

    def _forget(self, package: str) -> None:
        for name in [each for each in list(sys.modules) if each == package or each.startswith(f"{package}.")]:
            if self._is_from_start(name):
                self.forgotten[name] = sys.modules.pop(name)


def _is_replaced(module: ModuleType, name: str, path: Sequence[str]) -> bool:
    """Whether an import by a search path would find another file than that of a module."""
    if FrozenImporter.find_spec(name) is not None:
        return False
    found = PathFinder.find_spec(name, path)
    file = getattr(module, "__file__", None)
    return found is not None and found.origin is not None and (file is None or not _is_same(found.origin, file))


def _is_same(first: str, second: str) -> bool:
    return os.path.realpath(first) == os.path.realpath(second)


class SearchPath(list[Any]):
    """``sys.path`` of a script, which notices folders that the script puts at its beginning."""

    def __init__(self, folders: Iterable[str], modules: ShadowedModules) -> None:
        super().__init__(folders)
        self._modules = modules

    def __reduce__(self) -> Any:
        return list, (list(self),)

    def insert(self, index: Any, folder: Any) -> None:
        """Insert a folder."""
        super().insert(index, folder)
        self._notice([folder])

    def __add__(self, folders: list[Any]) -> SearchPath:
        return SearchPath([*self, *folders], self._modules)

    def __radd__(self, folders: list[Any]) -> SearchPath:
        found = SearchPath([*folders, *self], self._modules)
        found._notice(folders)
        return found

    def __setitem__(self, index: Any, value: Any) -> None:
        before = list(self)
        super().__setitem__(index, value)
        self._notice([each for each in self if each not in before])

    def _notice(self, folders: Iterable[Any]) -> None:
        for folder in folders:
            if isinstance(folder, str):
                self._modules.forget(folder or ".", self)
