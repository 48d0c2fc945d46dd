"""Read a data set from a path, or from any address that fsspec reads.

Covers: listing its files, reading and hashing them, what is missing to read an address.
Does not cover: the nodes (``rank``), where the files go (``store``).
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ...config.data_urls import is_address, without_secrets
from ...errors import StageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Block = tuple[str, Any]  # of a file, behind the file's hash if it is the last one

BLOCK_BYTES = 1 << 20
CONTROL = ".disttrain-stage"  # end of the names of hidden folders that belong to copies (``store``)
PIECE_BYTES = 8 << 20  # requested at once from an address: each request costs a round trip
# The fields of fsspec's file info that change when the content does; the first that exists is used.
_VERSIONS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "Last-Modified", "updated", "created")


class SourceFile(NamedTuple):
    """One file of a data set, or a folder without files."""

    name: str  # path from the data set's folder, with "/"; "" if the data set is one file; of a folder: ends with "/"
    size_bytes: int = 0
    version: str = ""  # changes with the content; empty if the source has none; of a path: its time in nanoseconds
    mode: int = 0o644
    hashed: str = ""  # the file's hash, where all is compared by hash

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return self.name.endswith("/")

    @property
    def modified_ns(self) -> int | None:
        """Modification time; None if the source has none. Versions of addresses start with a field's name."""
        return int(self.version) if self.version.isdecimal() else None

    @classmethod
    def from_list(cls, fields: Sequence[Any]) -> SourceFile:
        """Read the fields; a name that leads out of the data set's folder is refused."""
        file = cls(*fields)
        if ".." in PurePosixPath(file.name).parts or file.name.startswith("/"):
            raise StageError(f"{file.name!r} is outside of the data set's folder")
        return file


def source_name(source: str) -> str:
    """Return the name of a data set: the last part of its path or address."""
    first, *others = without_secrets(source).split("::")
    address = others[-1] if others and "://" not in first else first  # simplecache::s3://bucket/folder
    name = PurePosixPath(address.partition("?")[0].rstrip("/").rpartition("://")[2]).name
    return "data" if name in ("", ".", "..") else name


class Source:
    """A data set that this process can read, at a path or an address such as ``s3://bucket/folder``.

    Raises a StageError if it is not there, or fsspec lacks the package that reads it.
    """

    def __init__(self, source: str) -> None:
        self._where = source
        self._fs: Any = None
        self._root = source
        if is_address(source):
            self._fs, self._root = _file_system(source)
        self._piece_bytes = BLOCK_BYTES if self._fs is None else PIECE_BYTES
        with _stage_errors(source, "listed"):
            self.files = self._list_path(Path(self._root)) if self._fs is None else self._list_address()

    def _list_path(self, root: Path) -> list[SourceFile]:
        if not root.is_dir():
            return [_of_path(root, "")]
        found = [SourceFile("./")]
        real: dict[Path, str] = {}  # the resolved path of each folder
        for folder, folders, names in os.walk(root, onerror=_raise, followlinks=True):
            inside = Path(folder)
            real[inside] = os.path.realpath(folder)
            if any(real.get(above) == real[inside] for above in inside.parents):  # a link to a folder that it is in
                folders.clear()
                continue
            folders[:] = sorted(name for name in folders if not (name.startswith(".") and name.endswith(CONTROL)))
            if not folders and not names and inside != root:
                found.append(SourceFile(f"{inside.relative_to(root).as_posix()}/"))
            found += [_of_path(inside / name, (inside / name).relative_to(root).as_posix()) for name in sorted(names)]
        return found

    def _list_address(self) -> list[SourceFile]:
        if not self._root.endswith("/"):
            info = self._fs.info(self._root)
            if info["type"] != "directory":
                return [_of_info("", info, self._where)]
        found = self._fs.find(self._root, detail=True)
        root = self._root.rstrip("/") + "/"
        named = [(path.removeprefix(root), path, info) for path, info in sorted(found.items())]
        files = [_of_info(name, info, path) for name, path, info in named if name]
        if not files:
            raise _trouble(f"{self._where} contains no files")
        return [SourceFile("./"), *files]

    def hashed_files(self, check: Callable[[], None]) -> list[SourceFile]:
        """Return the files with their hashes, for which all is read; ``check``: see :func:`hash_of`."""
        return [
            file if file.is_folder else file._replace(hashed=hash_of(self._read(file), check)) for file in self.files
        ]

    def blocks(self, numbers: Iterable[int]) -> Iterator[Block]:
        """Read and hash the files with these numbers; an empty file has one block.

        Raises a StageError if one can't be read, or has changed since it was listed.
        """
        for file in map(self.files.__getitem__, numbers):
            digest, left = hashlib.sha256(), file.size_bytes
            for block in self._read(file):
                digest.update(block)
                left -= len(block)
                yield "" if left else digest.hexdigest(), block

    def _read(self, file: SourceFile) -> Iterator[memoryview]:
        path = f"{self._root.rstrip('/')}/{file.name}" if file.name else self._root
        left = file.size_bytes
        with _stage_errors(path, "read"), self._open(path) as opened:
            while True:
                wanted = min(left, self._piece_bytes)
                piece = memoryview(_read_whole(opened, wanted))
                left -= wanted
                if len(piece) < wanted:
                    raise _trouble(f"{path} became shorter while it was copied; stage it again")
                if not left and self._fs is None and _of_path(Path(path), file.name)[:3] != file[:3]:
                    raise StageError(f"{path} was changed while it was copied; stage it again")
                yield from (piece[at : at + BLOCK_BYTES] for at in range(0, max(wanted, 1), BLOCK_BYTES))
                if not left:
                    return

    def _open(self, path: str) -> Any:
        if self._fs is None:
            return Path(path).open("rb", buffering=0)
        # Without fsspec's own reading ahead, which requests some bytes twice.
        return self._fs.open(path, "rb", block_size=PIECE_BYTES, cache_type="none")


def hash_of(blocks: Iterable[bytes | memoryview], check: Callable[[], None]) -> str:
    """Return a file's hash; ``check`` is called between blocks, and may raise to abort."""
    digest = hashlib.sha256()
    for block in blocks:
        check()
        digest.update(block)
    return digest.hexdigest()


def _trouble(what: str) -> StageError:
    """Make an error of an address without its secrets; so the original error is never chained to this one."""
    return StageError(without_secrets(what))


@contextmanager
def _stage_errors(what: str, done: str) -> Iterator[None]:
    """Raise a StageError for any error: each file system of fsspec has errors of its own."""
    try:
        yield
    except (StageError, ImportError):
        raise
    except FileNotFoundError as error:
        why = "" if error.__cause__ is None else f": {error.__cause__}"
        raise _trouble(f"{error.filename or what} is not there{why}") from None
    except Exception as error:  # noqa: BLE001
        raise _trouble(f"{what} can't be {done}: {type(error).__name__}: {error}") from None


def _file_system(source: str) -> tuple[Any, str]:
    import fsspec  # noqa: PLC0415  (a path needs none)
    from fsspec.registry import known_implementations  # noqa: PLC0415

    protocol = source.split("::", maxsplit=1)[0].partition("://")[0]
    try:
        with _stage_errors(source, "opened"):  # file systems require e.g. credentials
            file_system, root = fsspec.core.url_to_fs(source)
    except ImportError as error:
        advice = known_implementations.get(protocol, {}).get("err", "")
        package = re.search(r"[Ii]nstall [\"']?(\w+)", advice)
        remedy = f"run: pip install {package[1]}" if package else f"{advice} {error}".strip()
        raise _trouble(f"{source} can't be read by the ranks' Python; {remedy}") from None
    return file_system, str(root)


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


def _read_whole(opened: Any, size: int) -> bytes:
    parts = []
    while size and (part := opened.read(size)):
        parts.append(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
