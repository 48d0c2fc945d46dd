"""What connects a rank to its nanny: two pipes, a socket and a shared page.

Covers: making them before the fork, each side's end, the framing on the socket.
Does not cover: what is said (``voice``, ``publisher``, ``nanny``).

The rank's file descriptors 1 and 2 are the pipes, so that Python, C code and child processes all speak on the same way,
in order, as they would under a shell. The nanny reads them in a process of its own: neither a rank that holds the GIL
nor one that died can lose a line, and no thread of the rank ever handles its output.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import resource
import socket
import struct
import tempfile
import termios
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import pulse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CELLS_DESCRIPTORS = 64  # lower numbers are for cells, as far as the rank itself opens files before the first
LEAST_LIMIT = 512  # of open files, for that
PIPE_SIZE = 1 << 20  # bytes; Linux' default of 64 KiB wakes the nanny once per 64 KiB
HEADER = struct.Struct("!c8sII")  # kind, token, number of frames, bytes of all frames with their lengths
TOKEN_SIZE = 8
LENGTH = struct.Struct("!I")
SEEN = struct.Struct("=Q")  # on the shared page, at 0: bytes that the nanny has read
BUSY = 8  # on the shared page: 1 while the nanny handles output
IN_USE = 9  # on the shared page: 1 while the rank serves a request
INTERRUPTED = 10  # on the shared page: 1 once the nanny has interrupted the cell
USES = struct.Struct("=Q")  # on the shared page, at 16: requests that the rank has served
USES_AT = 16
ATOMIC_BYTES = 16384  # Linux puts so much on a socket at once: all or, when a signal comes, nothing
END_SECONDS = 5.0  # for the kernel to end a process whose nanny has died
PATIENCE_SECONDS = 0.2  # to wait for the nanny, so that what comes next can't overtake; it may be busy with a flood

# The kinds of frame groups a rank sends.
FORWARD = b"F"  # a signed message for the client; its place among what is said does not matter
PLACED = b"P"  # the same, to be published after what was said before it and before what is said after it
CELL_BEGIN = b"B"  # a cell's header: what is said from now on belongs to it
CELL_END = b"E"  # a signed message that ends the cell
SAMPLES = b"M"  # what ``log_metrics`` was given; for the file and the client
LATE = b"L"  # text of a thread or task of an earlier cell: that cell's header, the stream, the text
LOGGED = b"T"  # text for the log alone: what a display shows
IDENTITY = b"I"  # JSON: who this rank is, where its log goes


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Both ends; made before the fork, then each side closes the other's."""

    stdout_read: int
    stdout_write: int
    stderr_read: int
    stderr_write: int
    rank_socket: socket.socket
    nanny_socket: socket.socket
    page: mmap.mmap
    stack_file: int  # an anonymous file: where Python says on request, without its lock, where it is
    crash_file: int  # an anonymous file: Python's report of a crash in C code, which the nanny reads afterwards
    lock_file: int  # an anonymous file: its lock keeps a rank's child processes from tearing a message

    @classmethod
    def make(cls) -> Wire:
        """Make the pipes, the sockets and the page."""
        stdout_read, stdout_write = os.pipe()
        stderr_read, stderr_write = os.pipe()
        for end in (stdout_write, stderr_write):
            _enlarge(end)
        rank_socket, nanny_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(
            stdout_read=stdout_read,
            stdout_write=stdout_write,
            stderr_read=stderr_read,
            stderr_write=stderr_write,
            rank_socket=rank_socket,
            nanny_socket=nanny_socket,
            page=mmap.mmap(-1, mmap.PAGESIZE),
            stack_file=_anonymous_file(),
            crash_file=_anonymous_file(),
            lock_file=_anonymous_file(),
        )

    def become_nanny(self) -> None:
        """Keep the nanny's ends only."""
        os.close(self.stdout_write)
        os.close(self.stderr_write)
        self.rank_socket.close()
        for end in (self.stdout_read, self.stderr_read):
            os.set_blocking(end, False)

    def become_rank(self) -> Wire:
        """Keep the rank's ends, and make them file descriptors 1 and 2; nothing can be read from 0.

        The reading ends stay open too: asking them how much is unread costs no system call to the nanny. So do the
        writing ends, to restore 1 and 2 where a cell closes them. All are moved past the numbers that cells use.
        """
        self.nanny_socket.close()
        restore_input()
        os.dup2(self.stdout_write, 1)
        os.dup2(self.stderr_write, 2)
        names = ("stdout_read", "stdout_write", "stderr_read", "stderr_write", "stack_file", "crash_file", "lock_file")
        moved: dict[str, Any] = {name: _move(getattr(self, name)) for name in names}
        return replace(self, rank_socket=socket.socket(fileno=_move(self.rank_socket.detach())), **moved)

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


def _move(descriptor: int) -> int:
    """Give a file descriptor another number, past those that cells use."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, CELLS_DESCRIPTORS)
    os.close(descriptor)
    return moved


def reserve_descriptors() -> list[int]:
    """Take the low numbers, so that what is opened from now on has others; to be closed before the first cell.

    Programs that become daemons close all descriptors that they may have inherited; the rank's own are not among them.
    """
    taken: list[int] = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_LIMIT:
        return taken
    while not taken or taken[-1] < CELLS_DESCRIPTORS - 1:
        taken.append(os.open(os.devnull, os.O_RDONLY))
    return taken


def _wait_until(condition: Callable[[], bool]) -> None:
    """Wait a little for the nanny; a busy one costs order, never a hang."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.00002)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("disttrain-wire")
    # Pythons that are built for old systems, such as conda's and uv's, have no memfd_create.
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _enlarge(pipe_end: int) -> None:
    try:
        fcntl.fcntl(pipe_end, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
    except PermissionError:
        return  # the user's share of pipe memory is spent; the default size only costs speed


class RankEnd:
    """The rank's end: sends frame groups, and tells whether anything was said."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._lock = threading.Lock()
        self._sent = 0
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()  # a thread that the child does not have may have held it

    def send(self, kind: bytes, frames: Sequence[Any]) -> None:
        """Send one frame group, whole, from any thread or forked child; what is said afterwards comes after it.

        An interrupt may end the call, but never leaves half a group on the socket: nobody could read what follows.
        """
        views = [memoryview(frame).cast("B") for frame in frames]
        parts: list[Any] = []
        for view in views:
            parts += (LENGTH.pack(view.nbytes), view)
        size = sum(view.nbytes + LENGTH.size for view in views)
        token = os.urandom(TOKEN_SIZE)
        parts.insert(0, HEADER.pack(kind, token, len(views), size))
        if HEADER.size + size <= ATOMIC_BYTES:
            self._exchange(kind, token, parts)
        else:
            # Signals' handlers, which may raise, run on the main thread alone.
            sender = threading.Thread(target=self._exchange, args=(kind, token, parts), name="disttrain send")
            sender.start()
            sender.join()

    def _exchange(self, kind: bytes, token: bytes, parts: list[Any]) -> None:
        with self._lock:
            try:
                fcntl.lockf(self._wire.lock_file, fcntl.LOCK_EX)
                _send_all(self._wire.rank_socket, parts)
                if kind == PLACED:
                    # Until the nanny has read what was said before, nothing may be said after.
                    self._wait_for(token)
            except (BrokenPipeError, ConnectionResetError):
                # The nanny has died, and the kernel ends this process for that: nothing is to be said of it meanwhile.
                time.sleep(END_SECONDS)
                raise
            finally:
                fcntl.lockf(self._wire.lock_file, fcntl.LOCK_UN)
            self._sent += kind in (FORWARD, PLACED, SAMPLES)

    def _wait_for(self, token: bytes) -> None:
        """Wait until the nanny returns the token; those of sends that were interrupted here are passed over."""
        while True:
            returned = self._wire.rank_socket.recv(TOKEN_SIZE, socket.MSG_WAITALL)
            if returned in (token, b""):
                return

    @property
    def mark(self) -> tuple[int, int]:
        """A point in what was said so far, for :meth:`is_silent_since`."""
        return self._sent, SEEN.unpack_from(self._wire.page)[0]

    def begin_use(self) -> None:
        """Note that a request is being served."""
        self._wire.page[IN_USE] = 1

    def end_use(self) -> None:
        """Note that it was."""
        self._wire.page[IN_USE] = 0
        USES.pack_into(self._wire.page, USES_AT, USES.unpack_from(self._wire.page, USES_AT)[0] + 1)

    def begin_cell(self) -> None:
        """Forget that a cell was interrupted."""
        self._wire.page[INTERRUPTED] = 0

    def wait_heard(self) -> None:
        """Wait until the nanny has handled what was said so far."""
        _wait_until(lambda: self._is_all_read() and not self._wire.page[BUSY])

    def _is_all_read(self) -> bool:
        return not (_unread(self._wire.stdout_read) or _unread(self._wire.stderr_read))

    @property
    def was_interrupted(self) -> bool:
        """Whether the nanny has interrupted the cell, whatever the cell has made of it."""
        return bool(self._wire.page[INTERRUPTED])

    def beat(self, beat: pulse.Pulse) -> None:
        """Show the nanny what the rank does; one thread of the rank calls this."""
        pulse.write(self._wire.page, beat)

    def is_silent_since(self, mark: tuple[int, int]) -> bool:
        """Whether nothing was said since ``mark``.

        The order of the questions matters: the nanny raises its flag before it reads, and counts after it.
        """
        return self._is_all_read() and not self._wire.page[BUSY] and self.mark == mark


def _unread(pipe_end: int) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(pipe_end, termios.FIONREAD, count)
    return count[0]


def _send_all(sock: socket.socket, parts: list[Any]) -> None:
    # sendmsg takes 1024 parts at most and may send a part of them.
    while parts:
        sent = sock.sendmsg(parts[:512])
        while parts and sent >= len(parts[0]):
            sent -= len(parts[0])
            parts.pop(0)
        if sent:
            parts[0] = memoryview(parts[0])[sent:]


class NannyEnd:
    """The nanny's end: takes frame groups apart."""

    def __init__(self, wire: Wire) -> None:
        self.socket = wire.nanny_socket
        self.socket.setblocking(False)
        self._page = wire.page
        self._data = bytearray()

    def receive(self) -> list[tuple[bytes, bytes, list[bytes]]] | None:
        """Return the frame groups that have arrived whole, or None when the rank is gone."""
        closed = False
        while True:
            try:
                chunk = self.socket.recv(1 << 20)
            except BlockingIOError:
                break
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                closed = True
                break
            self._data += chunk
        groups = self._take()
        return None if closed and not groups else groups

    def give_back(self, token: bytes) -> None:
        """Let the rank go on."""
        try:
            self.socket.send(token)
        except (BlockingIOError, BrokenPipeError):
            return  # it is dead, or stopped reading long ago

    def _take(self) -> list[tuple[bytes, bytes, list[bytes]]]:
        groups = []
        start = 0
        while len(self._data) - start >= HEADER.size:
            kind, token, count, size = HEADER.unpack_from(self._data, start)
            end = start + HEADER.size + size
            if len(self._data) < end:
                break
            at, frames = start + HEADER.size, []
            for _ in range(count):
                (length,) = LENGTH.unpack_from(self._data, at)
                at += LENGTH.size
                frames.append(bytes(self._data[at : at + length]))
                at += length
            groups.append((kind, token, frames))
            start = end
        del self._data[:start]
        return groups

    def pulse(self) -> pulse.Pulse | None:
        """Return what the rank showed last."""
        return pulse.read(self._page)

    def uses(self) -> tuple[bool, int]:
        """Whether the rank serves a request, and how many it has served."""
        return bool(self._page[IN_USE]), USES.unpack_from(self._page, USES_AT)[0]

    def set_busy(self, busy: bool) -> None:
        """Say that output is being handled."""
        self._page[BUSY] = int(busy)

    def set_interrupted(self, interrupted: bool) -> None:
        """Say whether the cell was interrupted."""
        self._page[INTERRUPTED] = int(interrupted)

    def count(self, size: int) -> None:
        """Count what was read."""
        SEEN.pack_into(self._page, 0, SEEN.unpack_from(self._page)[0] + size)


def read_all(pipe: int) -> list[bytes]:
    """Return what a pipe holds, or much of it: a rank that never stops talking must not keep us from all else."""
    chunks = []
    for _ in range(16):
        try:
            chunk = os.read(pipe, 1 << 20)
        except BlockingIOError:
            break
        if not chunk:
            break
        chunks.append(chunk)
    return chunks
