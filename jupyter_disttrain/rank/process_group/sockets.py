"""Find the sockets of process groups, to release a stuck collective.

Covers: which epoll instances and sockets Gloo made for a group, shutting down only those; the store's client socket;
the sockets through which NCCL initializes a communicator.
Does not cover: deciding when (``client.recovery.state_machine``), making a new group (``group``).

Neither ``abort`` nor ``destroy_process_group`` releases a thread that waits in Gloo; the end of its connections does.
Each Gloo group has an event loop of its own, whose epoll instance lists exactly the group's sockets in
``/proc/self/fdinfo``. So a data loader's, a logger's or another group's sockets stay open.

NCCL initializes a communicator at a group's first collective. Its thread then polls sockets that wait for the other
ranks, and no abort reaches it: torch has no communicator to abort yet. NCCL sets TCP_NODELAY on all of them, and
watches them with no epoll instance, unlike asyncio, ZeroMQ, Gloo and the store.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from ..proc_self import list_proc_self, open_socket, read_proc_self

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class EventLoop:
    """One of Gloo's event loops."""

    descriptor: int  # descriptor of the epoll instance
    listener: int  # the inode of its listening socket, as the descriptor's number may have been reused by now


def epoll_descriptors() -> set[int]:
    """Return the epoll instances of this process."""
    return {descriptor for descriptor, file in _descriptors() if file == "anon_inode:[eventpoll]"}


def event_loops(descriptors: set[int]) -> list[EventLoop]:
    """Return the epoll instances that are Gloo's: they watch TCP sockets, one of which listens, and a pipe."""
    loops = []
    for descriptor in descriptors:
        watched = list(_watched(descriptor))
        kinds = [_kind(fd, inode) for fd, inode in watched]
        if None not in kinds and kinds.count("listens") == 1:
            loops.append(EventLoop(descriptor, watched[kinds.index("listens")][1]))
    return loops


def shut_down(loop: EventLoop) -> None:
    """Shut down the connections of an event loop, so that waits for them fail."""
    watched = dict(_watched(loop.descriptor))
    if loop.listener in watched.values():  # else the loop has ended, and its descriptor may be something else
        for fd, inode in watched.items():
            if _kind(fd, inode) == "connected":
                _shut_down(fd)


def shut_down_clients_of(port: int) -> None:
    """Shut down this process's connections to a TCP store, so that waits for a key fail."""
    for each in psutil.Process().net_connections("tcp"):
        if each.raddr and each.raddr.port == port:
            _shut_down(each.fd)


def inodes() -> frozenset[int] | None:
    """Return the inodes of this process's sockets, which are not reused as descriptors are; None without a free one."""
    try:
        return frozenset(_sockets().values())
    except OSError:  # too many open files
        return None


def shut_down_opened(before: frozenset[int], kind: str, spared_port: int) -> None:
    """Shut down the sockets opened since ``before`` that may be NCCL's.

    ``kind`` is ``"connected"`` or ``"listens"``; ``spared_port`` is the store's. Sockets of Python code are spared.
    """
    opened = {fd: inode for fd, inode in _sockets().items() if inode not in before}
    watched = {inode for loop in epoll_descriptors() for _, inode in _watched(loop)}
    of_python = {each.fileno() for each in gc.get_objects() if issubclass(type(each), socket.socket)}
    for fd, inode in opened.items():
        if inode in watched or fd in of_python or _kind(fd, inode) != kind:
            continue
        with suppress(OSError), open_socket(fd) as sock:  # it may have ended already
            if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) and sock.getsockname()[1] != spared_port:
                sock.shutdown(socket.SHUT_RDWR)  # ends an accept, too


def _sockets() -> dict[int, int]:
    """Return descriptor and inode of this process's sockets."""
    return {descriptor: int(file[8:-1]) for descriptor, file in _descriptors() if file.startswith("socket:[")}


def _descriptors() -> Iterator[tuple[int, str]]:
    """Yield each descriptor of this process, and its file as Linux names it."""
    for name in list_proc_self("fd"):
        with suppress(OSError):  # closed meanwhile
            yield int(name), os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115  (a Path for each takes longer)


def _watched(descriptor: int) -> Iterator[tuple[int, int]]:
    """Yield descriptor and inode of what an epoll instance watches."""
    try:
        text = read_proc_self(f"fdinfo/{descriptor}").decode()
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
        with open_socket(descriptor) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
                return None
            return "listens" if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) else "connected"
    except OSError:
        return None  # closed meanwhile, or neither


def _shut_down(descriptor: int) -> None:
    with suppress(OSError), open_socket(descriptor) as sock:  # it may have ended already
        sock.shutdown(socket.SHUT_RDWR)
