"""Connect a rank to its nanny: two pipes, a socket and a shared page.

Covers: making them before the fork, each side's end, the framing on the socket.
Does not cover: what is sent (``output_batching``, ``rank.output.iopub``, ``nanny``).

The rank's file descriptors 1 and 2 are the pipes, so Python, C code and child processes all write to the same place, in
order, as they would under a shell. The nanny reads them in a process of its own: no line is lost when a rank holds the
GIL or dies, and no thread of the rank handles its output.
"""

from __future__ import annotations

import array
import fcntl
import json
import marshal
import mmap
import os
import socket
import struct
import tempfile
import termios
import threading
import time
from contextlib import contextmanager, suppress
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any

from ...features.telemetry.rank import status_page
from ...protocol.time_limits import WIRE_END_SECONDS, WIRE_PATIENCE_SECONDS
from ..proc_self import file_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ...protocol.messages import RankVitals

MOST_CHUNKS = 16  # of up to 1 MiB to read from a pipe at once
PIPE_SIZE = 1 << 20  # bytes; with Linux' default of 64 KiB the nanny wakes once per 64 KiB
LENGTH = struct.Struct("!Q")  # bytes of the frame group that follows
TOKEN_SIZE = 8
SEEN = struct.Struct("=Q")  # shared page, offset 0: bytes that the nanny has read
BUSY = 8  # shared page: 1 while the nanny handles output
INTERRUPTED = 10  # shared page: 1 once the nanny has interrupted the cell
PENDING = 11  # shared page: 1 from an interrupt until Python handles it
USES = struct.Struct("=Q")  # shared page: the beginnings and ends of requests that the rank has served
USES_AT = 16
ATOMIC_BYTES = 16384  # Linux sends this many bytes on a socket at once: all or, when a signal arrives, none

# The kinds of frame groups that a rank sends.
PLACED = b"P"  # a signed message for the client, published in its place among the output; a status ends the cell
CELL_BEGIN = b"B"  # a cell's header: output from now on belongs to this cell
SAMPLES = b"M"  # samples of ``log_metrics``, for the file and the client
LATE = b"L"  # output of an earlier cell's thread or task: that cell's header, the stream, the text
IDENTITY = b"I"  # JSON: the rank's identity, the path of its log


class Wire:
    """Both ends; made before the fork, then each side closes the other side's."""

    def __init__(self) -> None:
        self.stdout_read, self.stdout_write = os.pipe()
        self.stderr_read, self.stderr_write = os.pipe()
        for end in (self.stdout_write, self.stderr_write):
            with suppress(PermissionError):  # the user's limit of pipe memory is reached: this only costs speed
                fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        self.rank_socket, self.nanny_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.page_file = anonymous_file()
        os.ftruncate(self.page_file, mmap.PAGESIZE)
        self.page = mmap.mmap(self.page_file, mmap.PAGESIZE)
        self.stack_file = anonymous_file()  # Python writes the current stack here on request, without the GIL
        self.crash_file = anonymous_file()  # Python's report of a crash in C code, which the nanny reads afterwards
        self.lock_file = anonymous_file()  # its lock keeps messages of the rank's child processes from interleaving

    def become_nanny(self) -> None:
        """Keep only the nanny's ends."""
        os.close(self.stdout_write)
        os.close(self.stderr_write)
        self.rank_socket.close()
        for end in (self.stdout_read, self.stderr_read):
            os.set_blocking(end, False)

    def become_rank(self) -> None:
        """Keep the rank's ends and make them file descriptors 1 and 2; nothing can be read from 0.

        The reading ends stay open too: asking them for the unread bytes needs no system call of the nanny. The writing
        ends stay open to restore 1 and 2 where a cell closes them.
        """
        self.nanny_socket.close()
        restore_input()
        os.dup2(self.stdout_write, 1)
        os.dup2(self.stderr_write, 2)

    def wait_read(self, descriptor: int) -> None:
        """Wait, on the rank, until the nanny has read what was written to 1 or 2."""
        read_end = self.stdout_read if descriptor == 1 else self.stderr_read
        _wait_until(lambda: not _unread(read_end))


def restore_input() -> None:
    """Make file descriptor 0 one from which nothing can be read."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    if nothing != 0:
        os.dup2(nothing, 0)
        os.close(nothing)
    os.set_inheritable(0, True)


def _wait_until(condition: Callable[[], bool]) -> None:
    """Wait a short time for the nanny: if it is busy, output may lose its order, but nothing hangs."""
    deadline = time.monotonic() + WIRE_PATIENCE_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.00002)


def anonymous_file() -> int:
    """Return the descriptor of a new file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("disttrain")
    # Pythons built for old systems, such as conda's and uv's, have no memfd_create.
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Sender:
    """Sends frame groups to the nanny: of the rank, or of a program that the rank runs."""

    def __init__(self, sock: socket.socket, lock_file: int) -> None:
        self._socket, self._lock_file = sock, lock_file
        self._lock = threading.RLock()  # reentrant: SIGTERM's handler sends the rest during another send
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()  # it may have been held by a thread that does not exist in the child

    def send(self, kind: bytes, frames: Sequence[Any]) -> None:
        """Send one whole frame group, from any thread or forked child; later output comes after it.

        An interrupt may end the call, but never leaves half a group on the socket, which would make what follows
        unreadable.
        """
        token = os.urandom(TOKEN_SIZE)
        # As plain bytes, whatever shape a buffer has.
        group = marshal.dumps((kind, token, [PickleBuffer(frame).raw() for frame in frames]))
        data = LENGTH.pack(len(group)) + group
        if len(data) <= ATOMIC_BYTES:
            self._exchange(kind, token, data)
        else:
            # Signal handlers, which may raise, run on the main thread only.
            sender = threading.Thread(target=self._exchange, args=(kind, token, data), name="disttrain send")
            sender.start()
            sender.join()

    def _exchange(self, kind: bytes, token: bytes, data: bytes) -> None:
        with self._lock:
            try:
                fcntl.lockf(self._lock_file, fcntl.LOCK_EX)
                self._socket.sendall(data)
                if kind == PLACED:
                    # No output may follow until the nanny has read the output before it.
                    self._wait_for(token)
            except (BrokenPipeError, ConnectionResetError):
                # The nanny has died, so the kernel ends this process; nothing is to be reported about it meanwhile.
                time.sleep(WIRE_END_SECONDS)
                raise
            finally:
                fcntl.lockf(self._lock_file, fcntl.LOCK_UN)

    def _wait_for(self, token: bytes) -> None:
        """Wait until the nanny returns the token; tokens of interrupted sends are skipped."""
        while self._socket.recv(TOKEN_SIZE, socket.MSG_WAITALL) not in (token, b""):
            pass


class RankEnd:
    """The rank's end: send frame groups, and report whether there was output."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._sender = Sender(wire.rank_socket, wire.lock_file)
        self._sent = 0
        self._mark = self._position()
        ends = wire.stdout_read, wire.stdout_write, wire.stderr_read, wire.stderr_write, wire.lock_file
        self._files = {end: file_of(end) for end in ends}

    def send(self, kind: bytes, frames: Sequence[Any]) -> None:
        """Send one frame group: see :meth:`Sender.send`."""
        self._sender.send(kind, frames)
        self._sent += kind in (PLACED, SAMPLES)

    def for_program(self) -> dict[str, int]:
        """Return the descriptors, by name, with which a program sends metrics and its activity as this rank's."""
        wire = self._wire
        return {"wire": wire.rank_socket.fileno(), "lock": wire.lock_file, "page": wire.page_file}

    def note_program(self) -> None:
        """Record that a program may have sent something."""
        self._sent += 1

    def close_if_damaged(self) -> bool:
        """Close the socket, so that the nanny ends this rank, if a cell has closed descriptors of this end."""
        is_damaged = any(file_of(end) != file for end, file in self._files.items())
        if is_damaged:
            self._wire.rank_socket.close()
        return is_damaged

    def send_identity(self, identity: dict[str, Any]) -> None:
        """Send what the nanny has to know of the rank, or a part of it."""
        self.send(IDENTITY, [json.dumps(identity).encode()])

    def _position(self) -> tuple[int, int]:
        """Return the point in the output that the nanny has reached."""
        return self._sent, SEEN.unpack_from(self._wire.page)[0]

    def _is_all_handled(self) -> bool:
        # The nanny raises its flag before it reads.
        is_all_read = not (_unread(self._wire.stdout_read) or _unread(self._wire.stderr_read))
        return is_all_read and not self._wire.page[BUSY]

    def begin_cell(self, header: bytes) -> None:
        """Have the nanny handle the output so far, and attribute what follows to the cell of this header."""
        _wait_until(self._is_all_handled)
        self._mark = self._position()
        self._wire.page[INTERRUPTED] = self._wire.page[PENDING] = 0
        self.send(CELL_BEGIN, [header])

    @property
    def is_silent(self) -> bool:
        """Whether there was no output since the cell began."""
        return self._is_all_handled() and self._position() == self._mark  # in this order: it counts after reading

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Mark for the duration of the block that a request is being served."""
        self._count_use()
        try:
            yield
        finally:
            self._count_use()

    def _count_use(self) -> None:
        USES.pack_into(self._wire.page, USES_AT, USES.unpack_from(self._wire.page, USES_AT)[0] + 1)

    @property
    def was_interrupted(self) -> bool:
        """Whether the nanny has interrupted the cell, even if the cell caught the interrupt."""
        return bool(self._wire.page[INTERRUPTED])

    def note_interrupt(self) -> None:
        """Record that Python handles the last interrupt."""
        self._wire.page[PENDING] = 0

    def beat(self, beat: RankVitals) -> None:
        """Write the rank's heartbeat and activity to the shared page; one thread of the rank calls this."""
        status_page.write(self._wire.page, beat)


def _unread(pipe_end: int) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(pipe_end, termios.FIONREAD, count)
    return count[0]


class NannyEnd:
    """The nanny's end: split the received bytes into frame groups."""

    def __init__(self, wire: Wire) -> None:
        self.socket = wire.nanny_socket
        self.socket.setblocking(False)
        self._page = wire.page
        self._data = bytearray()

    def receive(self) -> list[tuple[bytes, bytes, list[bytes]]] | None:
        """Return the frame groups that have arrived whole, or None when the rank has closed its end."""
        is_closed = True
        try:
            while chunk := self.socket.recv(1 << 20):
                self._data += chunk
        except BlockingIOError:
            is_closed = False
        except ConnectionResetError:
            pass  # closed as well
        groups = self._take()
        return None if is_closed and not groups else groups

    def give_back(self, token: bytes) -> None:
        """Return the token, so that the rank continues."""
        try:
            self.socket.send(token)
        except (BlockingIOError, BrokenPipeError):
            return  # the rank is dead, or stopped reading long ago

    def _take(self) -> list[tuple[bytes, bytes, list[bytes]]]:
        groups = []
        while len(self._data) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                break
            groups.append(marshal.loads(self._data[LENGTH.size : end]))  # noqa: S302  (makes bytes, runs no code)
            del self._data[:end]
        return groups

    def status(self) -> RankVitals | None:
        """Return the rank's last heartbeat and activity."""
        return status_page.read(self._page)

    def uses(self) -> int:
        """Return how many beginnings and ends of requests the rank has counted; odd while it serves one."""
        return int(USES.unpack_from(self._page, USES_AT)[0])

    def set_busy(self, busy: bool) -> None:
        """Mark that output is being handled."""
        self._page[BUSY] = int(busy)

    def set_interrupted(self, interrupted: bool) -> None:
        """Mark whether the cell was interrupted."""
        self._page[INTERRUPTED] = int(interrupted)

    def set_pending(self) -> None:
        """Mark that an interrupt is sent."""
        self._page[PENDING] = 1

    @property
    def is_pending(self) -> bool:
        """Whether Python has not handled the last interrupt, and no cell has begun since."""
        return bool(self._page[PENDING])

    def count(self, size: int) -> None:
        """Count bytes that were read."""
        SEEN.pack_into(self._page, 0, SEEN.unpack_from(self._page)[0] + size)


def read_all(pipe: int) -> list[bytes]:
    """Return what a pipe holds, at most 16 MiB, so that a rank that prints without end does not block all else."""
    chunks: list[bytes] = []
    with suppress(BlockingIOError):
        while len(chunks) < MOST_CHUNKS and (chunk := os.read(pipe, 1 << 20)):
            chunks.append(chunk)
    return chunks
