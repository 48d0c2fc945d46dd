"""The folder of a checkpoint, and its versions.

Covers: which versions there are, giving a new one its name, removing old ones and what was left by who died saving.
Does not cover: what is in a version (``checkpoints``).

A version is written under another name, and gets its own once all of it is on the disk: it is whole or not there.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

ABOUT = "disttrain.json"  # says what is in a version
SAVING = ".saving-"
LEFT_SECONDS = 24 * 3600.0  # without a change: another session's version that nobody writes any more


class CheckpointError(Exception):
    """A checkpoint can't be saved or loaded."""

    def _render_traceback_(self) -> list[str]:
        """Return one line: no code of the person's is at fault."""
        return [f"{type(self).__name__}: {self}"]


def begin(root: Path, session: str, tag: str) -> Path:
    """Make the folder into which the next version is written.

    Parameters
    ----------
    root
        The checkpoint's folder.
    session
        Names this session among those that write there.
    tag
        Names this version among the session's.
    """
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"{SAVING}*"):
        is_ours = left.name.startswith(f"{SAVING}{session}.")
        if is_ours or time.time() - left.stat().st_mtime > LEFT_SECONDS:
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
    while True:
        versions = versions_in(root)
        version = root / f"{int(versions[-1].name) + 1 if versions else 1:06}"
        try:
            folder.rename(version)
        except OSError:
            if not version.exists():
                raise
            continue  # another session's was finished at this moment
        break
    sync(root)
    if keep is not None:
        for old in [*versions, version][:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    return version


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
    """Return the whole versions in a folder, the newest last."""
    found = [each for each in root.iterdir() if each.name.isdigit()] if root.is_dir() else []
    return sorted(found, key=lambda each: int(each.name))


def size_of(version: Path) -> int:
    """Return the bytes of all its files."""
    return sum(each.stat().st_size for each in version.rglob("*") if each.is_file())
