"""Find the sockets of process groups, to release a stuck collective.

Covers: which epoll instances and sockets Gloo made for a group, shutting down only those; the store's client socket.
Does not cover: deciding when (``client.recovery.state_machine``), making a new group (``group``).

Neither ``abort`` nor ``destroy_process_group`` releases a thread that waits in Gloo; the end of its connections does.
Each Gloo group has an event loop of its own, whose epoll instance lists exactly the group's sockets in
``/proc/self/fdinfo``. So a data loader's, a logger's or another group's sockets stay open.
"""

from __future__ import annotations

import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_FD, _FDINFO = Path("/proc/self/fd"), Path("/proc/self/fdinfo")
_ESTABLISHED = "01"  # in /proc/net/tcp


@dataclass(frozen=True, slots=True)
class EventLoop:
    """One of Gloo's event loops."""

    descriptor: int  # descriptor of the epoll instance
    listener: int  # the inode of its listening socket, as the descriptor's number may have been reused by now


def epoll_descriptors() -> set[int]:
    """Return the epoll instances of this process."""
    return {descriptor for descriptor, target in _descriptors() if target == "anon_inode:[eventpoll]"}


def _descriptors() -> Iterator[tuple[int, str]]:
    """Yield the open descriptors of this process, and their targets."""
    for link in _FD.iterdir():
        try:
            yield int(link.name), str(link.readlink())
        except OSError:
            continue  # closed meanwhile


def event_loops(descriptors: set[int]) -> list[EventLoop]:
    """Return the epoll instances that are Gloo's: they watch TCP sockets, one of which listens, and a pipe."""
    loops = []
    for descriptor in descriptors:
        watched = list(_watched(descriptor))
        kinds = [_kind(fd, inode) for fd, inode in watched]
        if None not in kinds and kinds.count("listens") == 1:
            loops.append(EventLoop(descriptor, watched[kinds.index("listens")][1]))
    return loops


def shut_down(loop: EventLoop) -> int:
    """Shut down the connections of an event loop, so that waits for them fail; returns how many."""
    watched = dict(_watched(loop.descriptor))
    if loop.listener not in watched.values():
        return 0  # the loop has ended, and its descriptor may be something else
    connected = [fd for fd, inode in watched.items() if _kind(fd, inode) == "connected"]
    return sum(map(_shut_down, connected))


def shut_down_clients_of(port: int) -> int:
    """Shut down this process's connections to a TCP store, so that waits for a key fail."""
    inodes = _connections_to(port)
    count = 0
    for descriptor, target in _descriptors():
        if target.startswith("socket:[") and int(target[8:-1]) in inodes:
            count += _shut_down(descriptor)
    return count


def _watched(descriptor: int) -> Iterator[tuple[int, int]]:
    """Yield descriptor and inode of what an epoll instance watches."""
    try:
        text = (_FDINFO / str(descriptor)).read_text()
    except OSError:
        return
    for line in text.splitlines():
        if line.startswith("tfd:"):
            columns = line.replace(":", ": ").split()
            yield int(columns[1]), int(columns[columns.index("ino:") + 1], 16)


def _kind(descriptor: int, inode: int) -> str | None:
    """Return ``"listens"`` or ``"connected"`` for a TCP socket, ``"pipe"`` for a pipe, else None."""
    try:
        found = os.fstat(descriptor)
        if found.st_ino != inode:
            return None
        if stat.S_ISFIFO(found.st_mode):
            return "pipe"
        if not stat.S_ISSOCK(found.st_mode):
            return None
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
                return None
            return "listens" if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) else "connected"
    except OSError:
        return None  # closed meanwhile, or neither


def _shut_down(descriptor: int) -> int:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return 0  # it has ended already
    return 1


def _connections_to(port: int) -> set[int]:
    """Return the inodes of the connections whose other end is ``port``."""
    inodes = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue  # no IPv6 here
        for line in lines:
            columns = line.split()
            if int(columns[2].rpartition(":")[2], 16) == port and columns[3] == _ESTABLISHED:
                inodes.add(int(columns[9]))
    return inodes
