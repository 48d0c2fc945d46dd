"""Locks on files, which the operating system frees with their process.

Covers: taking one, file systems that know none.
Does not cover: what is locked by whom (``cluster.registry``, ``engine.host_folder``).
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

from .errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


def take_lock(descriptor: int, folder: Path) -> None:
    """Take the lock of an open file in a folder, alone, until the file is closed.

    Raises
    ------
    BlockingIOError
        If another process has it.
    UsageError
        If the folder's file system knows no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:  # ENOLCK of NFS without its lock daemon, ENOSYS of Lustre without flock, ENOTSUP
        raise UsageError(
            f"the file system of {folder} knows no locks ({error.strerror}), by which one notebook at a time has the "
            "ranks; mount it with locks, or name a folder on another: with JUPYTER_RUNTIME_DIR, or of a job with "
            "--join FILE"
        ) from error


def check_locks(folder: Path) -> None:
    """See that files of a folder can be locked.

    Raises
    ------
    UsageError
        If its file system knows no locks.
    OSError
        If nothing can be written there.
    """
    probe = folder / "lock-probe"
    descriptor = os.open(probe, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        take_lock(descriptor, folder)
    finally:
        os.close(descriptor)
        probe.unlink()


def remove_unheld(folder: Path, name: str) -> None:
    """Remove a folder if nobody holds a lock on its file of this name."""
    with suppress(OSError):  # it is in use, was just removed, or there is no such file in it
        lock = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
