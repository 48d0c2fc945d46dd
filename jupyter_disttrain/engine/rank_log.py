"""The log of one rank: everything it said, on disk.

Covers: opening it late, writing, a full disk.
Does not cover: what is shown (``notebook.screen``), removing old logs (``cluster.folders``).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_EARLY_LIMIT = 1 << 20  # bytes kept while the rank does not know its log yet


class RankLog:
    """Append to the log; a disk that refuses is reported once and never stops the rank."""

    def __init__(self, report: Callable[[str, OSError], None]) -> None:
        self._report = report
        self._path: str | None = None
        self._descriptor: int | None = None
        self._early = bytearray()
        self._failed = False

    @property
    def path(self) -> str:
        """Where the log is, or will be."""
        return self._path or ""

    def place(self, path: str) -> None:
        """Say where the log goes; what was said before follows now."""
        self._path = path
        early, self._early = bytes(self._early), bytearray()
        self.write(early)

    def write(self, data: bytes) -> None:
        """Append."""
        if not data or self._failed:
            return
        if self._path is None:
            self._early = (self._early + data)[-_EARLY_LIMIT:]
            return
        try:
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                self._descriptor = os.open(self._path, flags, 0o600)
            view = memoryview(data)
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            self._failed = True
            self._report(self._path, error)

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
