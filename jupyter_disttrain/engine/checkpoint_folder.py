"""The folder of a checkpoint, and its versions.

Covers: which versions there are, giving a new one its name, removing old ones and what was left by who died saving.
Does not cover: what is in a version (``checkpoints``).

A version is written under another name, and gets its own once all of it is on the disk: it is whole or not there.
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

if TYPE_CHECKING:
    from pathlib import Path

ABOUT = "disttrain.json"  # says what is in a version
SAVING = ".saving-"
_LEFT = re.compile(r"\.saving-.+\.[0-9a-f]{8}(\.\d+)?")  # being written, or an old version being removed
_OF_WRITER = re.compile(r"inline_container|PytorchStreamWriter|unexpected pos|File cannot be opened")
_NUMBER = re.compile(r"[0-9]{6,}")
LEFT_SECONDS = 24 * 3600.0  # without a change: another session's version that nobody writes any more


class CheckpointError(Exception):
    """A checkpoint can't be saved or loaded."""

    def _render_traceback_(self) -> list[str]:
        """Return one line: no code of the person's is at fault."""
        return [f"{type(self).__name__}: {self}"]


_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota there is used up",
    errno.EROFS: "it is read-only",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
}
PROBE_BYTES = 1 << 16  # that are written to learn why more could not be


def disk_words(error: BaseException, folder: Path) -> str:
    """Say what the disk has to do with it that something could not be written; empty if it is no error of a disk.

    torch's own writer raises a RuntimeError which does not tell why, so the disk is asked.
    """
    is_of_torch = type(error) is RuntimeError and _OF_WRITER.search(str(error)) is not None
    if not isinstance(error, OSError) and not is_of_torch:
        return ""
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    try:
        usage = shutil.disk_usage(there)
        number = _probe(there) if is_of_torch or not isinstance(error, OSError) else error.errno
    except OSError as failed:
        return f"{there} on {socket.gethostname()} can't be looked at: {failed.strerror}"
    why = _REASONS.get(number or 0) or (f"{type(error).__name__}: {error}")
    return (
        f"{why}: {there} on {socket.gethostname()}, {_amount(usage.free)} of {_amount(usage.total)} free; "
        "make room, or give another folder; versions that were saved before are as they were"
    )


def _probe(folder: Path) -> int | None:
    """Return with which error a file can't be written, None if it can."""
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
        Names this session among those that write there.
    tag
        Names this version among the session's: eight hexadecimal digits.
    """
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"{SAVING}*"):
        with suppress(FileNotFoundError):  # another session's was finished at this moment
            is_own = left.name.startswith(f"{SAVING}{session}.")
            if _LEFT.fullmatch(left.name) and (is_own or time.time() - left.stat().st_mtime > LEFT_SECONDS):
                shutil.rmtree(left, ignore_errors=True)  # what is still there is in nobody's way
    folder = root / f"{SAVING}{session}.{tag}"
    folder.mkdir()
    return folder


def finish(folder: Path, keep: int | None) -> Path:
    """Give a version that is whole its name, and remove old ones; returns where it is.

    Parameters
    ----------
    keep
        How many versions stay; None: all.
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
            continue  # a person's own, or another session's that was finished meanwhile
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
    """Remove an old version under another name: cut off meanwhile, no half of it must pass for a version."""
    gone = folder.with_name(f"{folder.name}.{version.name}")
    with suppress(OSError):  # one that can't be removed stays
        version.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def sync(path: Path) -> None:
    """Have a file or a folder reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def latest(path: Path) -> Path:
    """Return the newest version in a checkpoint's folder; a version itself stands for itself.

    Raises
    ------
    CheckpointError
        If there is none.
    """
    if (path / ABOUT).exists():
        return path
    versions = versions_in(path)
    if not versions:
        raise CheckpointError(f"there is no checkpoint in {path.absolute()}; %dist_save {path} NAME... makes one")
    return versions[-1]


def versions_in(root: Path) -> list[Path]:
    """Return the whole versions in a folder, the newest last; a person may keep something else of such a name there."""
    found = [each for each in root.iterdir() if _NUMBER.fullmatch(each.name)] if root.is_dir() else []
    return sorted((each for each in found if (each / ABOUT).is_file()), key=lambda each: int(each.name))


def size_of(version: Path) -> int:
    """Return the bytes of all its files."""
    return sum(each.stat().st_size for each in version.rglob("*") if each.is_file())
