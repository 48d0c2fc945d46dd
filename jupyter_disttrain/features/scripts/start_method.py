"""Find out from a script's source, and that of the modules beside it, how it has to be started.

Covers: imports of mpi4py and Horovod, wherever they are in the files; environment variables that are set before torch
is imported.
Does not cover: scripts that only other hosts have; imports by name at run time (``--mpi`` is for these); names of
variables that are computed.
"""

from __future__ import annotations

import ast
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ...source_imports import imported, parse

if TYPE_CHECKING:
    from collections.abc import Iterator

MPI_MODULES = ("mpi4py", "horovod")
# An environment variable that is set: name, value (empty: removed; None: computed), and whether only if it is not set.
Assigned = tuple[str, "str | None", bool]


@dataclass(slots=True)
class Sources:
    """What was found in a script's files."""

    uses_mpi: bool = False
    # Those that are set above the file's import of torch, or in a file that doesn't import it.
    variables: list[Assigned] = field(default_factory=list)


def read_sources(target: str, folder: str, *, is_module: bool) -> Sources:
    """Read a script, or a module, of the notebook's folder, and the local modules that it may import."""
    if is_module:
        base = Path(folder)
        begin = [*_files_of(base, target), (base.joinpath(*target.split("."), "__main__.py"), target)]
    else:
        path = Path(folder, target)
        path = path / "__main__.py" if os.path.isdir(path) else path  # noqa: PTH112  (any name: also one that is too long)
        base, begin = path.parent, [(path, "")]
    found = Sources()
    waiting, seen = begin, {file for file, _ in begin}
    while waiting:
        file, name = waiting.pop()
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        try:
            tree = parse(file.read_bytes())
        except OSError:  # the ranks report a script that is not there
            continue
        found.variables += _variables_before_torch(tree)
        for each in imported(tree, package):
            found.uses_mpi = found.uses_mpi or each.partition(".")[0] in MPI_MODULES
            local = [(path, name) for path, name in _files_of(base, each) if path not in seen]
            seen.update(path for path, _ in local)
            waiting.extend(local)
    return found


def _files_of(base: Path, name: str) -> Iterator[tuple[Path, str]]:
    """Yield the files below a folder that an import of a module runs, each with its module's name."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        place = base.joinpath(*parts[:count])
        candidates = (place.with_name(f"{place.name}.py"), place / "__init__.py") if parts[count - 1] else ()
        found = next((file for file in candidates if os.path.isfile(file)), None)  # noqa: PTH113  (any name, as above)
        if found is not None:
            yield found, ".".join(parts[:count])


def _variables_before_torch(tree: ast.Module) -> Iterator[Assigned]:
    """Yield the environment variables that a file sets above the first line that imports torch when the file runs."""
    first = min(_imports_of_torch(tree.body), default=None)
    for node in ast.walk(tree):
        if first is None or getattr(node, "lineno", first) < first:
            yield from _variables_set(node)


def _imports_of_torch(statements: list[ast.stmt]) -> Iterator[int]:
    """Yield the lines in which a module imports torch when it runs."""
    for node in statements:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [] if node.level else [node.module or ""]
        else:
            names = []
        if any(name.partition(".")[0] == "torch" for name in names):
            yield node.lineno
        if isinstance(node, (ast.Try, ast.With, ast.If)):
            is_run = not isinstance(node, ast.If) or "TYPE_CHECKING" not in ast.dump(node.test)
            yield from _imports_of_torch(node.body if is_run else [])


def _variables_set(node: ast.AST) -> Iterator[Assigned]:
    """Yield the environment variables that one statement or call sets or removes."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            for each in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
                yield from _set_item(each, node.value if each is target else None)
    elif isinstance(node, ast.Delete):
        for target in node.targets:
            yield from _set_item(target, ast.Constant(""))
    elif isinstance(node, ast.AugAssign) and _is_environ(node.target):
        yield from _items(node.value)
    elif isinstance(node, ast.AugAssign):
        yield from _set_item(node.target, None)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield from _set_by_call(node, node.func)


def _set_item(target: ast.expr, value: ast.expr | None) -> Iterator[Assigned]:
    """Yield the variable of ``os.environ[name] = value``, as a default in ``... = os.environ.get(name, default)``."""
    if isinstance(target, ast.Subscript) and _is_environ(target.value):
        default = _default_of(value, _text(target.slice))
        yield from _named(target.slice, _text(default or value), is_default=default is not None)


def _default_of(value: ast.expr | None, name: str | None) -> ast.expr | None:
    """Return the default of an expression that reads the variable itself; None if the expression is another."""
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and len(value.args) > 1):
        return None
    is_reading = value.func.attr == "getenv" or (value.func.attr == "get" and _is_environ(value.func.value))
    return value.args[1] if is_reading and _text(value.args[0]) == name else None


def _set_by_call(node: ast.Call, function: ast.Attribute) -> Iterator[Assigned]:
    method, arguments = function.attr, node.args
    if method in {"putenv", "unsetenv"} and arguments:
        yield from _named(arguments[0], _text(arguments[-1]) if method == "putenv" else "")
    elif not _is_environ(function.value):
        return
    elif method == "update":
        for argument in arguments:
            yield from _items(argument)
        yield from _keywords(node)
    elif method in {"setdefault", "pop"} and arguments:
        is_default = method == "setdefault"
        yield from _named(arguments[0], _text(arguments[-1]) if is_default else "", is_default=is_default)


def _keywords(node: ast.Call) -> Iterator[Assigned]:
    for keyword in node.keywords:
        if keyword.arg is not None:
            yield keyword.arg, _text(keyword.value), False


def _items(node: ast.AST) -> Iterator[Assigned]:
    """Yield the variables of a dictionary that is written in the source, as ``{...}`` or ``dict(...)``."""
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            yield from _named(key, _text(value))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        yield from _keywords(node)


def _named(name: ast.AST | None, value: str | None, *, is_default: bool = False) -> Iterator[Assigned]:
    if (text := _text(name)) is not None:
        yield text, value, is_default


def _is_environ(node: ast.AST) -> bool:
    """Whether an expression is ``os.environ``, as its name shows."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name == "environ"


def _text(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
