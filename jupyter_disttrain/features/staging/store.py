"""Store a copied data set on this node's disk.

Covers: the folder that the user names, or the default one, and its owner; which files are there already, writing the
others, a full disk.
Does not cover: receiving blocks (``pipeline``).

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
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from ...config.data_urls import is_address, without_secrets
from ...errors import StageError
from ...private_files import why_not_private
from ...protocol.environment import STAGE_DIR
from .source import BLOCK_BYTES, CONTROL, hash_of, source_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .source import Block, SourceFile

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Store:
    """The copy of a data set on this node, in a folder of its own below ``to``, where ``$NAME`` is the node's variable.

    A node that sees the file ``mark`` of another one has the same folder. Raises a StageError if the folder can't be
    made, is another user's, or is inside the source.
    """

    def __init__(self, source: str, to: str | None, host: str, mark: str) -> None:
        self._source = source
        self._name = without_secrets(source)  # the same when it is signed again
        self._host = host
        folder = Path(os.environ.get(STAGE_DIR) or _own_folder()) if to is None else self._expand(to)
        self.path = folder.absolute() / source_name(source)
        # By name too, where this node does not see the source: it would see it from then on.
        if not is_address(source) and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(source)):
            raise StageError(
                f"{self.path} on {host} would be inside {source}, the data set to copy; name another folder with --to"
            )
        self._control = self.path.parent / f".{self.path.name}{CONTROL}"
        self._mark = self._control / mark
        self._lock: Any = None
        self._list: Any = None
        try:
            if to is None and not os.environ.get(STAGE_DIR):  # all users may write where this one is
                self._make_own(self.path.parent)
            self._make_own(self._control)
            self._mark.touch()
        except OSError as error:
            raise self._trouble(error) from error

    def _expand(self, to: str) -> Path:
        """Expand this node's variables and home."""
        set_here = {name: value for name, value in os.environ.items() if value}
        try:
            return Path(Template(to).substitute(set_here)).expanduser()
        except KeyError as error:
            raise StageError(
                f"--to {to}: ${error.args[0]} is not set on {self._host}; set it on every node, or name a path"
            ) from None
        except (RuntimeError, ValueError) as error:
            raise StageError(f"--to {to}: {error} ({self._host}); name a path") from None

    def _make_own(self, folder: Path) -> None:
        """Make a folder where another user may have made one of that name."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        reason = why_not_private(folder, shared_mode=0)
        if reason:
            raise StageError(
                f"{folder} on {self._host} {reason}; remove it, or name the folder with --to or ${STAGE_DIR}"
            )

    def _check_own(self) -> None:
        """Refuse a folder that another user owns, and could change at any time."""
        with suppress(FileNotFoundError):
            if self.path.lstat().st_uid != os.getuid():
                raise StageError(f"{self.path} on {self._host} belongs to another user; name another folder with --to")

    def sees_mark(self, mark: str) -> bool:
        """Whether the node with this mark has the same folder, on a shared file system."""
        return (self._control / mark).exists()

    @property
    def is_source(self) -> bool:
        """Whether the source itself is here: on this node it is no copy, and nothing is written."""
        try:
            return not is_address(self._source) and self.path.samefile(self._source)
        except OSError:
            return False

    def begin(self, files: Sequence[SourceFile], *, verify: bool, check: Callable[[], None]) -> set[int]:
        """Check what is there, prepare to write the rest, and return the numbers of the files that are missing.

        ``verify`` compares hashes in place of sizes and versions; ``check`` is called between files and blocks, and may
        raise to abort. Raises a StageError if something else is there, another process copies it too, or the disk is
        too small.
        """
        try:
            self._check_own()
            self._take_lock()
            listed = self._read_list()
            self._remove(listed.keys() - {file.name for file in files})
            for file in files:
                if file.is_folder:
                    (self.path / file.name).mkdir(parents=True, exist_ok=True)
                    self._check_own()  # in /tmp another user may have made one meanwhile
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

    def write(self, file: SourceFile, blocks: Iterable[Block]) -> None:
        """Write a file; raises a StageError if it can't be written, or its hash differs from the last block's."""
        path, part = self.path / file.name, self._control / "part"
        digest, hashed = hashlib.sha256(), ""
        try:
            with part.open("wb") as opened:
                for hashed, block in blocks:  # noqa: B007
                    digest.update(block)
                    opened.write(block)
                os.fchmod(opened.fileno(), file.mode | 0o600)
            if digest.hexdigest() != hashed:
                raise StageError(f"{path} on {self._host} has not the hash of the source's file; stage it again")
            if file.modified_ns is not None:
                os.utime(part, ns=(file.modified_ns, file.modified_ns))
            path.parent.mkdir(parents=True, exist_ok=True)
            part.replace(path)
            self._list.write(json.dumps(file[:3]).encode() + b"\n")
        except OSError as error:
            raise self._trouble(error) from error
        finally:
            with suppress(OSError):
                part.unlink()

    def close(self) -> None:
        """Close everything; complete files stay."""
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
            if self.path.parent == _own_folder():  # a folder of the user's may be empty
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


def _own_folder() -> Path:
    """Return the default folder of data sets: on this node's own disk, of this user alone."""
    there = next((os.environ[name] for name in ("SLURM_TMPDIR", "TMPDIR") if os.environ.get(name)), "/tmp")  # noqa: S108
    return Path(there) / f"disttrain-stage-{os.getuid()}"
