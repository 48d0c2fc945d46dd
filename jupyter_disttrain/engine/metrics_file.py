"""The metrics of one rank on disk, beside its log.

Covers: one JSON line per call of ``log_metrics``, a limit, a full disk.
Does not cover: reading them (``cluster.metrics_files``).

The nanny writes, so they are kept while no notebook is there, and outlive the rank.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_BYTES = 512 << 20


class MetricsFile:
    """Append to the file; a disk that refuses is reported once and never stops the rank."""

    def __init__(self, pack: Callable[[Any], bytes], report: Callable[[str, OSError], None]) -> None:
        self._pack = pack
        self._report = report
        self._path = ""
        self._descriptor: int | None = None
        self._room = LIMIT_BYTES

    def place(self, log_path: str) -> None:
        """Say where the rank's log is."""
        self._path = log_path.removesuffix(".log") + ".metrics.jsonl"

    def write(self, content: dict[str, Any]) -> None:
        """Append the samples of one message."""
        if not self._path or self._room <= 0:
            return
        cell = content["cell"]
        lines = b"".join(
            self._pack({"time_s": time_s, "cell": cell, "step": step, "values": values}) + b"\n"
            for time_s, step, values in content["samples"]
        )
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                size = os.fstat(self._descriptor).st_size
                self._room -= size
                lines = b"\n" * bool(size) + lines  # an earlier process may have been cut off within a line
            view = memoryview(lines)
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            self._room = 0
            self._report(self._path, error)
            return
        self._room -= len(lines)
        if self._room <= 0:
            self._report(self._path, OSError(errno.EFBIG, f"it has reached {LIMIT_BYTES >> 20} MiB"))

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
