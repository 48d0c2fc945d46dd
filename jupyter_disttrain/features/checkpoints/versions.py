"""Manage the folder of a checkpoint and its versions.

Covers: listing versions, naming a new one, removing old ones and incomplete ones of processes that died, why a version
can't be written.
Does not cover: what is in a version (``rank``).

A version is written under a temporary name and renamed once all of it is on the disk, so it is complete or absent.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...protocol.ranks import label_ranks
from ...protocol.time_limits import LEFT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ABOUT = "disttrain.json"  # lists the content of a version
SAVING = ".saving-"
_LEFT = re.compile(r"\.saving-.+\.[0-9a-f]{8}(\.\d+)?")  # being written, or an old version being removed
_OF_WRITER = re.compile(r"inline_container|PytorchStreamWriter|unexpected pos|File cannot be opened")
_FULL = errno.ENOSPC, errno.EDQUOT
_NUMBER = re.compile(r"[0-9]{6,}")


class CheckpointError(Exception):
    """A checkpoint can't be saved or loaded."""

    def _render_traceback_(self) -> list[str]:
        """Return one line without a traceback: the error does not come from the user's code."""
        return [f"{type(self).__name__}: {self}"]


def reason_of(error: BaseException, folder: Path) -> str:
    """Return why a version could not be written or read; torch puts the errors of all ranks into its own."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict):
        by_reason: dict[str, list[int]] = {}
        for rank, (failure, _) in sorted(failures.items()):
            by_reason.setdefault(reason_of(failure, folder), []).append(rank)
        return "; ".join(f"{label_ranks(ranks)}: {reason}" for reason, ranks in by_reason.items())
    if isinstance(error, CheckpointError):
        return str(error)
    # torch's own writer raises a RuntimeError in place of the system's error.
    if getattr(error, "errno", None) in _FULL or _OF_WRITER.search(str(error)):
        return (
            f"{getattr(error, 'strerror', None) or 'torch could not write a file'}: {_usage(folder)}; free disk space, "
            "or name another folder; versions that were saved before are unchanged"
        )
    if isinstance(error, OSError):
        return f"{error.strerror}: {error.filename or folder} on {socket.gethostname()}"
    return f"{type(error).__name__}: {error}"


def _usage(folder: Path) -> str:
    try:
        there = next(each for each in (folder, *folder.parents) if each.is_dir())
        usage, mebi = shutil.disk_usage(there), 2**20
    except OSError as error:  # the file system is gone
        return f"{folder} on {socket.gethostname()} ({error.strerror})"
    return f"{there} on {socket.gethostname()}, {usage.free / mebi:.1f} of {usage.total / mebi:.1f} MiB free"


def begin(root: Path, session: str) -> Path:
    """Make the folder into which a session writes its next version; remove what is left of its earlier ones."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"{SAVING}*"):
        with suppress(FileNotFoundError):  # another session has just finished its version
            is_own = left.name.startswith(f"{SAVING}{session}.")
            if _LEFT.fullmatch(left.name) and (is_own or time.time() - left.stat().st_mtime > LEFT_SECONDS):
                shutil.rmtree(left, ignore_errors=True)  # leftovers are harmless
    folder = root / f"{SAVING}{session}.{os.urandom(4).hex()}"
    folder.mkdir()
    return folder


def finish(folder: Path, keep: int | None, about: Mapping[str, Any]) -> Path:
    """Give a complete version its final name; return its path. Of the versions, ``keep`` are kept, or all."""
    root = folder.parent
    (folder / ABOUT).write_text(json.dumps(about, indent=1))
    sync(folder / ABOUT)
    sync(folder)
    number = int(versions[-1].name) if (versions := versions_in(root)) else 0
    while folder.exists():
        number += 1
        version = root / f"{number:06}"
        if os.path.lexists(version):
            continue  # a folder of the user, or a version that another session has finished meanwhile
        try:
            folder.rename(version)
        except OSError:
            if not version.exists():
                raise
    sync(root)
    if keep is not None:
        for old in versions_in(root)[:-keep]:
            # If removing is interrupted, the rest must not be taken for a version.
            gone = folder.with_name(f"{folder.name}.{old.name}")
            with suppress(OSError):  # keep a version that can't be removed
                old.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
    return version


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def latest(path: Path) -> Path:
    """Return the newest version in a checkpoint's folder, or ``path`` if it is a version."""
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
