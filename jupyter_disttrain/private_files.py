"""Open files and folders that no other user can have written.

Covers: the owner of a file, checked at the descriptor that was opened; private folders; their creation.
Does not cover: their content.

The writer of a connection file, of a cluster's description or of a checkpoint decides what its reader runs. A checked
path may lead elsewhere a moment later, so the opened descriptor is checked.
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

OTHERS_WRITE = 0o022  # the mode bits that let another user change the content


def owner_of(uid: int) -> str:
    """Return a user's name, or the number of a user unknown to this host."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def open_own(path: str | os.PathLike[str]) -> int:
    """Open a regular file of this user for reading and return its descriptor.

    Raises
    ------
    OSError
        If it can't be read, or ``PermissionError`` with the owner's name if it belongs to another user.
    """
    # A pipe that another user put there must not block the reader.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        check_owner(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_owner(descriptor: int, path: str | os.PathLike[str]) -> None:
    """Refuse an opened file of another user.

    Raises
    ------
    PermissionError
        With the owner's name.
    OSError
        If it is no regular file.
    """
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to another user ({owner_of(found.st_uid)})", os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def read_own(path: str | os.PathLike[str]) -> str:
    """Return the content of a file of this user.

    Raises
    ------
    OSError
        As :func:`open_own`.
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
    write_private(fresh, content)
    fresh.replace(path)


def why_not_private(folder: Path, shared_mode: int = 0o077) -> str:
    """Return what gives another user access to a folder; empty if nothing does.

    Parameters
    ----------
    folder
        An existing folder. It is opened without following a link in its place, and the descriptor is checked.
    shared_mode
        The bits of the mode that must not be set.

    Raises
    ------
    OSError
        If it can't be opened.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (NotADirectoryError, PermissionError) as error:
        found = folder.lstat()
        if found.st_uid != os.geteuid():
            return f"belongs to another user ({owner_of(found.st_uid)})"
        if isinstance(error, PermissionError):
            raise
        return "is a link" if stat.S_ISLNK(found.st_mode) else "is not a folder"
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if found.st_uid != os.geteuid():
        return f"belongs to another user ({owner_of(found.st_uid)})"
    if found.st_mode & shared_mode:
        return f"is open to other users (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def check_private(folder: Path, shared_mode: int = 0o077) -> None:
    """Refuse a folder that another user may have made or may change.

    Raises
    ------
    PermissionError
        With the reason.
    """
    reason = why_not_private(folder, shared_mode)
    if reason:
        raise PermissionError(errno.EPERM, f"on {socket.gethostname()} it {reason}", str(folder))


def make_private(folder: Path) -> None:
    """Make a folder, unless it exists, that only this user may enter.

    Missing parents are made with the mode that the umask gives.

    Raises
    ------
    PermissionError
        If the folder exists and belongs to another user, or other users may enter it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)


def make_private_below(folder: Path, top: Path) -> None:
    """Make a folder and those between it and ``top``, each private; make this user's open ones private.

    ``mkdir(parents=True)`` gives the parents the mode of the umask, with which a group may put files into them.

    Raises
    ------
    PermissionError
        If one of them belongs to another user.
    """
    top.mkdir(parents=True, exist_ok=True)
    for each in reversed([folder, *(parent for parent in folder.parents if parent.is_relative_to(top))]):
        if each == top:
            continue
        each.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if found.st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, f"it belongs to another user ({owner_of(found.st_uid)})", str(each))
            if found.st_mode & OTHERS_WRITE:
                os.fchmod(descriptor, 0o700)
        finally:
            os.close(descriptor)
