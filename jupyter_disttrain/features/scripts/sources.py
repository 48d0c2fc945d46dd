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


@dataclass(slots=True)
class Sources:
    """What was found in a script's files."""

    uses_mpi: bool = False
    # Environment variables that are set before torch is imported in the file, or that are set in a file that doesn't
    # import it: name, value (empty: removed; None: computed), and whether only if the variable is not set.
    variables: list[tuple[str, str | None, bool]] = field(default_factory=list)


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


def _variables_before_torch(tree: ast.Module) -> Iterator[tuple[str, str | None, bool]]:
    """Yield the environment variables that a file sets above its first import of torch."""
    nodes = list(ast.walk(tree))
    imports = (each for each in nodes if isinstance(each, (ast.Import, ast.ImportFrom)))
    first = min((each.lineno for each in imports if _is_of_torch(each)), default=None)
    for node in nodes:
        if first is None or getattr(node, "lineno", first) < first:
            yield from _variables_set(node)


def _is_of_torch(node: ast.Import | ast.ImportFrom) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    return any(name.partition(".")[0] == "torch" for name in names)


def _variables_set(node: ast.AST) -> Iterator[tuple[str, str | None, bool]]:
    """Yield the environment variables that one statement or call sets or removes."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _is_environ(target.value):
                value = _text(node.value) if isinstance(node, ast.Assign) else ""
                yield from _named(target.slice, value)
    elif isinstance(node, ast.AugAssign) and _is_environ(node.target):
        yield from _items(node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield from _set_by_call(node, node.func)


def _set_by_call(node: ast.Call, function: ast.Attribute) -> Iterator[tuple[str, str | None, bool]]:
    method, arguments = function.attr, node.args
    if method == "putenv" and arguments:
        yield from _named(arguments[0], _text(arguments[-1]))
    elif not _is_environ(function.value):
        return
    elif method == "update":
        for argument in arguments:
            yield from _items(argument)
        yield from _keywords(node)
    elif method in {"setdefault", "pop"} and arguments:
        is_default = method == "setdefault"
        yield from _named(arguments[0], _text(arguments[-1]) if is_default else "", is_default=is_default)


def _keywords(node: ast.Call) -> Iterator[tuple[str, str | None, bool]]:
    for keyword in node.keywords:
        if keyword.arg is not None:
            yield keyword.arg, _text(keyword.value), False


def _items(node: ast.AST) -> Iterator[tuple[str, str | None, bool]]:
    """Yield the variables of a dictionary that is written in the source, as ``{...}`` or ``dict(...)``."""
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            yield from _named(key, _text(value))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        yield from _keywords(node)


def _named(
    name: ast.AST | None, value: str | None, *, is_default: bool = False
) -> Iterator[tuple[str, str | None, bool]]:
    if (text := _text(name)) is not None:
        yield text, value, is_default


def _is_environ(node: ast.AST) -> bool:
    """Whether an expression is ``os.environ``, as its name shows."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name == "environ"


def _text(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
