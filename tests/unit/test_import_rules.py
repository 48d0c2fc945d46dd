"""Which module may import which, how many are in a folder, how classes inherit.

Known violations are listed with each rule. A list may only shrink: a test also fails as soon as an entry no longer
applies.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import jupyter_disttrain

if TYPE_CHECKING:
    from collections.abc import Iterator


PACKAGE = Path(jupyter_disttrain.__file__).parent
NAME = PACKAGE.name
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "labextension" not in path.parts)
PLAIN = {
    "run_command",
    "protocol",
    "config",
    "errors",
    "private_files",
    "source_imports",
    "process_table",
    "file_lock",
}  # import each other and the standard library only
# Allowed imports of each package; ``features`` has its own rules.
ALLOWED = {
    "sigint": PLAIN,
    "rank_sessions": PLAIN,
    "launchers": PLAIN | {"sigint", "rank_sessions"},
    "client": PLAIN | {"sigint", "rank_sessions", "launchers", "features"},
    "notebook": PLAIN | {"sigint", "client", "launchers", "features"},
    "server": PLAIN | {"client", "features"},
    "doctor": PLAIN | {"", "client", "launchers"},
    "rank": PLAIN | {"rank_sessions", "features"},
}
ON_THE_NOTEBOOK_SIDE = ("notebook", "server", "cli", "client", "launchers", "doctor")
MOST_MODULES = 12  # in a folder

# Known violations of the rules.
FEATURES_WITHIN_FEATURES = {
    "features.scripts.client": {"export"},
    "features.scripts.in_own_process": {"horovod"},
    "features.telemetry.rank.stacks": {"horovod"},
}
NOT_PLAIN = {"protocol.metric_blocks": {"numpy"}, "protocol.serialization": {"cloudpickle", "torch"}}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, module_level: bool = False) -> Iterator[str]:
    """Yield what a file imports at run time: other packages by name, our own modules as ``.module``."""
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


@cache
def edges() -> dict[str, set[str]]:
    """Return the modules of ours that each one imports, in functions and under TYPE_CHECKING too."""
    modules = {module_name(path): path for path in MODULES}
    return {name: set(_imported(path, modules)) - {name} for name, path in modules.items()}


def _imported(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.level or f"{node.module}.".startswith(f"{NAME}.")):
            continue
        package = path.relative_to(PACKAGE).parent.parts
        base = list(package[: len(package) - node.level + 1]) if node.level else []
        base += [part for part in (node.module or "").split(".") if part and part != NAME]
        for alias in node.names:
            full = ".".join([*base, alias.name])
            yield full if full in modules else ".".join(base)


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that all reach each other."""
    reached = {name: _reached(name, graph) for name in graph}
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted((set(each) for each in found if len(each) > 1), key=sorted)


def _reached(name: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = [name]
    while ahead:
        new = graph[ahead.pop()] - seen
        seen |= new
        ahead += new
    return seen


def mixins() -> dict[str, set[str]]:
    """Return the classes with several base classes of ours, exceptions left out."""
    found = {}
    for path in MODULES:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)} & CLASSES
                if len(bases) > 1:
                    found[f"{module_name(path)}.{node.name}"] = bases
    return found


CLASSES = {
    node.name
    for path in MODULES
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.ClassDef) and not node.name.endswith("Error")
}


def packages(path: Path) -> set[str]:
    """Return the top-level packages and modules of ours that a file imports."""
    return {name[1:].split(".")[0] for name in imports(path) if name.startswith(".")}


def in_package(*names: str) -> list[Path]:
    return [path for path in MODULES if module_name(path).split(".")[0] in names]


def is_of_ranks(name: str) -> bool:
    """Return whether a module runs only in a rank's process or its nanny."""
    parts = name.split(".")
    return parts[0] == "rank" or (parts[0] == "features" and "rank" in parts[2:])


def test_no_import_cycles() -> None:
    assert circles(edges()) == []


def test_no_folder_has_too_many_modules() -> None:
    files = [*MODULES, *Path(__file__).parents[1].rglob("*.py")]
    folders = Counter(path.parent for path in files if path.name != "__init__.py")
    assert {name: count for name, count in folders.items() if count > MOST_MODULES} == {}


def test_no_class_has_several_bases_of_ours() -> None:
    assert mixins() == {}


def test_leaf_packages_import_only_the_standard_library() -> None:
    for path in in_package(*PLAIN):
        for name in imports(path):
            top = name.split(".")[0]
            known = packages(path) <= PLAIN if name.startswith(".") else top in sys.stdlib_module_names
            assert known or top in NOT_PLAIN.get(module_name(path), ()), f"{module_name(path)} imports {name}"


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_lower_ones(package: str) -> None:
    for path in in_package(package):
        forbidden = packages(path) - ALLOWED[package] - {package}
        assert not forbidden, f"{module_name(path)} imports {forbidden}"


def test_features_import_no_unlisted_features() -> None:
    found: dict[str, set[str]] = {}
    for name, imported in edges().items():
        if name.startswith("features."):
            others = {other.split(".")[1] for other in imported if other.startswith("features.")}
            others -= {name.split(".")[1], "telemetry", "introspection"}
            if others:
                found[name] = others
    assert found == FEATURES_WITHIN_FEATURES


def test_notebook_reaches_no_rank_module() -> None:
    graph = {name: imported - {""} for name, imported in edges().items()}  # the package itself imports on demand
    for name in graph:
        if name.split(".")[0] in ON_THE_NOTEBOOK_SIDE:
            reached = {other for other in _reached(name, graph) if is_of_ranks(other)}
            assert not reached, f"{name} reaches {reached}"


def test_rank_reaches_no_notebook_module() -> None:
    graph = edges()
    for name in graph:
        if is_of_ranks(name):
            reached = {other for other in _reached(name, graph) if other.split(".")[0] in ("client", "notebook")}
            assert not reached, f"{name} reaches {reached}"


def test_only_the_package_imports_the_notebook_and_only_on_demand() -> None:
    own = PACKAGE / "__init__.py"
    assert "notebook" in packages(own)
    assert not [name for name in imports(own, module_level=True) if name.startswith(".")]


def test_notebook_modules_never_import_torch() -> None:
    for path in MODULES:
        if not module_name(path).startswith(("rank", "features")) or path.name == "client.py":
            found = [name for name in imports(path, module_level=True) if name.split(".")[0] in ("torch", "mpi4py")]
            assert not found, f"{module_name(path)} imports {found}"
