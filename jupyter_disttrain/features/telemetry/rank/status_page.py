"""Share a rank's heartbeat and activity with its nanny, in shared memory.

Covers: the layout, writing on the rank, reading on the nanny.
Does not cover: sampling the activity (``sampler``), publishing it (``process_stats``).

No message and no lock: a rank whose code holds the GIL can't reply, but its last heartbeat can be read, and its age
shows that the rank does not respond.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import mmap

AT = 256  # offset on the shared page
CALL_BYTES = 64
NO_CELL = -1
_SEQUENCE = struct.Struct("=Q")  # odd during a write
_FIELDS = struct.Struct(f"=dqqqQQQddQQQQd{CALL_BYTES}s")
_FIELDS_AT = AT + _SEQUENCE.size
_TRIES = 3


class RankStatus(NamedTuple):
    """One heartbeat of a rank; counts and seconds are totals since the rank started."""

    beat_s: float = 0.0  # of ``time.monotonic``, which processes of one host share
    cell: int = NO_CELL  # the number of the current cell
    execution_count: int = 0  # execution count of that cell
    line: int = 0  # the cell's current line; 0 where it is unknown
    steps: int = 0  # optimizer steps
    samples: int = 0  # samples from DataLoaders
    checks: int = 0  # checks of the main thread while a cell ran
    data_wait_s: float = 0.0  # seconds waiting for batches of a DataLoader
    waits_since_s: float = 0.0  # ``time.monotonic`` at the start of the current wait for other ranks; 0 without one
    waits: int = 0  # checks that found it waiting for other ranks
    seen: int = 0  # checks with a result, waiting or not; a check between two of these counts as the later one
    done: int = 0  # iterations of the current loop, where their total is known
    total: int = 0
    left_s: float = math.nan  # of that loop, at the speed so far
    call: bytes = b""  # the collective that it waits in

    @property
    def loop(self) -> tuple[int, int, int] | None:
        """What changes as the loop of a cell advances; None without a loop."""
        return (self.cell, self.done, self.total) if self.total else None


def write(page: mmap.mmap, status: RankStatus) -> None:
    """Write a heartbeat; only one thread of the rank may write."""
    figures = _FIELDS.pack(*status)
    (sequence,) = _SEQUENCE.unpack_from(page, AT)
    _SEQUENCE.pack_into(page, AT, sequence | 1)
    page[_FIELDS_AT : _FIELDS_AT + len(figures)] = figures  # in one step: no reader can run meanwhile
    _SEQUENCE.pack_into(page, AT, (sequence | 1) + 1)


def read(page: mmap.mmap) -> RankStatus | None:
    """Return the last heartbeat; None before the first, or if the rank stopped during a write."""
    for _ in range(_TRIES):
        (before,) = _SEQUENCE.unpack_from(page, AT)
        status = RankStatus(*_FIELDS.unpack_from(page, _FIELDS_AT))
        (after,) = _SEQUENCE.unpack_from(page, AT)
        if before == after and not before % 2:
            return status._replace(call=status.call.rstrip(b"\0")) if before else None
    return None
