"""Store a copied data set on this node's disk.

Covers: which files are there already, writing the others, a full disk.
Does not cover: choosing the folder (``store_paths``), receiving blocks (``pipeline``).

The files are below the folder's name, as in the source. The file that is being written, and the list of complete ones,
are in a hidden folder beside it, so that a listing of the data set shows complete files only:
``.NAME.disttrain-stage`` with

- ``files.jsonl``: the source, then a line per complete file: its name, size and version in the source;
- ``part``: the file that is being written; it gets its name when its hash is the source's.
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

from ...config.data_urls import is_address, without_secrets
from ...errors import StageError
from .source import BLOCK_BYTES, CONTROL, hash_of
from .store_paths import check_own, is_default, make_own, own_folder, path_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .source import SourceFile

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Store:
    """The copy of a data set on this node.

    Parameters
    ----------
    to
        The parent folder of the data set's own; ``$NAME`` is replaced with a variable of this node. None: a default.
    mark
        A file by which another node finds out that it sees the same folder; :meth:`close` removes it.

    Raises
    ------
    StageError
        If the folder can't be made, is another user's, or is inside the source.
    """

    def __init__(self, source: str, to: str | None, host: str, mark: str) -> None:
        self.path = path_for(source, to, host)
        self._source = source
        self._name = without_secrets(source)  # the same when it is signed again
        self._host = host
        self._control = self.path.parent / f".{self.path.name}{CONTROL}"
        self._mark = self._control / mark
        self._lock: Any = None
        self._list: Any = None
        self._part: Any = None
        self._files: Sequence[SourceFile] = ()
        try:
            if is_default(to):
                make_own(self.path.parent, host)
            make_own(self._control, host)
            self._mark.touch()
        except OSError as error:
            raise self._trouble(error) from error

    def sees_mark(self, mark: str) -> bool:
        """Whether another node's mark is seen here: both have one folder, on a shared file system."""
        return (self._control / mark).exists()

    @property
    def is_source(self) -> bool:
        """Whether the source itself is here: on this node it is no copy, and nothing is written."""
        try:
            return not is_address(self._source) and self.path.samefile(self._source)
        except OSError:
            return False

    # Existing files

    def begin(self, files: Sequence[SourceFile], *, verify: bool, check: Callable[[], None]) -> set[int]:
        """Check what is there, prepare to write the rest, and return the numbers of the files that are missing.

        Parameters
        ----------
        verify
            Read what is there and compare its hash with the source's, in place of its size and version.
        check
            Called between files and blocks; it may raise to abort.

        Raises
        ------
        StageError
            If something else is there, or another process copies it too, or the disk is too small.
        """
        self._files = files
        try:
            check_own(self.path, self._host)
            self._take_lock()
            listed = self._read_list()
            self._remove(listed.keys() - {file.name for file in files})
            for file in files:
                if file.is_folder:
                    (self.path / file.name).mkdir(parents=True, exist_ok=True)
                    check_own(self.path, self._host)  # in /tmp another user may have made one meanwhile
            missing = {at for at, file in enumerate(files) if not self._has(file, listed, check, verify=verify)}
            self._write_list(file for at, file in enumerate(files) if at not in missing)
            self._check_room(sum(files[at].size_bytes for at in missing))
        except OSError as error:
            raise self._trouble(error) from error
        return missing

    def _take_lock(self) -> None:
        self._lock = (self._control / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StageError(
                f"another process is copying to {self.path} on {self._host}; wait for it, or name another --to"
            ) from None

    def _read_list(self) -> dict[str, list[Any]]:
        """Return size and version of each file that was complete, by its name."""
        records = []
        with suppress(FileNotFoundError):
            for line in (self._control / "files.jsonl").read_bytes().splitlines():
                with suppress(ValueError):  # it was cut off when its process died
                    records.append(json.loads(line))
        records = [record for record in records if isinstance(record, list)]
        if records:
            what = f"is a copy of {without_secrets(str(records[0][0]))}, not of {self._name}"
            is_ours = without_secrets(str(records[0][0])) == self._name
        else:
            what = f"exists and is not marked as a copy of {self._name}"
            is_ours = not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir()))
        if not is_ours:
            raise StageError(f"{self.path} on {self._host} {what}; remove it, or name another folder with --to")
        return {name: version for name, *version in records[1:]}

    def _remove(self, names: Iterable[str]) -> None:
        """Remove copied files that the source no longer has, and the folders that this leaves empty."""
        left = set()
        for name in names:
            path = self.path / name
            if not name.endswith("/"):
                with suppress(FileNotFoundError, NotADirectoryError):  # the user removed it first
                    path.unlink()
            left |= {above for above in (path, *path.parents) if above.is_relative_to(self.path)}
        for path in sorted(left, key=lambda path: len(path.parts), reverse=True):
            with suppress(OSError):  # something else is in it, and it stays
                path.rmdir()

    def _has(
        self, file: SourceFile, listed: Mapping[str, list[Any]], check: Callable[[], None], *, verify: bool
    ) -> bool:
        """Whether a file is complete and as in the source."""
        check()
        path = self.path / file.name
        if file.is_folder:
            return True
        if file.name not in listed or not path.is_file() or path.stat().st_size != file.size_bytes:
            return False
        if not verify:
            return bool(file.version) and listed[file.name] == [file.size_bytes, file.version]
        with path.open("rb") as opened:
            return hash_of(iter(lambda: opened.read(BLOCK_BYTES), b""), check) == file.hashed

    def _write_list(self, kept: Iterable[SourceFile]) -> None:
        path = self._control / "files.jsonl"
        new = path.with_suffix(".new")
        new.write_text("".join(f"{json.dumps(line)}\n" for line in ([self._name], *(file[:3] for file in kept))))
        new.replace(path)
        self._list = path.open("ab", buffering=0)

    def _check_room(self, missing: int) -> None:
        free = shutil.disk_usage(self._control).free
        if missing > free:
            raise StageError(
                f"the disk of {self._host} is too small: {self.path.parent} has {free / 1e9:.2f} GB free, and "
                f"{missing / 1e9:.2f} GB are to be copied; free disk space there, or name another disk with --to"
            )

    # Writing, one file after the other

    def write(self, at: int, hashed: str, block: Any) -> None:
        """Write the next block of file number ``at``; with the last one comes the hash of the source's file.

        Raises
        ------
        StageError
            If the file's hash is another, or it can't be written.
        """
        try:
            if self._part is None:
                self._part = (self._control / "part").open("wb", buffering=0)
                self._digest = hashlib.sha256()
            view = memoryview(block)
            self._digest.update(view)
            while view:
                view = view[self._part.write(view) :]
            if hashed:
                self._complete(self._files[at], hashed)
        except OSError as error:
            raise self._trouble(error) from error

    def _complete(self, file: SourceFile, hashed: str) -> None:
        path, part = self.path / file.name, self._control / "part"
        if self._digest.hexdigest() != hashed:
            raise StageError(f"{path} on {self._host} has not the hash of the source's file; stage it again")
        os.fchmod(self._part.fileno(), file.mode | 0o600)
        self._part.close()
        if file.modified_ns is not None:
            os.utime(part, ns=(file.modified_ns, file.modified_ns))
        path.parent.mkdir(parents=True, exist_ok=True)
        part.replace(path)
        self._part = None
        self._list.write(json.dumps(file[:3]).encode() + b"\n")

    # The end

    def close(self) -> None:
        """Close everything; complete files stay."""
        with suppress(OSError):  # a full disk was reported when it refused to write
            if self._part is not None:
                self._part.close()
                (self._control / "part").unlink(missing_ok=True)
        with suppress(OSError):
            self._mark.unlink(missing_ok=True)
        for opened in (self._list, self._lock):
            if opened is not None:
                opened.close()
        if (self._control / "files.jsonl").exists():
            return
        with suppress(OSError):  # something else is in these folders, and they stay
            (self._control / "lock").unlink(missing_ok=True)
            self._control.rmdir()
            if self.path.parent == own_folder():  # a folder of the user's may be empty
                self.path.parent.rmdir()

    def _trouble(self, error: OSError) -> StageError:
        """Return an error with the system's message and a remedy."""
        where = error.filename or self.path
        if error.errno not in _FULL:
            return StageError(f"{self._host} can't write {where}: {error.strerror}; name another folder with --to")
        return StageError(
            f"the disk of {self._host} is full ({self.path.parent}: {error.strerror}); free disk space there, or name "
            "another disk with --to; complete files are kept, and the next %dist_stage copies the others"
        )
