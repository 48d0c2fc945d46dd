"""Share a rank's heartbeat and activity with its nanny, in shared memory.

Covers: the layout, writing on the rank, reading on the nanny.
Does not cover: sampling the activity (``sampler``), publishing it (``process_stats``).

No message and no lock: a rank whose code holds the GIL can't reply, but its last heartbeat can be read, and its age
shows that the rank does not respond.
"""

from __future__ import annotations

import math
import struct
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import mmap

AT = 256  # offset on the shared page
LOOP_AT = 512  # offset on the shared page: progress, which changes as often as a bar is drawn
CALL_BYTES = 64
NO_CELL = -1
_SEQUENCE = struct.Struct("=Q")  # odd during a write
_FIELDS = struct.Struct(f"=dqqqqQQQddQ{CALL_BYTES}s")
_LOOP = struct.Struct("=qqQQd")
_TRIES = 3


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One heartbeat of a rank; counts and seconds are totals since the rank started."""

    beat_s: float = 0.0  # of ``time.monotonic``, which processes of one host share
    cell: int = NO_CELL  # the number of the current cell
    execution_count: int = 0  # execution count of that cell
    line: int = 0  # the cell's current line; 0 where it is unknown
    steps: int = 0  # optimizer steps
    samples: int = 0  # samples from DataLoaders
    checks: int = 0  # checks of the main thread while a cell ran
    waits: int = 0  # checks that found it waiting for other ranks
    data_wait_s: float = 0.0  # seconds waiting for batches of a DataLoader
    waits_since_s: float = 0.0  # ``time.monotonic`` at the start of the current wait for other ranks; 0 without one
    seen: int = 0  # checks with a result, waiting or not; a check between two of these counts as the later one
    call: bytes = b""  # the collective that it waits in


class LoopStatus(NamedTuple):
    """Progress of the loop of a cell."""

    cell: int = NO_CELL
    execution_count: int = 0
    done: int = 0  # iterations, where their total is known
    total: int = 0
    left_s: float = math.nan  # at the speed so far


def write(page: mmap.mmap, status: RankStatus) -> None:
    """Write a heartbeat; only one thread of the rank may write at a time."""
    _write(page, AT, _FIELDS.pack(*astuple(status)))


def write_loop(page: mmap.mmap, loop: LoopStatus) -> None:
    """Write the loop's progress; only one thread of the rank may write at a time."""
    _write(page, LOOP_AT, _LOOP.pack(*loop))


def read(page: mmap.mmap) -> RankStatus | None:
    """Return the last heartbeat; None before the first, or if the rank stopped during a write."""
    figures = _read(page, AT, _FIELDS)
    if figures is None:
        return None
    found = list(figures)
    found[-1] = found[-1].rstrip(b"\0")
    return RankStatus(*found)


def read_loop(page: mmap.mmap) -> LoopStatus | None:
    """Return the loop's progress; None in the cases of :func:`read`."""
    figures = _read(page, LOOP_AT, _LOOP)
    return None if figures is None else LoopStatus(*figures)


def _write(page: mmap.mmap, at: int, figures: bytes) -> None:
    (sequence,) = _SEQUENCE.unpack_from(page, at)
    _SEQUENCE.pack_into(page, at, sequence | 1)
    page[at + _SEQUENCE.size : at + _SEQUENCE.size + len(figures)] = figures  # in one step: no reader can run meanwhile
    _SEQUENCE.pack_into(page, at, (sequence | 1) + 1)


def _read(page: mmap.mmap, at: int, layout: struct.Struct) -> tuple[Any, ...] | None:
    for _ in range(_TRIES):
        (before,) = _SEQUENCE.unpack_from(page, at)
        figures = layout.unpack_from(page, at + _SEQUENCE.size)
        (after,) = _SEQUENCE.unpack_from(page, at)
        if before == after and not before % 2:
            return figures if before else None
    return None
