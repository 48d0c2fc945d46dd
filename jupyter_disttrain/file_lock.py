"""Lock files, so that the operating system releases the lock with its process.

Covers: acquiring a lock, file systems without locks.
Does not cover: which files are locked (``client.registry.cluster_file``, ``rank.startup.host_dir``).
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from .errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


def take_lock(descriptor: int, folder: Path) -> None:
    """Acquire the exclusive lock of an open file in a folder, until the file is closed.

    Raises a BlockingIOError if another process has it, and a UsageError if the folder's file system supports no
    locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:  # ENOLCK of NFS without its lock daemon, ENOSYS of Lustre without flock, ENOTSUP
        raise UsageError(
            f"the file system of {folder} does not support locks ({error.strerror}), which ensure that one notebook at "
            "a time uses the ranks; mount it with locks, or use another file system: set JUPYTER_RUNTIME_DIR, or for a "
            "job --join FILE"
        ) from error


def check_locks(folder: Path) -> None:
    """Check that files of a folder can be locked.

    Raises a UsageError if its file system supports no locks, and an OSError if the folder is not writable.
    """
    probe = folder / "lock-probe"
    descriptor = os.open(probe, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        take_lock(descriptor, folder)
    finally:
        os.close(descriptor)
        probe.unlink()
