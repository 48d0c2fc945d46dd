"""``%dist_sync_code`` on this rank: a person's own modules, as they were imported and as they are on the disk.

Covers: which were edited since, taking files from the notebook's machine, reloading in the order of their imports.
Does not cover: which files come (``cluster.local_code``), how a module is reloaded (``reloading``), scripts, which
import such modules anew (``script_modules``).
"""

from __future__ import annotations

import ast
import hashlib
import sys
import traceback
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source, resolve_name
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .reloading import reload_module
from .script_modules import is_own
from .tracebacks import is_of_user

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from types import ModuleType

_SEEN = "_disttrain_seen"  # on a module's loader: time and size of the file that it has read


def note_files() -> None:
    """From now on have each import remember which state of its file it has read."""
    original = SourceFileLoader.path_stats
    if hasattr(original, _SEEN):
        return

    def path_stats(self: SourceFileLoader, path: str) -> Any:
        told = original(self, path)
        setattr(self, _SEEN, (told["mtime"], told["size"]))
        return told

    setattr(path_stats, _SEEN, True)
    SourceFileLoader.path_stats = path_stats  # type: ignore[method-assign]


class LocalModules:
    """The modules of this rank that a person may edit."""

    def __init__(self) -> None:
        self._folder = Path.cwd()  # where the rank began: cells may go elsewhere
        self._old_objects: dict[Any, Any] = {}  # of IPython's reloader

    def tell(self) -> dict[str, Any]:
        """Return where the rank began, the files of its own modules by name, and which of them were edited."""
        files = {name: str(module.__file__) for name, module in _own().items()}
        return {"folder": str(self._folder), "files": files, "edited": [name for name in files if _is_edited(name)]}

    def compare(self, folder: str, hashes: Mapping[str, str]) -> list[str]:
        """Return which files are other here than in the notebook's folder, or missing."""
        return [name for name, hashed in hashes.items() if _hash(self._place(folder, name)) != hashed]

    def write(self, folder: str, names: Sequence[str], contents: Sequence[Any]) -> None:
        """Write files of the notebook's folder where this rank finds them.

        A file that is a link here gives its place to the file. A folder that is a link is not written into if it lies
        elsewhere: others may use what is there; nor is it replaced: it may hold more than what comes.
        """
        for name, content in zip(names, contents, strict=True):
            path = self._place(folder, name)
            if self._is_elsewhere(folder, path.parent):
                raise ValueError(
                    f"{name} is another here than in the notebook's folder, and {path.parent} leads through a link to "
                    f"{path.parent.resolve()}, where nothing is written; bring it there, or make the link a folder"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f".{path.name}.new")
            new.write_bytes(content)
            new.replace(path)  # a rank that imports it now has one or the other

    def remove(self, folder: str, hashes: Mapping[str, str]) -> list[str]:
        """Remove files that were written here, and the folders that this empties; returns those that were removed.

        One that has other contents by now is somebody else's.
        """
        removed = []
        for name, hashed in hashes.items():
            path = self._place(folder, name)
            if _hash(path) != hashed or self._is_elsewhere(folder, path.parent):
                continue
            Path(cache_from_source(str(path))).unlink(missing_ok=True)
            path.unlink()
            removed.append(name)
            _remove_empty(path.parent, Path(name).parent)
        return removed

    def _place(self, folder: str, name: str) -> Path:
        """Return a file's path here.

        Its name alone is judged: a module that is a link, or lies in a folder that is one, is imported and read there.
        """
        base = self._base(folder)
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{name} leads out of {base}")
        return base / name

    def _base(self, folder: str) -> Path:
        """Return the same folder if there is one of that name here, else where the rank began."""
        return Path(folder) if Path(folder).is_dir() else self._folder

    def _is_elsewhere(self, folder: str, path: Path) -> bool:
        return not path.resolve().is_relative_to(self._base(folder).resolve())

    def reload(self) -> dict[str, Any]:
        """Reload what was edited.

        Returns
        -------
        dict
            ``"reloaded"``: names; ``"failed"``: where and why, by name; ``"kept"``: classes of which something keeps
            the old code, with the reason. What imports a module that failed is reloaded none the less.
        """
        edited = [name for name in _own() if _is_edited(name)]
        reloaded, failed, kept = [], {}, []
        for name in _in_order(edited):
            try:
                kept += reload_module(sys.modules[name], self._old_objects)
            except Exception as error:  # noqa: BLE001  (the module's own code may raise anything)
                failed[name] = _words(error, name)
            else:
                reloaded.append(name)
        return {"reloaded": reloaded, "failed": failed, "kept": kept}


def _own() -> dict[str, ModuleType]:
    return {
        name: module
        for name, module in list(sys.modules.items())
        if is_own(name, module) and str(module.__file__).endswith(".py") and name != "__main__"
    }


def _is_edited(name: str) -> bool:
    module = sys.modules[name]
    seen = getattr(getattr(module.__spec__, "loader", None), _SEEN, None)
    try:
        now = Path(str(module.__file__)).stat()
    except OSError:
        return False  # it was removed, or renamed: what is imported stays
    return seen is not None and seen != (now.st_mtime, now.st_size)


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _remove_empty(folder: Path, below: Path) -> None:
    """Remove folders that hold nothing any more, as many as ``below`` has parts: they would still be packages."""
    for _ in below.parts:
        with suppress(OSError):  # there is none, or it holds something
            (folder / "__pycache__").rmdir()
        try:
            folder.rmdir()
        except OSError:
            return  # it holds something
        folder = folder.parent


def _in_order(names: Collection[str]) -> list[str]:
    """Return modules so that each comes after those that it imports."""
    ordered: list[str] = []
    begun: set[str] = set()

    def visit(name: str) -> None:
        if name not in begun:
            begun.add(name)
            for other in sorted(_imports(name) & set(names)):
                visit(other)
            ordered.append(name)

    for name in sorted(names):
        visit(name)
    return ordered


def _imports(name: str) -> set[str]:
    """Return what a module's file imports, as names of modules; nothing if it can't be read."""
    module = sys.modules[name]
    try:
        tree = ast.parse(Path(str(module.__file__)).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            try:
                base = resolve_name(relative, module.__package__ or "") if node.level else relative
            except ImportError:
                continue
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def _words(error: Exception, name: str) -> str:
    """Say where in the person's files it failed, and why."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_of_user(frame.filename)]
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else name
    return f"{place}: {type(error).__name__}: {error}"
