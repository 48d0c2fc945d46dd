"""Run a script on this rank, as torchrun would run it.

Covers: finding its code, its arguments and module ``__main__``, its exit.
Does not cover: what it must not leave behind (``isolation``), programs in separate processes (``subprocess_run``).
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from string import Template
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from ...rank.kernel.cell_errors import interrupt_behind
from ...rank.output import user_code
from ...rank.output.streams import flush_all
from .errors import ScriptError, ScriptExit
from .isolation import put_back
from .teardown import program_end

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType


@dataclass(frozen=True, slots=True)
class _Found:
    """A program's code, and the values that Python sets for a program."""

    code: CodeType
    first: str  # first of sys.argv
    folder: str  # first of sys.path
    spec: ModuleSpec | None


def run_script(
    target: str, arguments: Sequence[str], *, is_module: bool, folder: str, environment: Mapping[str, str]
) -> None:
    """Run a script, or a module, as ``python`` would, in this process.

    Parameters
    ----------
    target
        The path of a script, or of a folder or archive with a ``__main__.py``; or a module's name.
    arguments
        The rest of ``sys.argv``.
    folder
        The working directory.
    environment
        Variables for the script, whatever cells have set.

    Raises
    ------
    ScriptError
        If there is no such script or folder, or the script exits with a code other than 0.
    """
    with put_back() as state:
        _enter(folder)
        os.environ.update(environment)
        found = _find_module(target) if is_module else _find_script(target)
        state.print_hidden(found.folder)
        _run(found, arguments)


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise ScriptError(f"the notebook's folder {folder} can't be entered on this host: {error.strerror}") from None


def _run(found: _Found, arguments: Sequence[str]) -> None:
    main = ModuleType("__main__")
    main.__dict__.update(__file__=found.code.co_filename, __spec__=found.spec, __builtins__=__builtins__)
    if found.spec is not None:
        main.__dict__.update(__loader__=found.spec.loader, __package__=found.spec.parent)
    sys.modules["__main__"] = main
    sys.argv = [found.first, *arguments]
    sys.path = [found.folder, *(path for path in sys.path if path)]
    process = os.getpid()
    user_code.begin_script(found.code.co_filename)
    code: Any = 0
    with program_end(main.__dict__):
        try:
            exec(found.code, main.__dict__)  # noqa: S102  (it is what this is for)
        except SystemExit as end:
            code = end.code
            interrupt = interrupt_behind(end)
            if interrupt is not None and code not in (None, 0):
                raise interrupt from None
        except BaseException:  # any end of the script; it must not propagate in a process that the script forked
            if os.getpid() != process:
                traceback.print_exc()
                code = 1
            else:
                raise
        finally:
            if os.getpid() != process:
                end_child(code)
    _check_exit(code, Path(found.code.co_filename).name)


def end_child(code: Any) -> NoReturn:
    """Exit a process that was forked and has reached the end of the code: in a script it would exit here."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)  # noqa: T201
        code = 1
    flush_all(sys.stdout, sys.stderr)
    os._exit(code or 0)


def _check_exit(code: Any, name: str) -> None:
    if code is None or code == 0:
        return
    if isinstance(code, int):
        raise ScriptExit(f"{name} exited with code {code}")
    raise ScriptExit(f"{name} exited: {code}")


def _find_script(target: str) -> _Found:
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
        return _Found(_code_of(spec), target, str(path), spec)
    return _Found(compile(source, str(path), "exec", dont_inherit=True), target, str(path.resolve().parent), None)


def _find_module(target: str) -> _Found:
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
    return _Found(_code_of(spec), str(spec.origin), here, spec)


def _code_of(spec: ModuleSpec) -> CodeType:
    code = getattr(spec.loader, "get_code", lambda _name: None)(spec.name)
    if code is None:
        raise ScriptError(f"{spec.name} is not Python code")
    return code  # type: ignore[no-any-return]


def fill_in(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Substitute ``$LOCAL_RANK`` and similar variables of this rank, and torchrun's ``${local_rank}``."""
    names = dict(environment) | {name.lower(): value for name, value in environment.items()}
    return [Template(argument).safe_substitute(names) for argument in arguments]
