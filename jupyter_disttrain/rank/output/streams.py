"""Write a rank's ``sys.stdout`` and ``sys.stderr`` to file descriptors.

Covers: text to file descriptors 1 and 2, whole lines at a time, in order with each other and with C code.
Does not cover: making these pipes (``rank.nanny.ipc``), reading them (``rank.nanny.nanny``), streams that a cell closes
(``closed_streams``).

The two streams are two pipes, and a reader can't determine which of two pipes was written first. So before the stream
changes, the writer waits until the nanny has read the other stream: some 50 microseconds.
"""

from __future__ import annotations

import ctypes
import io
import os
import select
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..interrupts.deferral import outwards
from ..kernel.cell_threads import earlier_cell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from ..nanny.ipc import Wire

# A piece up to PIPE_BUF bytes is written atomically, even if others write to the same pipe.
_PIECE = 4096
_FLUSH_SECONDS = 0.05
_LINE_BUFFERED = 1  # C's _IOLBF
_libc = ctypes.CDLL(None)
_Place = tuple[int, int, int]


class Turns:
    """Order the output of the two streams; one lock for both."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.lock = threading.RLock()
        self._speaker: RankStream | None = None  # the stream that sent last
        self.send_late: Callable[[dict[str, Any], str, bytes], None] | None = None  # sends text to an earlier cell
        self.is_muted = False  # drops what is printed; what keeps a stream, such as a logger, can print on it later
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self.lock = threading.RLock()

    def take(self, stream: RankStream) -> None:
        """Let ``stream`` write, after the nanny has read the other stream's output."""
        before, self._speaker = self._speaker, stream
        if before is not None and before is not stream:
            self._wire.wait_read(before.fileno())


@dataclass(slots=True)
class _Unfinished:
    """Text without an end of line, of one thread."""

    cell: dict[str, Any] | None  # the header of the earlier cell that it belongs to; None: the current one
    parts: list[str]
    place: _Place | None = None  # the calling frame at the last write; None: C code called


class RankStream(io.TextIOBase):
    """Line-buffered text over a file descriptor.

    It behaves like a script's stream, so that everything which works in a script works here: ``fileno()``, ``buffer``,
    child processes that inherit it. Unlike a script's it also sends an unfinished line by itself, so that
    ``print("working", end="")`` is shown; and the output of one thread isn't interleaved with that of another.
    """

    line_buffering = True
    encoding = "utf-8"  # whatever the locale: the nanny decodes no other encoding
    errors = "backslashreplace"  # so that no print fails for what can't be encoded
    mode = "w"

    def __init__(self, descriptor: int, name: str, turns: Turns) -> None:
        self._descriptor = descriptor
        self.name = f"<{name}>"
        self._turns = turns
        self._open: dict[tuple[int, str], _Unfinished] = {}  # by thread and the request of an earlier cell
        self._waker: threading.Event | None = None
        self.buffer = _Bytes(self)
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        # A child has none of the parent's threads and must not print the parent's unfinished line.
        self._open, self._waker = {}, None

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._descriptor

    def close(self) -> None:
        """Send what was printed; the stream stays open, as later cells print on it too."""
        self.flush()

    def writable(self) -> bool:
        """Return True."""
        return True

    def reconfigure(self, **_options: Any) -> None:
        """Do nothing: lines are sent at once and every character can be written, which is what scripts ask for."""

    def write(self, text: str) -> int:
        """Write text; a line is sent when it is finished, and so is a call of ``print`` with an empty end."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if self._turns.is_muted:
            return len(text)
        # A call of print ends with an empty string, or with an end of line.
        end = len(text) if "\r" in text or not text else text.rfind("\n") + 1
        thread = threading.get_ident()
        with self._turns.lock:
            cell = earlier_cell()  # no other cell starts meanwhile
            key = thread, "" if cell is None else cell["msg_id"]
            unfinished = self._open.setdefault(key, _Unfinished(cell, []))
            if cell is not None and thread != threading.main_thread().ident:  # whose other text is of the current cell
                begun = self._open.pop((thread, ""), None)  # by a call of print during which the current cell started
                unfinished.parts += [] if begun is None else begun.parts
            unfinished.parts.append(text[:end])
            if end or not text:
                self._send(unfinished)  # and keep it: a signal's handler may print on this thread at any point
            if text[end:]:
                caller = sys._getframe().f_back  # noqa: SLF001
                unfinished.parts.append(text[end:])
                unfinished.place = None if caller is None else _place(caller)
                self._wake_flusher()
        return len(text)

    def flush(self) -> None:
        """Send this thread's unfinished line too, and those of threads that have ended."""
        with self._turns.lock:
            if self._open:
                others = sys._current_frames().keys() - {threading.get_ident()}  # noqa: SLF001
                for (thread, _), unfinished in list(self._open.items()):
                    if thread not in others:
                        self._send(unfinished)

    def _send(self, unfinished: _Unfinished) -> None:
        """Send a text once: a signal's handler may print meanwhile, and what can't be written is not tried again."""
        parts, unfinished.parts = unfinished.parts, []
        data = "".join(parts).encode("utf-8", self.errors)
        if data and unfinished.cell is not None:
            assert self._turns.send_late is not None  # set before the first cell
            self._turns.send_late(unfinished.cell, self.name[1:-1], data)
        elif data:
            self.write_bytes(data)

    def write_bytes(self, data: bytes) -> None:
        """Write to the file descriptor, all of it."""
        if self._turns.is_muted:
            return
        with self._turns.lock:
            self._turns.take(self)
            for piece in _pieces(data):
                view = memoryview(piece)
                while view:
                    try:
                        view = view[os.write(self._descriptor, view) :]
                    except BlockingIOError:
                        # A child process (ssh does it) has switched the shared pipe to non-blocking.
                        room = select.poll()  # the descriptor may be above 1023, which select() refuses
                        room.register(self._descriptor, select.POLLOUT)
                        room.poll()

    def _wake_flusher(self) -> None:
        if self._waker is None:
            self._waker = threading.Event()
            arguments = (self._waker,)
            threading.Thread(target=self._flush_later, args=arguments, name=f"flush {self.name}", daemon=True).start()
        if not self._waker.is_set():
            self._waker.set()

    def _flush_later(self, waker: threading.Event) -> None:
        pause = threading.Event()
        seen: dict[tuple[int, str], int] = {}
        try:
            while self._waker is waker:
                waker.wait()
                pause.wait(_FLUSH_SECONDS)
                with self._turns.lock:
                    self._send_idle(seen)
                    seen = {key: len(unfinished.parts) for key, unfinished in self._open.items()}
                    if not self._open:
                        waker.clear()
        finally:
            if self._waker is waker:
                self._waker = None  # it could not write, e.g. to a closed pipe: the next text starts another thread

    def _send_idle(self, seen: dict[tuple[int, str], int]) -> None:
        """Send and forget texts to which nothing was added since the last check, unless the call that wrote still runs.

        A busy machine can keep a thread from running for longer than the time between two checks, so having added
        nothing isn't enough: inside a ``print`` its frame stays at the same instruction.
        """
        frames = sys._current_frames()  # noqa: SLF001
        del frames[threading.get_ident()]  # this frame would hold itself, and with it all threads' frames, for long
        for key, unfinished in list(self._open.items()):
            if seen.get(key) != len(unfinished.parts):
                continue
            if unfinished.place not in [_place(frame) for frame in outwards(frames.get(key[0]))]:
                self._send(self._open.pop(key))


class _Bytes(io.RawIOBase):
    """The stream's ``buffer``: bytes, after the text that came before them."""

    def __init__(self, stream: RankStream) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, data: Any) -> int:
        self._stream.flush()
        written = bytes(data)
        self._stream.write_bytes(written)
        return len(written)

    def flush(self) -> None:
        if not self.closed:
            self._stream.flush()


def _place(frame: FrameType) -> _Place:
    """Return the frame's id and instruction, without holding the frame, which would hold the user's variables."""
    return id(frame), id(frame.f_code), frame.f_lasti


def _pieces(data: bytes) -> Iterator[bytes]:
    """Cut at ends of lines into pieces that are written atomically; only a longer line is not."""
    start = 0
    while len(data) - start > _PIECE:
        end = data.rfind(b"\n", start, start + _PIECE) + 1 or data.find(b"\n", start + _PIECE) + 1 or len(data)
        yield data[start:end]
        start = end
    yield data[start:]


def open_streams(turns: Turns) -> tuple[RankStream, RankStream]:
    """Make stdout and stderr, and make C code write whole lines at once too."""
    _libc.setvbuf(ctypes.c_void_p.in_dll(_libc, "stdout"), None, _LINE_BUFFERED, 0)
    return RankStream(1, "stdout", turns), RankStream(2, "stderr", turns)


def flush_all(*streams: Any) -> None:
    """Send what Python and C code have not sent yet; a cell may have put anything in place of a stream, None too."""
    for stream in streams:
        flush = getattr(stream, "flush", None)
        try:
            if callable(flush):
                flush()
        except Exception as error:  # noqa: BLE001  (the user's own code, and the cell has ended)
            assert sys.__stderr__ is not None
            sys.__stderr__.write(f"{type(stream).__name__}.flush() failed: {type(error).__name__}: {error}\n")
    _libc.fflush(None)
