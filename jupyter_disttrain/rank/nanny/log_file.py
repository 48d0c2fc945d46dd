"""Write the log of one rank: all its output, on disk.

Covers: opening it late, writing, a full disk; beside it, a file with the positions where stderr starts and ends in it.
Does not cover: what is shown (``notebook.output.renderer``), removing old logs (``launchers.folders``).
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_EARLY_LIMIT = 1 << 20  # bytes kept until the log's path is set


class RankLog:
    """Append to the log; a failing disk is reported once and never stops the rank."""

    def __init__(self, report: Callable[[str, OSError], None]) -> None:
        self._report = report
        self.path = ""  # empty until it is set; the log itself may not exist yet
        self._descriptor: int | None = None
        self._early: deque[tuple[bytes, str]] = deque()  # written before the path is set
        self._early_bytes = 0
        self._stream = ""  # stream of the last piece written
        self._failed = False

    def place(self, path: str) -> None:
        """Set the path of the log; earlier output is written now."""
        self.path = path
        early, self._early = self._early, deque()
        for data, stream in early:
            self.write(data, stream)

    def write(self, data: bytes, stream: str) -> None:
        """Append output of ``"stdout"`` or ``"stderr"``."""
        if not data or self._failed:
            return
        if not self.path:
            self._early.append((data, stream))
            self._early_bytes += len(data)
            while self._early_bytes > _EARLY_LIMIT and len(self._early) > 1:
                self._early_bytes -= len(self._early.popleft()[0])
            return
        try:
            if self._descriptor is None:
                self._descriptor = _open(self.path)
                # The existing log of a rank that was replaced may end in either stream.
                self._stream = "" if os.fstat(self._descriptor).st_size else "stdout"
            if stream != self._stream:
                self._note_change(stream, os.fstat(self._descriptor).st_size)
            _write(self._descriptor, data)
        except OSError as error:
            self._failed = True
            self._report(self.path, error)

    def _note_change(self, stream: str, position: int) -> None:
        """Record that another stream starts at this position."""
        descriptor = _open(self.path.removesuffix(".log") + ".streams")
        try:
            _write(descriptor, f"{position} {stream}\n".encode())
        finally:
            os.close(descriptor)
        self._stream = stream

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _open(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
