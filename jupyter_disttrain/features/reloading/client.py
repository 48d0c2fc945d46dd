"""Copy edited modules to the ranks and reload them there.

Covers: which files of the notebook's folder the nodes lack, sending them, the report of what was reloaded.
Does not cover: reloading (``features.reloading.rank``), data sets (``features.staging.client``).
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...client.cells.history import Origin
from ...client.cells.push_pull import ask
from ...errors import CodeError, UsageError
from ...protocol.ranks import label_ranks
from ...protocol.requests import CompareFiles, ListModules, WriteFiles
from ...source_imports import imported

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ...client.session import Session
    from ...client.startup.launch import Launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """What was copied to the ranks and reloaded there."""

    reloaded: Mapping[str, tuple[int, ...]]  # ranks by module
    brought: Mapping[str, tuple[str, ...]]  # hosts to which a file was copied, by file in the notebook's folder
    kept: Mapping[str, tuple[int, ...]]  # ranks with objects of a class's old code
    removed: Mapping[str, tuple[str, ...]]  # hosts from which a file was removed

    def __str__(self) -> str:
        """Return a short text for the user."""
        lines = [f"brought {', '.join(names)} to {', '.join(hosts)}" for hosts, names in _inverted(self.brought)]
        lines += [f"removed {', '.join(names)} from {', '.join(hosts)}" for hosts, names in _inverted(self.removed)]
        lines += [f"reloaded {', '.join(names)} on {label_ranks(ranks)}" for ranks, names in _inverted(self.reloaded)]
        for text, ranks in self.kept.items():
            lines.append(f"objects of {text} on {label_ranks(ranks)} keep the old code; create them again")
        return "\n".join(lines) or "no module was edited since the ranks imported it"


class Reloading:
    """Copies edited modules to the ranks of one session and reloads them there."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._brought: dict[tuple[str, str], dict[str, str]] = {}  # hashes by file, by host and notebook's folder

    def sync(
        self,
        paths: Sequence[str | os.PathLike[str]] = (),
        ranks: str | int | Iterable[int] = "all",
        **options: Any,
    ) -> Synced:
        """Reload on each rank the modules that were edited since it imported them.

        Nodes that do not see the notebook's folder receive the files that they lack: modules below that folder that
        ranks have imported, the modules that these import, and ``paths``. Files that this session copied there and that
        no longer exist in the notebook's folder are removed, unless they were changed there; imported modules stay.

        Parameters
        ----------
        paths
            Files, folders and modules below the notebook's folder to copy even if no rank has imported them.
        ranks
            The ranks to check; others keep what they have imported.
        **options
            As of :meth:`Cluster.run`, for the cell that reloads.

        Raises
        ------
        UsageError
            If a path is not below the notebook's folder, or does not exist.
        CodeError
            If a module can't be reloaded. It stays as it was; the others are reloaded.
        """
        folder = Path.cwd()
        named = [file for path in paths for file in _named(folder, path)]
        launch, chosen = self._session.ready(ranks)
        imports = {rank: reply["content"] for rank, reply in ask(launch, chosen, ListModules()).items()}
        files = _with_imports(folder, [*named, *_imported(folder, imports.values())])
        brought, removed = self._update_files(launch, chosen, folder, files)
        hosts = {host for some in brought.values() for host in some}
        stale = [rank for rank in chosen if imports[rank]["edited"] or launch.table[rank].info.host in hosts]
        if not stale:
            return _result({}, brought, removed)
        options["origin"] = replace(options.get("origin", Origin()), is_cell=False)
        run = self._session.run("get_ipython().local_modules.reload(globals());", stale, **options)
        return _result(run.results, brought, removed)

    def _update_files(
        self, launch: Launch, ranks: Sequence[int], folder: Path, files: Mapping[str, bytes]
    ) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
        """Send files that a node lacks to one of its ranks, and remove copied ones that no longer exist here.

        Returns for both the hosts by file.
        """
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        gone = {
            host: {name: hashed for name, hashed in sorted(there.items()) if not (folder / name).exists()}
            for (host, base), there in self._brought.items()
            if base == str(folder)
        }
        brought, removed = (defaultdict[str, tuple[str, ...]](tuple) for _ in range(2))
        if not hashes and not any(gone.values()):
            return {}, {}
        one_of_each_node = {launch.table[rank].info.node_rank: rank for rank in reversed(ranks)}
        compare = CompareFiles(folder=str(folder), hashes=hashes, gone=gone)
        for rank, reply in ask(launch, sorted(one_of_each_node.values()), compare).items():
            names, host = reply["content"]["names"], launch.table[rank].info.host
            there = self._brought.setdefault((host, str(folder)), {})
            if names:
                ask(launch, [rank], WriteFiles(folder=str(folder), names=names), [files[name] for name in names])
            for name in names:
                there[name] = hashes[name]
                brought[name] += (host,)
            for name in gone.get(host, ()):
                there.pop(name, None)  # nodes may have equal names
            for name in reply["content"]["removed"]:
                removed[name] += (host,)
        return dict(brought), dict(removed)


def _named(folder: Path, path: str | os.PathLike[str]) -> list[str]:
    """Return the files of a path or a module's name, relative to the notebook's folder and below it."""
    module = Path(*str(path).split("."))
    candidates = [Path(path).expanduser(), *([module.with_suffix(".py"), module] if module.name else [])]
    chosen = next((each for each in candidates if (folder / each).exists()), None)
    if chosen is None:
        raise UsageError(f"there is no {path} in {folder}, neither a file nor a module")
    whole = Path(os.path.normpath(folder / chosen))
    if not whole.is_relative_to(folder):
        raise UsageError(f"{whole} is not below the notebook's folder {folder}, so it can't be copied to the ranks")
    found = sorted(whole.rglob("*.py")) if whole.is_dir() else [whole]
    names = [each.relative_to(folder) for each in found]
    return [name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts)]


def _imported(folder: Path, imports: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the files of the notebook's folder that ranks have imported, from there or from their start folder."""
    found = []
    for each in imports:
        for file in (Path(os.path.normpath(name)) for name in each["files"].values()):  # sys.path may contain ".."
            base = next((base for base in (folder, Path(each["folder"])) if file.is_relative_to(base)), None)
            if base is not None and (folder / file.relative_to(base)).is_file():
                found.append(file.relative_to(base).as_posix())
    return found


def _with_imports(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of files, and of the folder's files that these import, by name."""
    contents: dict[str, bytes] = {}
    left = list(names)
    while left:
        name = left.pop()
        if name not in contents:
            contents[name] = (folder / name).read_bytes()
            if name.endswith(".py"):
                left += _imports(folder, name, contents[name])
    return dict(sorted(contents.items()))


def _imports(folder: Path, name: str, content: bytes) -> list[str]:
    """Return the folder's files that a file may import, with the packages above them."""
    found = {Path(*module.split(".")) for module in imported(content, ".".join(Path(name).parent.parts))}
    wanted = {each for path in found for each in (path, *path.parents) if each.name}
    candidates = [path for base in wanted for path in (base.with_suffix(".py"), base / "__init__.py")]
    return [path.as_posix() for path in candidates if (folder / path).is_file()]


def _inverted(found: Mapping[str, tuple[Any, ...]]) -> list[tuple[tuple[Any, ...], list[str]]]:
    """Return the names that have the same ranks or hosts together."""
    names: dict[tuple[Any, ...], list[str]] = {}
    for name, places in found.items():
        names.setdefault(places, []).append(name)
    return list(names.items())


def _result(
    results: Mapping[int, Any], brought: Mapping[str, tuple[str, ...]], removed: Mapping[str, tuple[str, ...]]
) -> Synced:
    """Combine the ranks' results; raises a CodeError if a module could not be reloaded."""
    ranks_by = {kind: defaultdict[str, tuple[int, ...]](tuple) for kind in ("reloaded", "failed", "kept")}
    for rank, result in results.items():
        for kind, texts in result.items():
            for text in texts:
                ranks_by[kind][text] += (rank,)
    reloaded, failed, kept = map(dict, ranks_by.values())
    synced = Synced(reloaded=reloaded, brought=brought, kept=kept, removed=removed)
    if failed:
        messages = [f"{text}; the module is unchanged on {label_ranks(ranks)}" for text, ranks in failed.items()]
        also = f"; {synced}" if synced.reloaded or synced.brought or synced.removed else ""
        raise CodeError("; ".join(messages) + also)
    return synced
