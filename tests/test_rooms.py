"""Who may import whom, as the design says."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import jupyter_disttrain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .notebook_driver import Notebook

PACKAGE = Path(jupyter_disttrain.__file__).parent
NAME = PACKAGE.name
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "labextension" not in path.parts)
PLAIN = {
    "addresses",
    "locks",
    "private_files",
    "ranks",
    "messages",
    "config",
    "errors",
    "hosts",
    "slurm_options",
    "framework_variables",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, module_level: bool = False) -> Iterator[str]:
    """Yield what a file imports at run time: other packages by name, our own rooms as ``.room``."""
    for node in _nodes(ast.parse(path.read_text()), module_level=module_level):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = _from_names(path, node)
        else:
            continue
        for name in names:
            yield "." + name.removeprefix(NAME).lstrip(".") if name.split(".")[0] == NAME else name


def _from_names(path: Path, node: ast.ImportFrom) -> list[str]:
    if node.level == 0:
        assert node.module is not None
        return [node.module]
    package = path.relative_to(PACKAGE).parent.parts
    base = [NAME, *package[: len(package) - node.level + 1]]
    if node.module:
        return [".".join([*base, node.module])]
    return [".".join([*base, alias.name]) for alias in node.names]


def _nodes(tree: ast.AST, *, module_level: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if module_level and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        yield child
        yield from _nodes(child, module_level=module_level)


def rooms(path: Path) -> set[str]:
    return {name[1:].split(".")[0] for name in imports(path) if name.startswith(".")}


def in_room(*names: str) -> list[Path]:
    return [path for path in MODULES if module_name(path).split(".")[0] in names]


def test_the_plain_rooms_need_the_standard_library_only() -> None:
    for path in in_room(*PLAIN):
        for name in imports(path):
            known = name[1:] in PLAIN if name.startswith(".") else name.split(".")[0] in sys.stdlib_module_names
            assert known, f"{path.name} imports {name}"


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("engine", {"cluster", "notebook", "server"}),
        ("cluster", {"engine", "notebook", "server"}),
        ("notebook", {"engine", "server"}),
        ("server", {"engine", "notebook"}),
        ("values", {"engine", "cluster", "notebook", "server"}),
        ("shelf", {"engine", "cluster", "notebook", "server"}),
    ],
)
def test_a_room_does_not_reach_into_another(room: str, forbidden: set[str]) -> None:
    for path in in_room(room):
        assert not rooms(path) & forbidden, f"{module_name(path)} imports {rooms(path) & forbidden}"


def test_only_the_package_itself_imports_the_notebook_and_only_when_asked() -> None:
    for path in MODULES:
        if module_name(path).split(".")[0] != "notebook" and module_name(path):
            assert "notebook" not in rooms(path), module_name(path)
    own = PACKAGE / "__init__.py"
    assert "notebook" in rooms(own)
    assert not [name for name in imports(own, module_level=True) if name.startswith(".")]


def test_the_client_never_imports_torch_with_its_modules() -> None:
    for path in in_room("cluster", "notebook", "server", "values", "shelf", *PLAIN):
        found = [name for name in imports(path, module_level=True) if name.split(".")[0] in ("torch", "mpi4py")]
        assert not found, f"{module_name(path)} imports {found}"


def test_a_notebook_that_trains_has_no_torch(notebook: Notebook) -> None:
    notebook.run("%%distributed\ntorch.ones(1)").check()
    loaded = notebook.run("import sys; sorted({'torch', 'mpi4py', 'numpy.core'} & set(sys.modules))").check()
    assert loaded.text == "[]"
