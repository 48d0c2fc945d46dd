"""Create and remove the cluster's folder on a host other than the notebook's.

Covers: creating it for the cluster's first process on the host, removing it with the last; removing what other clusters
left there.
Does not cover: the folder on the notebook's host (``launchers.folders``), which the client creates and removes.

Each nanny holds a shared lock on a file in the folder. A process that gets an exclusive lock is the last one. If all
nannies were killed, the next start of any cluster on the host removes the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path

from ...errors import LaunchError
from ...private_files import why_not_private
from ...protocol.environment import LOCAL_DIR
from ...protocol.shared_memory import NANNIES, NOTEBOOK, PREFIX, ROOT
from ...rank_sessions import remove_unheld


def make_private(path: Path) -> None:
    """Make a private folder where other users may already have made one of that name.

    Raises a LaunchError if the folder belongs to another user or others may enter it.
    """
    with contextlib.suppress(FileExistsError):  # also for a link of that name
        path.mkdir(mode=0o700, parents=True)
    reason = why_not_private(path)
    if reason:
        raise LaunchError(
            f"{path} on {socket.gethostname()} existed already and {reason}, so it was not used; remove it, and start "
            "again"
        )


class HostFolder:
    """A nanny's lock on the cluster's folder; on the notebook's own host it has no effect.

    Raises as :func:`make_private`.
    """

    def __init__(self) -> None:
        self._path = Path(os.environ[LOCAL_DIR])
        self._lock: int | None = None
        try:
            is_of_notebook = not why_not_private(self._path) and (self._path / NOTEBOOK).exists()
        except FileNotFoundError:
            is_of_notebook = False
        if not is_of_notebook:
            _sweep(except_for=self._path)
            self._lock = self._enter()

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
        if self._lock is not None:
            self.forget()
            remove_unheld(self._path, NANNIES)


def _sweep(except_for: Path) -> None:
    """Remove the folders of clusters whose nannies were killed."""
    for folder in ROOT.glob(f"{PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            if folder != except_for and folder.lstat().st_uid == os.getuid():  # lstat: not of the target of a link
                remove_unheld(folder, NANNIES)
