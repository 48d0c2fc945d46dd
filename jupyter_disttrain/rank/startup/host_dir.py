"""Create and remove the cluster's folder on a host other than the notebook's.

Covers: creating it for the cluster's first process on the host, removing it with the last, even if that is killed;
removing what other clusters left there.
Does not cover: the folder on the notebook's host (``launchers.folders``), which the client creates and removes.

Each nanny holds a shared lock on a file in the folder. A process that gets an exclusive lock is the last one. Because
nannies may be killed, a separate process per folder waits for that lock and does nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
from pathlib import Path

from ...errors import LaunchError
from ...private_files import why_not_private
from ...protocol.environment import LOCAL_DIR
from ...protocol.shared_memory import NANNIES, NOTEBOOK, PREFIX, ROOT
from ...rank_sessions import end_abandoned, remove_unheld

WATCHER = "watcher"  # lock file of the process that waits for the nannies' exit


def make_private(path: Path) -> None:
    """Make a private folder where other users may already have made one of that name.

    Raises
    ------
    LaunchError
        If the folder belongs to another user or others may enter it.
    """
    with contextlib.suppress(FileExistsError):  # also for a link of that name
        path.mkdir(mode=0o700, parents=True)
    reason = why_not_private(path)
    if reason:
        raise LaunchError(
            f"{path} on {socket.gethostname()} existed already and {reason}, so it was not used; remove it, and start "
            "again"
        )


def _is_private(path: Path) -> bool:
    """Whether the folder exists and only this user may enter it; another user may have made one of that name."""
    try:
        return not why_not_private(path)
    except FileNotFoundError:
        return False


class HostFolder:
    """A nanny's lock on the cluster's folder; on the notebook's own host it has no effect.

    Raises
    ------
    LaunchError
        If the folder belongs to another user or others may enter it.
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
            with contextlib.suppress(FileNotFoundError):  # the last nanny has just removed the folder
                make_private(self._path)
                lock = os.open(self._path / NANNIES, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(lock, fcntl.LOCK_SH)
                if self._is_file(lock):
                    return lock
                os.close(lock)

    def _is_file(self, lock: int) -> bool:
        """Whether the locked file is still in the folder: it may have been removed and made again meanwhile."""
        try:
            return os.path.samestat(os.fstat(lock), (self._path / NANNIES).stat())
        except FileNotFoundError:
            return False

    def forget(self) -> None:
        """Close a fork's copy of the lock, which belongs to the nanny."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def leave(self) -> None:
        """Release the lock; the last nanny removes the folder."""
        if self._lock is None:
            return
        with contextlib.suppress(BlockingIOError):  # other nannies hold it
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end_abandoned(self._path)
            shutil.rmtree(self._path, ignore_errors=True)  # MPI's own processes may be removing their part of it
        os.close(self._lock)
        self._lock = None


def _watch(folder: Path) -> None:
    """Start a process that removes the folder once no nanny is left, unless one runs already."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError):  # the folder was removed; a watcher runs already
        own = os.open(folder / WATCHER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
            child = os.fork()
            if child == 0:
                if os.fork() == 0:  # orphaned, so that the nanny neither waits for it nor ends it
                    _wait_for_nannies(folder, own)
                os._exit(0)
            os.waitpid(child, 0)
        finally:
            os.close(own)


def _wait_for_nannies(folder: Path, own: int) -> None:
    """Wait until no nanny is left, remove the folder and exit; called in a process of its own."""
    os.setsid()
    os.closerange(0, own)  # includes the copy of a nanny's lock, and pipes for whose end a launcher waits
    os.closerange(own + 1, os.sysconf("SC_OPEN_MAX"))
    with contextlib.suppress(FileNotFoundError):  # the last nanny has removed the folder
        lock = os.open(folder / NANNIES, os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.samestat(os.fstat(lock), (folder / NANNIES).stat()):
            end_abandoned(folder)
            shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _sweep(except_for: Path) -> None:
    """Remove the folders of clusters whose nannies were killed."""
    for folder in ROOT.glob(f"{PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            if folder != except_for and folder.lstat().st_uid == os.getuid():  # lstat: not of the target of a link
                remove_unheld(folder, NANNIES)
