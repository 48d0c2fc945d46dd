"""Open files and folders that no other user can have written.

Covers: the owner of a file, checked at the descriptor that was opened; private folders; their creation.
Does not cover: their content.

The writer of a connection file, of a cluster's description or of a checkpoint decides what its reader runs. A checked
path may lead elsewhere a moment later, so the opened file is checked.
"""

from __future__ import annotations

import errno
import os
import pwd
import socket
import stat
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def _other_owner(found: os.stat_result) -> str:
    """Return that a file or folder belongs to another user; empty if it does not."""
    if found.st_uid == os.geteuid():
        return ""
    try:
        name = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:  # this host does not know the user
        name = str(found.st_uid)
    return f"belongs to another user ({name})"


def open_own(path: str | os.PathLike[str]) -> int:
    """Open a regular file of this user for reading and return its descriptor.

    Raises an OSError if it can't be read, or ``PermissionError`` with the owner's name if it belongs to another user.
    """
    # A pipe that another user put there must not block the reader.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    found = os.fstat(descriptor)
    reason = _other_owner(found)
    if not reason and stat.S_ISREG(found.st_mode):
        return descriptor
    os.close(descriptor)
    if reason:
        raise PermissionError(errno.EPERM, f"it {reason}", os.fspath(path))
    raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def read_own(path: str | os.PathLike[str]) -> str:
    """Return the content of a file of this user.

    Raises as :func:`open_own`.
    """
    with os.fdopen(open_own(path), encoding="utf-8", errors="replace") as file:
        return file.read()


def write_private(path: Path, content: str) -> None:
    """Write a file that only this user may read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(content)


def replace_private(path: Path, content: str) -> None:
    """Write a file that only this user may read; other processes see its earlier content or all of the new one."""
    fresh = path.with_name(f"{path.name}.new-{threading.get_native_id()}")
    try:
        write_private(fresh, content)
        fresh.replace(path)
    except OSError:  # e.g. a full disk
        fresh.unlink(missing_ok=True)
        raise


def why_not_private(folder: Path, shared_mode: int = 0o077) -> str:
    """Return what gives another user access to a folder; empty if nothing does.

    ``shared_mode`` are the bits of the mode that must not be set. A link in place of the folder is not followed.
    """
    found = folder.lstat()
    if reason := _other_owner(found):
        return reason
    if not stat.S_ISDIR(found.st_mode):
        return "is a link" if stat.S_ISLNK(found.st_mode) else "is not a folder"
    return f"is open to other users (mode {stat.S_IMODE(found.st_mode):o})" if found.st_mode & shared_mode else ""


def check_private(folder: Path, shared_mode: int) -> None:
    """Refuse a folder that another user may have made or may change.

    Raises a PermissionError with the reason.
    """
    if reason := why_not_private(folder, shared_mode):
        raise PermissionError(errno.EPERM, f"on {socket.gethostname()} it {reason}", str(folder))


def make_private_below(folder: Path, top: Path) -> None:
    """Make a folder and those between it and ``top``, each private; make this user's open ones private.

    ``mkdir(parents=True)`` gives the parents the mode of the umask, with which a group may put files into them.

    Raises a PermissionError if one of them belongs to another user.
    """
    top.mkdir(parents=True, exist_ok=True)
    for each in reversed([folder, *(parent for parent in folder.parents if parent.is_relative_to(top))]):
        if each == top:
            continue
        each.mkdir(mode=0o700, exist_ok=True)
        found = each.stat()
        if reason := _other_owner(found):
            raise PermissionError(errno.EPERM, f"it {reason}", str(each))
        if found.st_mode & 0o022:  # another user may change its content
            each.chmod(0o700)
