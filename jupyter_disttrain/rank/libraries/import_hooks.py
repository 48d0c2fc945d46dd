"""Change a module as soon as it is imported.

Covers: modules that are imported already, and those that the user imports later, or never.
Does not cover: what is changed.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _Watch(MetaPathFinder):
    """Find modules as the other finders would, and change them when their code runs."""

    def __init__(self) -> None:
        self.before: dict[str, list[Callable[[Any], None]]] = {}
        self.after: dict[str, list[Callable[[Any], None]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.before and fullname not in self.after:
            return None
        # Finders of old kinds have no find_spec; Python skips them, too.
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                for change in self.before.get(fullname, ()):
                    change(module)
                run(module)
                for change in self.after.get(fullname, ()):
                    change(module)

            loader.exec_module = exec_module
        return spec


_watch = _Watch()


def on_import(name: str, change: Callable[[Any], None]) -> None:
    """Call ``change`` with the module of this name, now if it is imported, and after each later import."""
    if name in sys.modules:
        change(sys.modules[name])
    _add(_watch.after, name, change)


def before_import(name: str, change: Callable[[Any], None]) -> None:
    """Call ``change`` with the module of this name each time that it is imported, before its code runs."""
    _add(_watch.before, name, change)


def _add(changes: dict[str, list[Callable[[Any], None]]], name: str, change: Callable[[Any], None]) -> None:
    if change not in changes.setdefault(name, []):
        changes[name].append(change)
    if _watch not in sys.meta_path:
        sys.meta_path.insert(0, _watch)
