"""Import the user's own modules again in each run of a script, as they are on the disk then.

Covers: which modules are the user's, hiding those that cells have imported, names that hide a script's.
Does not cover: the rest of what a script changes (``isolation``).
"""

from __future__ import annotations

import sys
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import TYPE_CHECKING

from ...rank.interrupts.deferral import INSTALLED, PACKAGE, STANDARD_LIBRARY

if TYPE_CHECKING:
    from types import ModuleType

_at_start: frozenset[str] = frozenset(sys.modules)  # the rank's own imports: not a program's


def note_modules() -> None:
    """Record the imported modules as not a program's: they stay, whichever folder they are in."""
    global _at_start  # noqa: PLW0603  (a process is one rank)
    _at_start = frozenset(sys.modules)


class Modules:
    """The modules that are the user's own, wherever they are: not installed, and not Python's."""

    def __init__(self) -> None:
        self._hidden = _take()

    def put_back(self) -> None:
        """Drop the script's imports, and restore those of cells."""
        _take()
        sys.modules.update(self._hidden)

    def print_hidden(self, folder: str) -> None:
        """Print which files beside a script it can't import, as the rank has imported another module of that name."""
        names = {path.stem for path in Path(folder).glob("*.py")}
        names |= {path.parent.name for path in Path(folder).glob("*/__init__.py")}
        for name in sorted(names & _at_start):
            module = sys.modules.get(name)
            file = getattr(module, "__file__", None) or "a part of Python"
            if name != "__main__" and not Path(file).is_relative_to(folder):
                sys.stderr.write(
                    f"the script does not import {name} beside it: the rank has already imported {file} under that "
                    "name; run it with --fresh, or rename it\n"
                )


def _take() -> dict[str, ModuleType]:
    found = {name: each for name, each in list(sys.modules.items()) if is_own(name, each)}
    for name in found:
        del sys.modules[name]
    return found


def is_own(name: str, module: ModuleType) -> bool:
    """Whether a module is the user's own, and can be imported again."""
    file = getattr(module, "__file__", None)
    if name in _at_start or name == "__mp_main__" or not isinstance(file, str):
        return False
    if INSTALLED.search(file) or file.startswith((STANDARD_LIBRARY, PACKAGE)):
        return False
    spec = getattr(module, "__spec__", None)
    return not isinstance(getattr(spec, "loader", None), ExtensionFileLoader)  # C code can't be imported again
