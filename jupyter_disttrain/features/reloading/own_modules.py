"""Determine which imported modules are the user's own, wherever they are: not installed, and not Python's."""

from __future__ import annotations

import sys
from importlib.machinery import ExtensionFileLoader
from typing import TYPE_CHECKING

from ...rank.interrupts.deferral import INSTALLED, PACKAGE, STANDARD_LIBRARY

if TYPE_CHECKING:
    from types import ModuleType

_at_start: frozenset[str] = frozenset(sys.modules)  # the rank's own imports


def note_modules() -> None:
    """Record the imported modules as the rank's own: they stay, whichever folder they are in."""
    global _at_start  # noqa: PLW0603  (a process is one rank)
    _at_start = frozenset(sys.modules)


def is_own(name: str, module: ModuleType) -> bool:
    """Whether a module is the user's own, and can be imported again."""
    file = getattr(module, "__file__", None)
    if name in _at_start or name == "__mp_main__" or not isinstance(file, str):
        return False
    if INSTALLED.search(file) or file.startswith((STANDARD_LIBRARY, PACKAGE)):
        return False
    spec = getattr(module, "__spec__", None)
    return not isinstance(getattr(spec, "loader", None), ExtensionFileLoader)  # C code can't be imported again
