"""The cluster's folder on a host that is not the notebook's.

Covers: making it for the first process of the cluster there, removing it with the last, whatever others left there.
Does not cover: the folder on the notebook's host (``cluster.folders``), which the client makes and removes.

Each nanny holds a shared lock on a file in it. Who can take that lock alone, knows that nobody else is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ..shelf import NANNIES, NOTEBOOK, ROOT
from .connection import LOCAL_DIR

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "disttrain-"


class HostFolder:
    """A hold on the folder; without one there is nothing to hold, on the notebook's own host."""

    def __init__(self) -> None:
        self._path = Path(os.environ[LOCAL_DIR])
        self._lock: int | None = None
        if not (self._path / NOTEBOOK).exists():
            _sweep(except_for=self._path)
            self._lock = self._enter()

    def _enter(self) -> int:
        while True:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # its last nanny has just removed it
                lock = os.open(self._path / NANNIES, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(lock, fcntl.LOCK_SH)
                if self._is_file(lock):
                    return lock
                os.close(lock)

    def _is_file(self, lock: int) -> bool:
        """Whether the file that we hold is still in the folder: another may have been made in its place meanwhile."""
        try:
            return os.path.samestat(os.fstat(lock), (self._path / NANNIES).stat())
        except FileNotFoundError:
            return False

    def forget(self) -> None:
        """Close a fork's copy: the lock is the nanny's."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def leave(self) -> None:
        """Let go; the last one removes the folder."""
        if self._lock is None:
            return
        with contextlib.suppress(BlockingIOError):  # others are there
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self._path, ignore_errors=True)  # MPI's own processes may be removing their part of it
        os.close(self._lock)
        self._lock = None


def _sweep(except_for: Path) -> None:
    """Remove what clusters left here whose nannies were killed."""
    for folder in _folders():
        if folder == except_for:
            continue
        with contextlib.suppress(OSError):  # it is in use, was just removed, or is the notebook's own
            lock = os.open(folder / NANNIES, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _folders() -> Iterator[Path]:
    for folder in ROOT.glob(f"{PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            if folder.stat().st_uid == os.getuid():
                yield folder
