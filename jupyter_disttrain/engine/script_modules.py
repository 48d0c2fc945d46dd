"""The modules of a script: each run imports a person's own modules anew, as they are on the disk then.

Covers: which modules are a person's, hiding what cells have imported of them, names that hide a script's.
Does not cover: the rest of what a script changes (``script_state``).
"""

from __future__ import annotations

import sys
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import TYPE_CHECKING

from .untimely import INSTALLED, PACKAGE, STANDARD_LIBRARY

if TYPE_CHECKING:
    from types import ModuleType

_at_start: frozenset[str] = frozenset(sys.modules)  # of the rank: what is no program's


def note_modules() -> None:
    """Take what is imported by now for no program's: it stays, whichever folder it is in."""
    global _at_start  # noqa: PLW0603  (a process is one rank)
    _at_start = frozenset(sys.modules)


class Modules:
    """The modules that are a person's own, wherever they lie: not installed, and not Python's."""

    def __init__(self) -> None:
        self._hidden = _take()

    def put_back(self) -> None:
        """Forget what the script has imported, and give cells theirs back."""
        _take()
        sys.modules.update(self._hidden)

    def say_hidden(self, folder: str) -> None:
        """Say which files beside a script it can't import, because the rank has imported another of that name."""
        names = {path.stem for path in Path(folder).glob("*.py")}
        names |= {path.parent.name for path in Path(folder).glob("*/__init__.py")}
        for name in sorted(names & _at_start):
            module = sys.modules.get(name)
            file = getattr(module, "__file__", None) or "a part of Python"
            if name != "__main__" and not Path(file).is_relative_to(folder):
                sys.stderr.write(
                    f"{name} beside the script is not what it imports: the rank has imported {file} under that name; "
                    "run it with --fresh, or rename it\n"
                )


def _take() -> dict[str, ModuleType]:
    found = {name: each for name, each in list(sys.modules.items()) if is_own(name, each)}
    for name in found:
        del sys.modules[name]
    return found


def is_own(name: str, module: ModuleType) -> bool:
    """Whether a module is a person's own, and can be imported again."""
    file = getattr(module, "__file__", None)
    if name in _at_start or name == "__mp_main__" or not isinstance(file, str):
        return False
    if INSTALLED.search(file) or file.startswith((STANDARD_LIBRARY, PACKAGE)):
        return False
    spec = getattr(module, "__spec__", None)
    return not isinstance(getattr(spec, "loader", None), ExtensionFileLoader)  # C code can't be imported again
