"""Let a script's own files replace modules that the warm process has imported, as they would in a new Python.

Covers: files beside the script; files in folders that the script puts at the beginning of ``sys.path``.
Does not cover: what other imported modules have taken from the replaced one: they keep it.
"""

from __future__ import annotations

import sys
from importlib.machinery import FrozenImporter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

# Imported at each start of Python, before a script can replace them; so are built-in and frozen modules.
_AT_START = frozenset(
    ("__main__", "abc", "codecs", "encodings", "genericpath", "io", "os", "posixpath", "site", "stat")
)


class ShadowedModules:
    """Forgets the modules that are replaced; ``forgotten`` has them by name."""

    def __init__(self) -> None:
        self.forgotten: dict[str, ModuleType] = {}
        self._from_start = frozenset(sys.modules)

    def forget(self, folder: str) -> None:
        """Forget modules that were imported at the start and whose names files in a folder have."""
        names = {path.stem for path in Path(folder).glob("*.py")}
        names |= {path.parent.name for path in Path(folder).glob("*/__init__.py")}
        for name in names - _AT_START - {__name__.partition(".")[0]}:
            if name in self._from_start and name in sys.modules and not _is_fixed(name):
                self._forget(name)

    def _forget(self, package: str) -> None:
        for name in [each for each in sys.modules if each == package or each.startswith(f"{package}.")]:
            if name in self._from_start:
                self.forgotten[name] = sys.modules.pop(name)


def _is_fixed(name: str) -> bool:
    return name in sys.builtin_module_names or FrozenImporter.find_spec(name) is not None


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
        if -len(self) < index < len(self) - 1:
            self._notice([folder])

    def __radd__(self, folders: list[Any]) -> SearchPath:
        found = SearchPath([*folders, *self], self._modules)
        self._notice(folders)
        return found

    def __setitem__(self, index: Any, value: Any) -> None:
        before = list(self)
        super().__setitem__(index, value)
        self._notice([each for each in self if each not in before])

    def _notice(self, folders: Iterable[Any]) -> None:
        for folder in folders:
            if isinstance(folder, str):
                self._modules.forget(folder or ".")
