"""Read a data set from a path, or from any address that fsspec reads.

Covers: listing its files, reading one of them from any block on, what is missing to read an address.
Does not cover: the nodes (``rank``), where the files go (``store``).
"""

from __future__ import annotations

import io
import os
import re
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn

from ...config.data_urls import is_address, without_secrets
from ...errors import StageError

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK_BYTES = 1 << 20
CONTROL = ".disttrain-stage"  # suffix of a data set's name: a hidden folder beside its copy
PIECE_BYTES = 8 << 20  # requested at once from an address: each request costs a round trip
# The fields of fsspec's file info that change when the content does; the first that exists is used.
_VERSIONS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "Last-Modified", "updated", "created")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of a data set."""

    name: str  # path from the data set's folder, with "/"
    size_bytes: int
    version: str  # changes with the content; empty if the source has none; of a path: its time in nanoseconds
    mode: int = 0o644
    hashed: str = field(default="", compare=False)  # the file's hash, where all is compared by hash

    @property
    def modified_ns(self) -> int | None:
        """Modification time; None if the source has none. Versions of addresses start with a field's name."""
        return int(self.version) if self.version.isdecimal() else None

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return -(-self.size_bytes // BLOCK_BYTES)

    def as_list(self) -> list[Any]:
        """Return the fields as a short list for JSON: there may be a million files."""
        fields = [self.name, self.size_bytes, self.version, self.mode]
        return [*fields, self.hashed] if self.hashed else fields

    @classmethod
    def from_list(cls, fields: list[Any]) -> SourceFile:
        """Read that form; a name that leads out of the folder is refused."""
        name, size, version, mode, *hashed = fields
        read = cls(name=inside_name(name), size_bytes=int(size), version=str(version), mode=int(mode))
        return replace(read, hashed=str(hashed[0])) if hashed else read


def inside_name(name: str) -> str:
    """Return the name of a file or folder of a data set, from its folder; refuse one that leads out of it."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or name.startswith("/"):
        raise StageError(f"{name!r} can't be the name of a file in a data set: it is outside of the data set's folder")
    return name


def source_name(source: str) -> str:
    """Return the name of a data set: the last part of its path or address."""
    first, *others = without_secrets(source).split("::")
    address = others[-1] if others and "://" not in first else first  # simplecache::s3://bucket/folder
    name = PurePosixPath(address.partition("?")[0].rstrip("/").rpartition("://")[2]).name
    return "data" if name in ("", ".", "..") else name


def is_seen(source: str) -> bool:
    """Whether this process sees a path; True for an address, which is checked only when it is read."""
    return is_address(source) or os.path.exists(source)  # noqa: PTH110  (a folder that can't be entered is no error)


class Source:
    """A data set that this process can read.

    Parameters
    ----------
    source
        A path, or an address such as ``s3://bucket/folder``.

    Raises
    ------
    StageError
        If it is not there, or fsspec lacks the package that reads it.
    """

    def __init__(self, source: str) -> None:
        self._where = source
        self._fs: Any = None
        self._root = source
        if is_address(source):
            self._fs, self._root = _file_system(source)
        self._piece_bytes = BLOCK_BYTES if self._fs is None else PIECE_BYTES
        self.empty_folders: list[str] = []  # names as those of files; object stores have none
        self.is_folder, self.files = self._list()

    def _list(self) -> tuple[bool, list[SourceFile]]:
        try:
            return self._list_address() if self._fs is not None else self._list_path(Path(self._root))
        except FileNotFoundError as error:
            why = "" if error.__cause__ is None else f": {error.__cause__}"
            raise _trouble(f"{error.filename or self._where} does not exist{why}") from None
        except StageError:
            raise
        except Exception as error:  # noqa: BLE001
            # Each file system of fsspec has errors of its own.
            raise _trouble(f"{self._where} can't be listed: {type(error).__name__}: {error}") from None

    def _list_path(self, root: Path) -> tuple[bool, list[SourceFile]]:
        if not root.is_dir():
            return False, [_of_path(root, root.name)]
        found = []
        real: dict[Path, str] = {}  # the resolved path of each folder
        for folder, folders, names in os.walk(root, onerror=_raise, followlinks=True):
            inside = Path(folder)
            real[inside] = os.path.realpath(folder)
            if any(real.get(above) == real[inside] for above in inside.parents):  # a link to a folder that it is in
                folders.clear()
                continue
            folders[:] = sorted(name for name in folders if not _is_control(name))
            if not folders and not names and inside != root:
                self.empty_folders.append(inside.relative_to(root).as_posix())
            found += [_of_path(inside / name, (inside / name).relative_to(root).as_posix()) for name in sorted(names)]
        return True, found

    def _list_address(self) -> tuple[bool, list[SourceFile]]:
        if not self._root.endswith("/"):
            info = self._fs.info(self._root)
            if info["type"] != "directory":
                return False, [_of_info(source_name(self._where), info, self._where)]
        found = self._fs.find(self._root, detail=True)
        root = self._root.rstrip("/") + "/"
        named = [(path.removeprefix(root), path, info) for path, info in sorted(found.items())]
        files = [
            _of_info(name, info, path)
            for name, path, info in named
            if not any(map(_is_control, PurePosixPath(name).parent.parts))
        ]
        if not files:
            raise _trouble(f"{self._where} contains no files")
        return True, files

    def read(self, file: SourceFile, first: int) -> Iterator[memoryview]:
        """Read a file's blocks, from block number ``first`` on.

        Raises
        ------
        StageError
            If it can't be read, or has changed since it was listed.
        """
        left = file.size_bytes - first * BLOCK_BYTES
        try:
            with self._open(file) as opened:
                _skip_to(opened, first * BLOCK_BYTES)
                while left > 0:
                    piece = memoryview(_read_whole(opened, min(left, self._piece_bytes)))
                    yield from (piece[at : at + BLOCK_BYTES] for at in range(0, len(piece), BLOCK_BYTES))
                    if len(piece) < min(left, self._piece_bytes):
                        break
                    left -= len(piece)
        except Exception as error:  # noqa: BLE001
            # Each file system of fsspec has errors of its own.
            what = f"{type(error).__name__}: {error}"
            raise _trouble(f"{self._path_of(file)} can't be read: {what}") from None
        if left > 0:
            raise _trouble(f"{self._path_of(file)} became shorter while it was copied; stage it again")
        if self._fs is None and _of_path(Path(self._path_of(file)), file.name) != file:
            raise StageError(f"{self._path_of(file)} was changed while it was copied; stage it again")

    def _path_of(self, file: SourceFile) -> str:
        return f"{self._root.rstrip('/')}/{file.name}" if self.is_folder else self._root

    def _open(self, file: SourceFile) -> Any:
        path = self._path_of(file)
        if self._fs is None:
            return Path(path).open("rb", buffering=0)
        # Without fsspec's own reading ahead, which requests some bytes twice.
        return self._fs.open(path, "rb", block_size=PIECE_BYTES, cache_type="none")


def _trouble(what: str) -> StageError:
    """Make an error of an address without its secrets; so the original error is never chained to this one."""
    return StageError(without_secrets(what))


def _file_system(source: str) -> tuple[Any, str]:
    import fsspec  # noqa: PLC0415  (a path needs none)
    from fsspec.registry import known_implementations  # noqa: PLC0415

    protocol = source.split("::", maxsplit=1)[0].partition("://")[0]
    try:
        file_system, root = fsspec.core.url_to_fs(source)
    except ImportError as error:
        advice = known_implementations.get(protocol, {}).get("err", "")
        package = re.search(r"[Ii]nstall [\"']?(\w+)", advice)
        remedy = f"run: pip install {package[1]}" if package else f"{advice} {error}".strip()
        raise _trouble(f"{source} can't be read by the ranks' Python; {remedy}") from None
    except Exception as error:  # noqa: BLE001
        # File systems require e.g. credentials, and raise their own errors.
        raise _trouble(f"{source} can't be opened: {type(error).__name__}: {error}") from None
    return file_system, str(root)


def _is_control(name: str) -> bool:
    """Whether a folder is a copy's control folder: it belongs to the copy's node, not to a data set around it."""
    return name.startswith(".") and name.endswith(CONTROL)


def _raise(error: OSError) -> NoReturn:
    """Make ``os.walk`` raise for folders that it can't list."""
    raise error


def _of_path(path: Path, name: str) -> SourceFile:
    try:
        status = path.stat()
    except FileNotFoundError:
        if not path.is_symlink():
            raise
        raise StageError(f"{path} is a link to {path.readlink()}, which does not exist; fix or remove it") from None
    if not stat.S_ISREG(status.st_mode):
        raise StageError(f"{path} is not a regular file and can't be copied; remove it from the data set")
    mode = status.st_mode & 0o777  # a copy that others can run must not run as the user who copied it
    return SourceFile(name=name, size_bytes=status.st_size, version=str(status.st_mtime_ns), mode=mode)


def _of_info(name: str, info: dict[str, Any], path: str) -> SourceFile:
    if info.get("size") is None:
        raise _trouble(f"the server of {path} does not report its size, so a complete copy could not be recognized")
    version = next((f"{key} {info[key]}" for key in _VERSIONS if info.get(key)), "")
    return SourceFile.from_list([name, info["size"], version, 0o644])


def _skip_to(opened: Any, offset: int) -> None:
    if not offset:
        return
    try:
        opened.seek(offset)
    except (OSError, ValueError, NotImplementedError, io.UnsupportedOperation):
        while offset > 0:  # a server that sends files as a whole only
            skipped = opened.read(min(offset, PIECE_BYTES))
            if not skipped:
                return
            offset -= len(skipped)


def _read_whole(opened: Any, size: int) -> bytes:
    block: bytes = opened.read(size)
    if len(block) in (0, size):
        return block
    parts = [block]
    while (missing := size - sum(map(len, parts))) and (part := opened.read(missing)):
        parts.append(part)
    return b"".join(parts)
