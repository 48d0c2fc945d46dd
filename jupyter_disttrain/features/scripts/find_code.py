"""Find the code of a script or module, and what Python sets for a program.

Covers: scripts, folders and archives with a ``__main__.py``, modules; arguments with variables of a rank.
Does not cover: running the code (``in_own_process``, ``in_session``).
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from .errors import ScriptError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType


@dataclass(frozen=True, slots=True)
class Code:
    """A program's code, and the values that Python sets for a program."""

    code: CodeType
    first: str  # first of sys.argv
    folder: str  # first of sys.path
    spec: ModuleSpec | None

    def names(self) -> dict[str, object]:
        """Return the variables of ``__main__`` that describe the program."""
        found: dict[str, object] = {"__file__": self.code.co_filename, "__spec__": self.spec, "__cached__": None}
        if self.spec is not None:
            found |= {"__loader__": self.spec.loader, "__package__": self.spec.parent, "__cached__": self.spec.cached}
        return found


def find_code(target: str, *, is_module: bool) -> Code:
    """Find and compile a script, relative to the working directory, or a module.

    Raises
    ------
    ScriptError
        If there is none, or it is not Python code.
    Exception
        What the compiler raises, or a package that contains the module.
    """
    return _find_module(target) if is_module else _find_script(target)


def fill_in(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Substitute ``$LOCAL_RANK`` and similar variables of this rank, and torchrun's ``${local_rank}``."""
    names = dict(environment) | {name.lower(): value for name, value in environment.items()}
    return [Template(argument).safe_substitute(names) for argument in arguments]


def _find_script(target: str) -> Code:
    path = Path(target).absolute()
    try:
        if not path.exists():
            raise ScriptError(f"there is no {target} in {Path.cwd()}")
        is_archive = path.is_dir() or path.suffix in {".zip", ".pyz"}
        source = b"" if is_archive else path.read_bytes()
    except OSError as error:
        raise ScriptError(f"{target} can't be read: {error.strerror}") from None
    if is_archive:
        spec = PathFinder.find_spec("__main__", [str(path)])
        if spec is None:
            raise ScriptError(f"{target} has no __main__.py")
        return Code(_code_of(spec), target, str(path), spec)
    return Code(compile(source, str(path), "exec", dont_inherit=True), target, str(path.resolve().parent), None)


def _find_module(target: str) -> Code:
    here = str(Path.cwd())
    sys.path = [here, *(path for path in sys.path if path)]
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{target}.__main__")
    except ModuleNotFoundError as error:
        if not f"{target}.".startswith(f"{error.name}."):
            raise  # an import of a package that the module is in
        raise ScriptError(f"there is no module {error.name!r}, which contains {target}, on this host") from None
    if spec is None:
        raise ScriptError(f"there is no module {target!r} that can be run on this host")
    return Code(_code_of(spec), str(spec.origin), here, spec)


def _code_of(spec: ModuleSpec) -> CodeType:
    code = getattr(spec.loader, "get_code", lambda _name: None)(spec.name)
    if code is None:
        raise ScriptError(f"{spec.name} is not Python code")
    return code  # type: ignore[no-any-return]
