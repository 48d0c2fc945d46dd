"""Changing a module as soon as it is imported.

Covers: modules that are there already, and those that a person imports later, or never.
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
    """Find one module as the others would, and have it changed once its code has run."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name = name
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self._change(module)

            loader.exec_module = exec_module
        return spec


def on_import(name: str, change: Callable[[Any], None]) -> None:
    """Call ``change`` with the module of this name, now if it is there, else each time that it is imported anew."""
    if name in sys.modules:
        change(sys.modules[name])
    sys.meta_path.insert(0, _Watch(name, change))
