"""Write the metrics of one rank to a file beside its log.

Covers: one JSON line per call of ``log_metrics``, a size limit, a full disk.
Does not cover: reading the file (``features.telemetry.metrics_table``).

The nanny writes the file, so metrics are kept while no client is attached and after the rank exits.
"""

from __future__ import annotations

import errno
import json
import math
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ....protocol.metric_blocks import Samples

LIMIT_BYTES = 512 << 20


class MetricsFile:
    """Append to the file; an error of the disk is reported once and does not stop the rank."""

    def __init__(self, report: Callable[[str, OSError], None]) -> None:
        self._report = report
        self._path = ""
        self._descriptor: int | None = None
        self._room = LIMIT_BYTES

    def place(self, log_path: str) -> None:
        """Set the file's path from that of the rank's log."""
        self._path = log_path.removesuffix(".log") + ".metrics.jsonl"

    def write(self, samples: Samples) -> None:
        """Append the samples of one message."""
        if not self._path or self._room <= 0:
            return
        records = (
            {"time_s": time_s, "cell": samples.cell, "step": step, "values": _plain(values)}
            for time_s, step, values in samples.rows()
        )
        lines = b"".join(json.dumps(record).encode() + b"\n" for record in records)
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                size = os.fstat(self._descriptor).st_size
                self._room -= size
                lines = b"\n" * bool(size) + lines  # an earlier process may have been killed within a line
            self._room -= len(lines)
            while lines:
                lines = lines[os.write(self._descriptor, lines) :]
        except OSError as error:
            self._room = 0
            self._report(self._path, error)
            return
        if self._room <= 0:
            self._report(self._path, OSError(errno.EFBIG, f"it has reached {LIMIT_BYTES >> 20} MiB"))

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _plain(values: Mapping[str, float]) -> dict[str, float | str]:
    """Return values with NaN and infinity as text, because JSON has neither."""
    return {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
