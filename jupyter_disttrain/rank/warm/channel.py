"""Connect a start to the warm process of its label: a Unix socket, the messages on it, file descriptors.

Covers: the socket's name, who may use it, sending and receiving one message.
Does not cover: what the messages ask for (``start``, ``warm_process``).

The name is in Linux' abstract namespace: it exists as long as a process holds it, in one network namespace, and no file
is left when that process is killed. Both sides check that the other process belongs to the same user, which the kernel
reports.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")
_CREDENTIALS = struct.Struct("3i")  # pid, uid and gid of the process that connected or listens
MOST_DESCRIPTORS = 250  # Linux passes up to 253 in one message


def address_of(label: str) -> str:
    """Return the name of the socket of a warm process."""
    return f"\0disttrain-warm-{os.getuid()}-{label}"


def belongs_to_us(sock: socket.socket) -> bool:
    """Whether the process at the other end is this user's."""
    record = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(record)[1] == os.getuid())


def send(sock: socket.socket, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
    """Send a message, which JSON can represent, with copies of file descriptors.

    It is sent by one system call, if there is room for it: at Python's end a daemon thread may stop between two.
    """
    body = json.dumps(message).encode()
    data = _LENGTH.pack(len(body)) + body
    sent = socket.send_fds(sock, [data], descriptors or [])
    if sent < len(data):
        sock.sendall(data[sent:])


def receive(sock: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Receive a message and its file descriptors; None where the connection has ended, or stopped within a message."""
    descriptors: list[int] = []
    try:
        head, descriptors, _, _ = socket.recv_fds(sock, _LENGTH.size, MOST_DESCRIPTORS)
        for each in descriptors:
            os.set_inheritable(each, False)
        head += _read(sock, _LENGTH.size - len(head)) if head else b""
        return (json.loads(_read(sock, _LENGTH.unpack(head)[0])) if head else None), descriptors
    except (OSError, EOFError):
        close_all(descriptors)
        return None, []


def close_all(descriptors: list[int]) -> None:
    """Close file descriptors."""
    for each in descriptors:
        os.close(each)


def _read(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
