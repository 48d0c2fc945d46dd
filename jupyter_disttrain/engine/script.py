"""A script on this rank, as torchrun would run it.

Covers: finding its code, its arguments and module ``__main__``, how it ends.
Does not cover: what it must not leave behind (``script_state``), programs in processes of their own (``programs``).
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from string import Template
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import own_code
from .script_state import put_back
from .streams import flush_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType


class ScriptError(Exception):
    """A script can't be run, or has ended with an exit code of its own."""

    def _render_traceback_(self) -> list[str]:
        """Return one line: no code of the person's is at fault."""
        return [f"{type(self).__name__}: {self}"]


class ScriptExit(ScriptError):  # noqa: N818  (SystemExit is not called an error either)
    """A script has ended with an exit code other than 0."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A program's code, and what Python gives a program to begin with."""

    code: CodeType
    first: str  # of sys.argv
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
        What follows in ``sys.argv``.
    folder
        The working directory.
    environment
        Variables that the script finds, whatever cells have made of them.

    Raises
    ------
    ScriptError
        If there is no such script or folder, or the script exits with another code than 0.
    """
    try:
        with put_back(folder) as state:
            os.environ.update(environment)
            found = _find_module(target) if is_module else _find_script(target)
            state.forget_modules_of(found.folder)
            _run(found, arguments)
    except OSError as error:
        if error.filename != folder:
            raise
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
    own_code.begin_script(found.code.co_filename)
    code: Any = 0
    with _exit_functions() as exit_functions:
        threads = set(threading.enumerate())
        try:
            exec(found.code, main.__dict__)  # noqa: S102  (it is what this is for)
        except SystemExit as end:
            code = end.code
        finally:
            if os.getpid() != process:  # a fork that was not told where to stop: in a script it would end here
                flush_all(sys.stdout, sys.stderr)
                os._exit(code if isinstance(code, int) else code is not None)
        for thread in set(threading.enumerate()) - threads:
            if not thread.daemon:
                thread.join()
        for function in reversed(exit_functions):
            function()
    _check_exit(code, Path(found.code.co_filename).name)


def _check_exit(code: Any, name: str) -> None:
    if code is None or code == 0:
        return
    if isinstance(code, int):
        raise ScriptExit(f"{name} exited with code {code}")
    raise ScriptExit(f"{name} exited: {code}")


def _find_script(target: str) -> _Found:
    path = Path(target).absolute()
    if not path.exists():
        raise ScriptError(f"there is no {target} in {Path.cwd()}")
    if path.is_dir() or path.suffix in {".zip", ".pyz"}:
        spec = PathFinder.find_spec("__main__", [str(path)])
        if spec is None:
            raise ScriptError(f"{target} has no __main__.py")
        return _Found(_code_of(spec), target, str(path), spec)
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ScriptError(f"{target} can't be read: {error.strerror}") from None
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
        raise ScriptError(f"no module is named {error.name!r} on this host; {target} is in it") from None
    if spec is None:
        raise ScriptError(f"no module that can be run is named {target!r} on this host")
    return _Found(_code_of(spec), str(spec.origin), here, spec)


def _code_of(spec: ModuleSpec) -> CodeType:
    code = getattr(spec.loader, "get_code", lambda _name: None)(spec.name)
    if code is None:
        raise ScriptError(f"{spec.name} is no Python code")
    return code  # type: ignore[no-any-return]


@contextmanager
def _exit_functions() -> Iterator[list[Callable[[], Any]]]:
    """Collect what a program registers to be called at its end; libraries' own stays for the process's end."""
    collected: list[tuple[Callable[..., Any], Callable[[], Any]]] = []
    calls: list[Callable[[], Any]] = []
    register, unregister = atexit.register, atexit.unregister

    def collect(function: Callable[..., Any], /, *args: Any, **options: Any) -> Callable[..., Any]:
        if _is_importing(sys._getframe(1)):  # noqa: SLF001
            return register(function, *args, **options)
        collected.append((function, lambda: function(*args, **options)))
        calls.append(collected[-1][1])
        return function

    def forget(function: Callable[..., Any]) -> None:
        unregister(function)
        for each, call in collected:
            if each == function and call in calls:
                calls.remove(call)

    atexit.register, atexit.unregister = collect, forget
    try:
        yield calls
    finally:
        atexit.register, atexit.unregister = register, unregister


def _is_importing(frame: Any) -> bool:
    """Whether a library is being imported: what it registers then is for every program that uses it."""
    while frame is not None and not own_code.is_own(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def fill_in(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Put this rank's numbers in the place of ``$LOCAL_RANK`` and its kin, and torchrun's ``${local_rank}``."""
    names = dict(environment) | {name.lower(): value for name, value in environment.items()}
    return [Template(argument).safe_substitute(names) for argument in arguments]
