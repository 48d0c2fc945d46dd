"""Complete the text at the cursor of a cell, on a rank.

Covers: names, attributes, keys, arguments, imports, paths, magics of the rank; at most ``MOST`` matches.
Does not cover: the notebook's own completions, other ranks' names (``client``).
"""

from __future__ import annotations

import functools
import itertools
import keyword
import os
import pkgutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import attributes
from .attributes import UNKNOWN
from .cell_text import place_at
from .expressions import Scope, function_of
from .file_access import within_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .cell_text import Place

MOST = 3000
Match = tuple[str, str]  # text, and kind: see ``attributes.kind_of``
_FIRST = ("param", "dict key")
_KEYWORDS = [(name, "keyword") for name in keyword.kwlist]


def complete(shell: Any, code: str, cursor: int) -> dict[str, Any]:
    """Return ``start`` and ``end`` of what is completed, and the ``matches``; see ``requests.Complete``."""
    place = place_at(code, cursor)
    scope = Scope(shell.user_ns, code, cursor)
    found = _chosen(_candidates(shell, place, scope), place.prefix)
    names = names_of(shell, place.prefix) if place.kind == "name" else []
    return {"start": place.start, "end": cursor, "matches": [list(each) for each in found[:MOST]], "names": names}


def names_of(shell: Any, prefix: str) -> list[str]:
    """Return the names of the user's variables that begin with a prefix."""
    hidden = shell.user_ns_hidden
    found = [name for name in list(shell.user_ns) if name.startswith(prefix) and name not in hidden]
    return [name for name in found if prefix.startswith("_") or not name.startswith("_")]


def _candidates(shell: Any, place: Place, scope: Scope) -> Iterable[Match]:
    found: dict[str, Callable[[], Iterable[Match]]] = {
        "name": lambda: [*_arguments(scope, place.callee), *_names(scope, place)],
        "attribute": lambda: scope.attributes(place.base, place.prefix),
        "key": lambda: [*_keys(scope, place), *([] if place.quote else _names(scope, place))],
        "magic": lambda: _magics(shell),
        "path": lambda: within_time(lambda: _paths(place)),
        "import": lambda: [*within_time(lambda: _modules(place.base)), *_imported_names(place)],
        "nothing": list,
    }
    return found[place.kind]()


def _names(scope: Scope, place: Place) -> list[Match]:
    return [*scope.names(place.prefix), *_KEYWORDS]


def _chosen(candidates: Iterable[Match], prefix: str) -> list[Match]:
    """Return the candidates that begin with a prefix, each once; private names only if they are asked for."""
    listed = dict(reversed([each for each in candidates if type(each[0]) is str]))  # the first of equal names counts
    found = [(text, kind) for text, kind in listed.items() if text.startswith(prefix)]
    if not found:
        found = [(text, kind) for text, kind in listed.items() if text.lower().startswith(prefix.lower())]
    if not prefix.startswith("_"):
        found = [(text, kind) for text, kind in found if not text.startswith("_")]
    return sorted(found, key=lambda each: (each[1] not in _FIRST, each[0].lower()))


def _arguments(scope: Scope, callee: str) -> Iterator[Match]:
    """Yield the parameters that a call may name."""
    found = function_of(scope.value_of(callee)) if callee else None
    if found is None:
        return
    function, is_first_given = found
    code = function.__code__
    count = code.co_argcount + code.co_kwonlyargcount
    skipped = max(code.co_posonlyargcount, int(is_first_given))
    for name in code.co_varnames[skipped:count]:
        yield f"{name}=", "param"


def _keys(scope: Scope, place: Place) -> Iterator[Match]:
    value = scope.value_of(place.base)
    for key in attributes.keys(value) if value is not UNKNOWN else ():
        if not place.quote:
            yield repr(key), "dict key"
        elif type(key) is str and repr(key)[1:-1] == key and place.quote[-1] not in key:  # needs no escapes
            yield key, "dict key"


def _magics(shell: Any) -> Iterator[Match]:
    for kind, sign in (("line", "%"), ("cell", "%%")):
        for name in list(shell.magics_manager.magics[kind]):
            yield f"{sign}{name}", "magic"


def _paths(place: Place) -> Iterator[Match]:
    try:
        entries = sorted(os.scandir(Path(place.base or ".").expanduser()), key=lambda entry: entry.name)
    except (OSError, RuntimeError):  # no such folder, no such user
        return
    for entry in entries:
        if not entry.name.startswith(".") or place.prefix.startswith("."):
            yield (f"{entry.name}/" if _is_folder(entry) else entry.name), "path"


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads nowhere, or to a place that may not be read
        return False


def _modules(base: str) -> Iterator[Match]:
    """Yield the modules in a package that is named with dots; those that can be imported if it is empty."""
    path: Any = None
    if not base:
        yield from ((name, "module") for name in sys.builtin_module_names)
    for name in itertools.accumulate(base.split(".") if base else (), "{}.{}".format):
        module = sys.modules.get(name)
        found = attributes.own_dict(module).get("__path__") if module is not None else None
        if found is None:
            spec = PathFinder.find_spec(name, path)  # imports nothing
            found = spec.submodule_search_locations if spec is not None else None
        if found is None:
            return
        path = list(found)
    folders = [Path(folder) for folder in (sys.path if path is None else path)]
    changed = tuple((str(folder), folder.stat().st_mtime_ns) for folder in folders if folder.is_dir())
    yield from ((name, "module") for name in _modules_in(changed))


@functools.lru_cache(maxsize=100)
def _modules_in(folders: tuple[tuple[str, int], ...]) -> list[str]:
    """Return the modules in folders, each with the time of its last change; the next call is then in time."""
    return [info.name for info in pkgutil.iter_modules([folder for folder, _ in folders])]


def _imported_names(place: Place) -> Iterator[Match]:
    """Yield the names that ``from module import`` finds, if the module is imported already."""
    module = sys.modules.get(place.base) if place.callee else None
    if module is not None:
        yield from attributes.names(module, place.prefix)
