"""Manage the folder of a checkpoint and its versions.

Covers: listing versions, naming a new one, removing old ones and incomplete ones of processes that died.
Does not cover: what is in a version (``rank``).

A version is written under a temporary name and renamed once all of it is on the disk, so it is complete or absent.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ...protocol.time_limits import LEFT_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

ABOUT = "disttrain.json"  # lists the content of a version
SAVING = ".saving-"
_LEFT = re.compile(r"\.saving-.+\.[0-9a-f]{8}(\.\d+)?")  # being written, or an old version being removed
_OF_WRITER = re.compile(r"inline_container|PytorchStreamWriter|unexpected pos|File cannot be opened")
_NUMBER = re.compile(r"[0-9]{6,}")


class CheckpointError(Exception):
    """A checkpoint can't be saved or loaded."""

    def _render_traceback_(self) -> list[str]:
        """Return one line without a traceback: the error does not come from the user's code."""
        return [f"{type(self).__name__}: {self}"]


_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota there is used up",
    errno.EROFS: "it is read-only",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
}
PROBE_BYTES = 1 << 16  # to write, to find out why writing fails


def disk_error(error: BaseException, folder: Path) -> str:
    """Return the disk's reason for a failed write; empty if the error does not come from the disk.

    torch's own writer raises a RuntimeError without the reason, so this writes a probe to find it.
    """
    is_of_torch = type(error) is RuntimeError and _OF_WRITER.search(str(error)) is not None
    if not isinstance(error, OSError) and not is_of_torch:
        return ""
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    try:
        usage = shutil.disk_usage(there)
        number = _probe(there) if is_of_torch or not isinstance(error, OSError) else error.errno
    except OSError as failed:
        return f"{there} on {socket.gethostname()} can't be read: {failed.strerror}"
    why = _REASONS.get(number or 0) or (f"{type(error).__name__}: {error}")
    return (
        f"{why}: {there} on {socket.gethostname()}, {_amount(usage.free)} of {_amount(usage.total)} free; "
        "free disk space, or name another folder; versions that were saved before are unchanged"
    )


def _probe(folder: Path) -> int | None:
    """Return the errno with which writing a file fails; None if it succeeds."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno
    return None


def _amount(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def begin(root: Path, session: str, tag: str) -> Path:
    """Make the folder into which the next version is written.

    Parameters
    ----------
    root
        The checkpoint's folder.
    session
        Identifies this session among those that write there.
    tag
        Identifies this version within the session: eight hexadecimal digits.
    """
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"{SAVING}*"):
        with suppress(FileNotFoundError):  # another session has just finished its version
            is_own = left.name.startswith(f"{SAVING}{session}.")
            if _LEFT.fullmatch(left.name) and (is_own or time.time() - left.stat().st_mtime > LEFT_SECONDS):
                shutil.rmtree(left, ignore_errors=True)  # leftovers are harmless
    folder = root / f"{SAVING}{session}.{tag}"
    folder.mkdir()
    return folder


def finish(folder: Path, keep: int | None) -> Path:
    """Give a complete version its final name and remove old versions; return its path.

    Parameters
    ----------
    keep
        Number of versions to keep; None keeps all.
    """
    root = folder.parent
    for inner in (folder, *(each for each in folder.iterdir() if each.is_dir())):
        sync(inner)
    versions = versions_in(root)
    number = int(versions[-1].name) if versions else 0
    while True:
        number += 1
        version = root / f"{number:06}"
        if os.path.lexists(version):
            continue  # a folder of the user, or a version that another session has finished meanwhile
        try:
            folder.rename(version)
        except OSError:
            if not version.exists():
                raise
        else:
            break
    sync(root)
    if keep is not None:
        for old in versions_in(root)[:-keep]:
            _remove(old, folder)
    return version


def _remove(version: Path, folder: Path) -> None:
    """Rename an old version, then remove it: if that is interrupted, the rest must not be taken for a version."""
    gone = folder.with_name(f"{folder.name}.{version.name}")
    with suppress(OSError):  # keep a version that can't be removed
        version.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def latest(path: Path) -> Path:
    """Return the newest version in a checkpoint's folder; if ``path`` is a version, return it.

    Raises
    ------
    CheckpointError
        If there is no version.
    """
    if (path / ABOUT).exists():
        return path
    versions = versions_in(path)
    if not versions:
        raise CheckpointError(f"there is no checkpoint in {path.absolute()}; %dist_save {path} NAME... creates one")
    return versions[-1]


def versions_in(root: Path) -> list[Path]:
    """Return the complete versions in a folder, newest last; skip what the user keeps there under such a name."""
    found = [each for each in root.iterdir() if _NUMBER.fullmatch(each.name)] if root.is_dir() else []
    return sorted((each for each in found if (each / ABOUT).is_file()), key=lambda each: int(each.name))


def size_of(version: Path) -> int:
    """Return the size of a version's files in bytes."""
    return sum(each.stat().st_size for each in version.rglob("*") if each.is_file())
