"""The cluster's folder on a host that is not the notebook's.

Covers: making it for the first process of the cluster there, removing it with the last, however that ends, whatever
others left there.
Does not cover: the folder on the notebook's host (``cluster.folders``), which the client makes and removes.

Each nanny holds a shared lock on a file in it. Who can take that lock alone, knows that nobody else is there. A process
of its own waits for that, because nannies may be killed: there is one per folder, and it does nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import LaunchError
from ..locks import remove_unheld
from ..private_files import why_not_private
from ..shelf import NANNIES, NOTEBOOK, PREFIX, ROOT
from .connection import LOCAL_DIR

if TYPE_CHECKING:
    from collections.abc import Iterator

WATCHER = "watcher"  # the file that the process holds which waits for the nannies' end


def make_private(path: Path) -> None:
    """Make a folder of this user alone, where others may have made one of that name.

    Raises
    ------
    LaunchError
        If there is one of another user, or one that others may enter.
    """
    with contextlib.suppress(FileExistsError):  # a link in its place, too
        path.mkdir(mode=0o700, parents=True)
    reason = why_not_private(path)
    if reason:
        raise LaunchError(
            f"{path} on {socket.gethostname()} was there already and {reason}, so nothing was put into it; have it "
            "removed, and start again"
        )


def _is_private(path: Path) -> bool:
    """Whether there is a folder that this user alone may enter; others may have made one of that name."""
    try:
        return not why_not_private(path)
    except FileNotFoundError:
        return False


class HostFolder:
    """A hold on the folder; without one there is nothing to hold, on the notebook's own host.

    Raises
    ------
    LaunchError
        If it is not this user's alone.
    """

    def __init__(self) -> None:
        self._path = Path(os.environ[LOCAL_DIR])
        self._lock: int | None = None
        if not (_is_private(self._path) and (self._path / NOTEBOOK).exists()):
            _sweep(except_for=self._path)
            self._lock = self._enter()
            _watch(self._path)

    def _enter(self) -> int:
        while True:
            with contextlib.suppress(FileNotFoundError):  # its last nanny has just removed it
                make_private(self._path)
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


def _watch(folder: Path) -> None:
    """Have a process remove the folder once no nanny is left, unless there is one that will."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError):  # removed meanwhile; there is one
        own = os.open(folder / WATCHER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
            child = os.fork()
            if child == 0:
                if os.fork() == 0:  # nobody's child, so that the nanny neither waits for it nor ends it
                    _wait_for_nannies(folder, own)
                os._exit(0)
            os.waitpid(child, 0)
        finally:
            os.close(own)


def _wait_for_nannies(folder: Path, own: int) -> None:
    """Wait until no nanny is left, remove the folder, and end; called in a process of its own."""
    os.setsid()
    os.closerange(0, own)  # the copy of a nanny's lock among them; and a launcher waits for the end of its pipes
    os.closerange(own + 1, os.sysconf("SC_OPEN_MAX"))
    with contextlib.suppress(FileNotFoundError):  # the last nanny has removed it
        lock = os.open(folder / NANNIES, os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.samestat(os.fstat(lock), (folder / NANNIES).stat()):
            shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _sweep(except_for: Path) -> None:
    """Remove what clusters left here whose nannies were killed."""
    for folder in _folders():
        if folder == except_for:
            continue
        remove_unheld(folder, NANNIES)


def _folders() -> Iterator[Path]:
    for folder in ROOT.glob(f"{PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            if folder.lstat().st_uid == os.getuid():  # not what another user's link leads to
                yield folder
