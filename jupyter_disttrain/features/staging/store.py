"""Store a copied data set on this node's disk.

Covers: which files are there already, writing the rest, a full disk.
Does not cover: choosing the folder (``store_paths``), parts of one file (``partial_file``), receiving blocks
(``peers``, ``rank``).

The files are below the folder's name, as in the source. Incomplete files, and the list of complete ones, are in a
hidden folder beside it, so that a listing of the data set shows nothing else: ``.NAME.disttrain-stage`` with

- ``files.jsonl``: a line per complete file: its name, size and version in the source, its hash; and one per folder that
  is empty in the source: its name with "/" behind it;
- ``HASH-OF-NAME.part`` and ``.blocks``: the written part of a file, and the hashes of its blocks.

A file's hash is the SHA-256 of the SHA-256 of its blocks, so that each byte is hashed once.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...config.data_urls import without_secrets
from ...errors import StageError
from .partial_file import PartialFile, hash_file, hash_of, parse, whole_hash
from .source import BLOCK_BYTES, CONTROL
from .store_paths import check_own, is_same, make_folder, make_own, own_folder, path_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from .source import SourceFile

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Store:
    """The copy of a data set on this node.

    Parameters
    ----------
    source
        A path, or an address.
    to
        The parent folder of the data set's own; ``$NAME`` is replaced with a variable of this node. None: a default.
    host
        Name of this node, for messages.

    Raises
    ------
    StageError
        If the folder can't be made, is another user's, or is inside the source.
    """

    def __init__(self, source: str, to: str | None, host: str) -> None:
        self.path = path_for(source, to, host)
        self._source = source
        self._name = without_secrets(source)  # the same when it is signed again
        self._host = host
        self._control = self.path.parent / f".{self.path.name}{CONTROL}"
        self._lock: int | None = None
        self._part: PartialFile | None = None
        self._list: Any = None
        self._files: Sequence[SourceFile] = ()
        self._is_folder = False
        self._made: set[Path] = set()
        self._kept: dict[str, list[Any]] = {}  # complete files at the beginning
        self._nonce: Path | None = None
        try:
            make_folder(self.path, to, host)
            make_own(self._control, host)
        except OSError as error:
            raise self.trouble(error) from error

    # Other writers in the folder

    def leave_mark(self, name: str) -> None:
        """Create a file by which another node finds out that it sees the same folder; :meth:`close` removes it."""
        self._nonce = self._control / name
        try:
            self._nonce.touch()
        except OSError as error:
            raise self.trouble(error) from error

    def sees_mark(self, name: str) -> bool:
        """Whether another node's mark is seen here: both have one folder, on a shared file system."""
        return (self._control / name).exists()

    # Existing files

    @property
    def is_source(self) -> bool:
        """Whether the source itself is here: on this node it is no copy, and nothing is written."""
        return is_same(self._source, self.path)

    def begin(
        self, files: Sequence[SourceFile], folders: Sequence[str] | None, *, verify: bool, check: Callable[[], None]
    ) -> dict[int, int]:
        """Check what is there, and prepare to write the rest.

        Parameters
        ----------
        files
            Those of the source.
        folders
            Those of its folders that are empty; None if it is one file.
        verify
            Read what is there and compare its hash with the source's, in place of its size and version.
        check
            Called between files and blocks; it may raise to abort.

        Returns
        -------
        dict of int to int
            For each file that is incomplete here: the first block that is missing.

        Raises
        ------
        StageError
            If something else is there, or another process copies it too, or the disk is too small.
        """
        self._files, self._is_folder = files, folders is not None
        try:
            check_own(self.path, self._host)
            self._take_lock()
            whole = self._read_list()
            self._remove_others(whole, folders, check)
            kept = self._kept = self._keep(whole, check, verify=verify)
            self._write_list({**kept, **self._make_folders(folders)})
            needs = self._missing(kept, check)
            self._forget_other_parts(needs)
        except OSError as error:
            raise self.trouble(error) from error
        missing = sum(files[at].size_bytes - first * BLOCK_BYTES for at, first in needs.items())
        self._check_room(missing)
        return needs

    def _take_lock(self) -> None:
        self._lock = os.open(self._control / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StageError(
                f"another process is copying to {self.path} on {self._host}; wait for it, or name another --to"
            ) from None

    def _read_list(self) -> dict[str, list[Any]]:
        try:
            lines = (self._control / "files.jsonl").read_text(errors="replace").splitlines()
        except FileNotFoundError:
            lines = []
        records = [found for line in lines if isinstance(found := parse(line), list)]
        if not records:
            if self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir())):
                raise StageError(
                    f"{self.path} on {self._host} exists and is not marked as a copy of {self._name}; "
                    "remove it, or name another folder with --to"
                )
            return {}
        if without_secrets(str(records[0][0])) != self._name:
            raise StageError(
                f"{self.path} on {self._host} is a copy of {without_secrets(str(records[0][0]))}, not of {self._name}; "
                "remove it, or name another folder with --to"
            )
        return {found[0]: found for found in records[1:]}

    def _remove_others(
        self, whole: dict[str, list[Any]], folders: Sequence[str] | None, check: Callable[[], None]
    ) -> None:
        """Remove copied files that the source no longer has, and the folders that this leaves empty."""
        was_folder = self.path.is_dir()
        there = {file.name for file in self._files} | {f"{name}/" for name in folders or ()}
        left = {self.path}  # folders in which something was
        for name in [name for name in whole if name not in there or was_folder != self._is_folder]:
            check()
            del whole[name]
            path = self.path / name if was_folder else self.path
            if name.endswith("/"):
                left.add(path)
            else:
                with suppress(FileNotFoundError, NotADirectoryError):  # the user removed it first
                    path.unlink()
                left.add(path.parent)
        top = self.path if self._is_folder else self.path.parent
        left |= {above for path in left for above in path.parents}
        for path in sorted(left, key=lambda path: len(path.parts), reverse=True):
            if path.is_relative_to(top) and path != top:
                with suppress(OSError):  # something else is in it, and it stays
                    path.rmdir()

    def _make_folders(self, folders: Sequence[str] | None) -> dict[str, list[Any]]:
        """Make the folders that are empty in the source; returns their entries in the list."""
        if folders is None:
            return {}
        self.path.mkdir(parents=True, exist_ok=True)
        check_own(self.path, self._host)  # in /tmp another user may have made one meanwhile
        for name in folders:
            (self.path / name).mkdir(parents=True, exist_ok=True)
        return {f"{name}/": [f"{name}/"] for name in folders}

    def _keep(self, whole: dict[str, list[Any]], check: Callable[[], None], *, verify: bool) -> dict[str, list[Any]]:
        """Return the entries of files that are complete and as in the source."""
        kept = {}
        for file in self._files:
            entry = whole.get(file.name)
            if entry is None:
                continue
            check()
            path = self._path_of(file.name)
            if not _has_size(path, file.size_bytes):
                continue
            if verify:
                if hash_file(path, check) == file.hashed:
                    kept[file.name] = [file.name, file.size_bytes, file.version, file.hashed]
            elif file.version and entry[1:3] == [file.size_bytes, file.version]:
                kept[file.name] = entry
        return kept

    def _write_list(self, kept: dict[str, list[Any]]) -> None:
        path = self._control / "files.jsonl"
        new = path.with_suffix(".new")
        new.write_text("".join(f"{json.dumps(line)}\n" for line in ([self._name], *kept.values())))
        new.replace(path)
        self._list = path.open("a", buffering=1)

    def _missing(self, kept: dict[str, list[Any]], check: Callable[[], None]) -> dict[int, int]:
        """Return the first block of each file that is missing here; blocks that fail verification are cut off."""
        parts = {path.stem for path in self._control.glob("*.part")}  # a million files, of which few are partial
        needs = {}
        for at, file in enumerate(self._files):
            if file.name not in kept:
                check()
                part = self._part_of(file)
                needs[at] = len(part.trusted(check)) if part.path.stem in parts else 0
        return needs

    def _forget_other_parts(self, needs: dict[int, int]) -> None:
        kept = {self._part_of(self._files[at]).path.stem for at, first in needs.items() if first}
        for path in self._control.iterdir():
            if path.suffix in (".part", ".blocks") and path.stem not in kept:
                path.unlink()

    def _check_room(self, missing: int) -> None:
        free = shutil.disk_usage(self._control).free
        if missing > free:
            raise StageError(
                f"the disk of {self._host} is too small: {self.path.parent} has {free / 1e9:.2f} GB free, and "
                f"{missing / 1e9:.2f} GB are to be copied; free disk space there, or name another disk with --to"
            )

    # Writing, one file after the other

    def write(self, at: int, number: int, block: bytes | memoryview, digest: bytes) -> None:
        """Write a block of file number ``at``; ``digest`` is the hash of the source's block.

        Raises
        ------
        StageError
            If the block was damaged on the way, or can't be written.
        """
        file = self._files[at]
        if hash_of(block) != digest:
            raise StageError(f"a block of {file.name} arrived damaged on {self._host}; stage it again")
        try:
            if self._part is None or self._part.file is not file:
                self._open(file)
            assert self._part is not None
            self._part.write(number, block, digest)
        except OSError as error:
            raise self.trouble(error) from error

    def finish(self, at: int, hashed: str) -> None:
        """Mark a file as complete, if its hash is the source's.

        An empty ``hashed`` means no hash: the source was read from the middle on, by a node that has no beginning of
        the file. Each block was verified when it arrived, and those of the beginning again before the rest was
        requested.

        Raises
        ------
        StageError
            If the hash is another.
        """
        file = self._files[at]
        try:
            if self._part is None or self._part.file is not file:
                self._open(file)
            assert self._part is not None
            part = self._part
            own = whole_hash(part.digests)
            if hashed not in ("", own):
                part.remove()
                raise StageError(
                    f"the hash of {file.name} on {self._host} differs from the source's, so it was removed; stage it "
                    "again"
                )
            target = self._path_of(file.name)
            if target.parent not in self._made:
                target.parent.mkdir(parents=True, exist_ok=True)
                self._made.add(target.parent)
            part.become(target)
            self._part = None
            self._list.write(json.dumps([file.name, file.size_bytes, file.version, own]) + "\n")
        except OSError as error:
            raise self.trouble(error) from error

    def _open(self, file: SourceFile) -> None:
        if self._part is not None:
            self._part.close()
        self._part = self._part_of(file)
        self._part.open()

    def digests_of(self, at: int) -> list[bytes]:
        """Return the hashes of the blocks that are here of a file that is being copied."""
        return self._part_of(self._files[at]).read_digests()

    def hash_of(self, at: int) -> str:
        """Return the hash of a complete file; empty if the source itself is here: see :meth:`finish`."""
        return str(self._kept[self._files[at].name][3]) if self._kept else ""

    def _path_of(self, name: str) -> Path:
        return self.path / name if self._is_folder else self.path

    def _part_of(self, file: SourceFile) -> PartialFile:
        name = hashlib.sha256(os.fsencode(file.name)).hexdigest()[:32]
        return PartialFile(file, self._control / f"{name}.part")

    # The end

    def close(self) -> None:
        """Close everything; complete files, and the part of the next file, stay for the next time."""
        part, self._part = self._part, None
        opened, self._list = self._list, None
        lock, self._lock = self._lock, None
        nonce, self._nonce = self._nonce, None
        with suppress(OSError):
            if part is not None:
                part.close()
        with suppress(OSError):  # a full disk refuses the same line again; it was reported the first time
            if opened is not None:
                opened.close()
        with suppress(OSError):
            if nonce is not None:
                nonce.unlink(missing_ok=True)
        if lock is not None:
            os.close(lock)
        self._tidy()

    def _tidy(self) -> None:
        """Remove folders that stayed empty."""
        if (self._control / "files.jsonl").exists():
            return
        with suppress(OSError):  # something else is in them, and they stay
            (self._control / "lock").unlink(missing_ok=True)
            self._control.rmdir()
            if self.path.parent == own_folder():  # a folder of the user's may be empty
                self.path.parent.rmdir()

    def trouble(self, error: OSError) -> StageError:
        """Return an error with the system's message and a remedy."""
        where = error.filename or self.path
        if error.errno not in _FULL:
            return StageError(f"{self._host} can't write {where}: {error.strerror}; name another folder with --to")
        return StageError(
            f"the disk of {self._host} is full ({self.path.parent}: {error.strerror}); free disk space there, "
            "or name another disk with --to; complete files are kept, and the next %dist_stage continues from there"
        )


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.is_file() and path.stat().st_size == size
    except OSError:
        return False
