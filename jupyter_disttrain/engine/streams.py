"""A rank's ``sys.stdout`` and ``sys.stderr``.

Covers: text to file descriptors 1 and 2, whole lines at a time.
Does not cover: what happens to it afterwards (``nanny``).
"""

from __future__ import annotations

import io
import os
import threading
from typing import Any

# A line up to PIPE_BUF bytes is written in one piece, whoever else writes to the same pipe.
_LIMIT = 4096
_FLUSH_SECONDS = 0.05


class RankStream(io.TextIOBase):
    """Line-buffered text over a file descriptor.

    A script's stream, so that everything which works in a script works here: ``fileno()``, ``buffer``, child processes
    that inherit it. Unlike a script's it also sends an unfinished line by itself, a moment later, so that
    ``print("working", end="")`` is seen.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self.name = f"<{name}>"
        self.mode = "w"
        self._lock = threading.RLock()
        self._pending: list[str] = []
        self._pending_size = 0
        self._waker: threading.Event | None = None
        self.buffer = _Bytes(self)
        os.register_at_fork(after_in_child=self._after_fork)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """UTF-8, whatever the locale: the other end reads no other."""
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        """What can't be encoded is shown escaped; a print never fails for it."""
        return "backslashreplace"

    def _after_fork(self) -> None:
        # A child has neither the threads nor the right to the parent's unfinished line.
        self._lock = threading.RLock()
        self._pending, self._pending_size, self._waker = [], 0, None

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._descriptor

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Return False: nobody answers on this stream."""
        return False

    def write(self, text: str) -> int:
        """Write text; a line leaves when it is finished."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        with self._lock:
            self._pending.append(text)
            self._pending_size += len(text)
            if "\n" in text or "\r" in text or self._pending_size >= _LIMIT:
                self.flush()
            elif self._waker is None:
                self._start_flusher()
            else:
                self._waker.set()
        return len(text)

    def flush(self) -> None:
        """Send what is unfinished too."""
        with self._lock:
            if self._pending:
                data = "".join(self._pending).encode("utf-8", "backslashreplace")
                self._pending.clear()
                self._pending_size = 0
                self.write_bytes(data)

    def write_bytes(self, data: Any) -> None:
        """Write to the file descriptor, all of it."""
        view = memoryview(data).cast("B")
        with self._lock:
            while view:
                view = view[os.write(self._descriptor, view) :]

    def _start_flusher(self) -> None:
        self._waker = threading.Event()
        self._waker.set()
        threading.Thread(target=self._flush_later, args=(self._waker,), name=f"flush {self.name}", daemon=True).start()

    def _flush_later(self, waker: threading.Event) -> None:
        pause = threading.Event()
        while self._waker is waker:
            waker.wait()
            waker.clear()
            pause.wait(_FLUSH_SECONDS)
            self.flush()


class _Bytes(io.RawIOBase):
    """The stream's ``buffer``: bytes, after the text that came before them."""

    def __init__(self, stream: RankStream) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, data: Any) -> int:  # type: ignore[override]
        self._stream.flush()
        self._stream.write_bytes(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        if not self.closed:
            self._stream.flush()
