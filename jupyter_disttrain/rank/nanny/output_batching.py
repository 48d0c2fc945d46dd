"""Batch a rank's stdout and stderr into iopub stream messages.

Covers: decoding bytes, few messages for many lines, the limit per cell, the log.
Does not cover: reading the pipes (``nanny``), showing the output (``notebook.output.renderer``).

The first bytes after a pause are sent at once; those that follow within ``GATHER_SECONDS`` are sent together. So a
single line is shown without delay, and ten thousand lines take a handful of messages.
"""

from __future__ import annotations

import codecs
import time
from typing import TYPE_CHECKING, Any

from ...protocol.messages import OutputElided
from ...protocol.time_limits import GATHER_SECONDS
from .stderr_filter import without_noise

if TYPE_CHECKING:
    from collections.abc import Callable

    from .log_file import RankLog

CELL_LIMIT = 32 << 20  # bytes sent per rank and cell; the rest is only in the log
TAIL_CHARACTERS = 4000
LATE_STREAMS = 32  # streams of earlier cells whose limits are kept


class _Stream:
    """One of a rank's two streams."""

    def __init__(self, name: str, cell: dict[str, Any] | None = None) -> None:
        self.name = name
        self.cell = cell  # an earlier cell; None: the current one
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.begin_cell()

    def begin_cell(self) -> None:
        self.sent_bytes = self.elided_lines = self.elided_bytes = 0
        self.tail = ""
        self.in_line = False  # the last line sent is unfinished

    def admit(self, data: bytes) -> str:
        """Return the part of ``data`` that is within the cell's limit, and count the rest."""
        room = max(0, CELL_LIMIT - self.sent_bytes)
        end = len(data)
        if end > room:
            end = data.rfind(b"\n", 0, room) + 1  # no line is cut, unless it is endless
            if end == 0 and self.in_line and self.sent_bytes < 2 * CELL_LIMIT:
                end = data.find(b"\n") + 1 or len(data)
        sent, rest = self.decoder.decode(data[:end]), data[end:]
        self.sent_bytes += end
        if end:
            self.in_line = data[end - 1] != ord("\n")
        if not rest:
            return sent
        self.sent_bytes = max(self.sent_bytes, CELL_LIMIT)
        self.elided_bytes += len(rest)
        self.elided_lines += rest.count(b"\n")
        self.tail = (self.tail + self.decoder.decode(rest))[-TAIL_CHARACTERS:]
        return sent


class OutputBatcher:
    """Batch a rank's output and publish it under the cell that printed it."""

    def __init__(self, publish: Callable[[str, dict[str, Any], dict[str, Any]], None], log: RankLog) -> None:
        self._publish = publish
        self._log = log
        self._streams = {name: _Stream(name) for name in ("stdout", "stderr")}
        self._late: dict[tuple[str, str], _Stream] = {}  # streams of earlier cells, by request and name
        self._gathered: list[tuple[_Stream, list[str]]] = []  # in printed order
        self._last_time = 0.0
        self.cell: dict[str, Any] = {}  # the header of the current or last request
        self.due: float | None = None  # when the batch has to be sent

    def begin_cell(self, header: dict[str, Any]) -> None:
        """Attribute output from now on to this request."""
        self.flush(end_of_cell=True)
        self.cell = header
        for stream in self._streams.values():
            stream.begin_cell()

    def add(self, name: str, data: bytes) -> None:
        """Log and batch bytes of one stream."""
        self._log.write(data, name)
        stream = self._streams[name]
        self._gather(stream, stream.admit(without_noise(data) if name == "stderr" else data))

    def add_late(self, cell: dict[str, Any], name: str, data: bytes) -> None:
        """Log and batch bytes that a thread or a task of an earlier cell has written."""
        self._log.write(data, name)
        key = cell["msg_id"], name
        stream = self._late.pop(key, None) or _Stream(name, cell)
        self._late[key] = stream  # moved to the end: the oldest is first
        if len(self._late) > LATE_STREAMS:
            del self._late[next(iter(self._late))]
        self._gather(stream, stream.admit(data))

    def _gather(self, stream: _Stream, text: str) -> None:
        if not text:
            return
        if self._gathered and self._gathered[-1][0] is stream:
            self._gathered[-1][1].append(text)
        else:
            self._gathered.append((stream, [text]))
        if self.due is None:
            self.due = max(time.monotonic(), self._last_time + GATHER_SECONDS)

    def publish_due(self) -> None:
        """Send the batch if it is due."""
        if self.due is not None and time.monotonic() >= self.due:
            self.flush()

    def flush(self, *, end_of_cell: bool = False) -> None:
        """Send the batch; at the end of a cell, also report what the limit left out."""
        if end_of_cell:
            for stream in self._streams.values():
                self._gather(stream, stream.decoder.decode(b"", final=True))  # an incomplete character
        self.due = None
        for stream, parts in self._gathered:
            self._last_time = time.monotonic()
            self._publish("stream", {"name": stream.name, "text": "".join(parts)}, stream.cell or self.cell)
        self._gathered.clear()
        if end_of_cell:
            for stream in (*self._streams.values(), *self._late.values()):
                if stream.elided_bytes:
                    self._publish_elided(stream)

    def _publish_elided(self, stream: _Stream) -> None:
        tail = stream.tail.split("\n", 1)[-1] if len(stream.tail) >= TAIL_CHARACTERS else stream.tail
        record = OutputElided(
            stream=stream.name,
            lines=stream.elided_lines,
            size_bytes=stream.elided_bytes,
            tail=tail,
            log_path=self._log.path,
        )
        self._publish(record.msg_type, record.to_content(), stream.cell or self.cell)
        stream.elided_lines = stream.elided_bytes = 0
        stream.tail = ""
