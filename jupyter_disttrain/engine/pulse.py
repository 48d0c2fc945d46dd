"""What a rank shows its nanny of itself, in shared memory.

Covers: the layout, writing on the rank, reading on the nanny.
Does not cover: taking the figures (``sampler``), publishing them (``vitals``).

No message and no lock: a rank whose code holds Python's lock can't be asked, but its last beat can be read, and how old
it is tells that it does not respond.
"""

from __future__ import annotations

import math
import struct
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mmap

AT = 256  # on the shared page
CALL_BYTES = 64
NO_CELL = -1
_SEQUENCE = struct.Struct("=Q")  # odd while the rest is being written
_FIELDS = struct.Struct(f"=dqqqqQQQddQQdQ{CALL_BYTES}s")
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Pulse:
    """One beat of a rank; counts and seconds are totals since the rank started."""

    beat_s: float = 0.0  # of ``time.monotonic``, which processes of one host share
    cell: int = NO_CELL  # the number of the cell that runs
    execution_count: int = 0  # of that cell
    line: int = 0  # of that cell, that runs; 0 where it is unknown
    steps: int = 0  # of optimizers
    samples: int = 0  # that DataLoaders gave out
    looks: int = 0  # at what the main thread does, while a cell ran
    waits: int = 0  # those of them that found it waiting for other ranks
    data_wait_s: float = 0.0  # for batches of a DataLoader
    waits_since_s: float = 0.0  # of ``time.monotonic``: when the present wait for other ranks began; 0 without one
    done: int = 0  # rounds of the loop that runs, where it knows how many there will be
    total: int = 0
    left_s: float = math.nan  # of that loop, if it goes on as it went so far
    seen: int = 0  # of the looks, that told whether it waits; those between count as the next of these
    call: bytes = b""  # the collective that it waits in


def write(page: mmap.mmap, pulse: Pulse) -> None:
    """Write a beat; only one thread of the rank may."""
    figures = _FIELDS.pack(*astuple(pulse))
    (sequence,) = _SEQUENCE.unpack_from(page, AT)
    _SEQUENCE.pack_into(page, AT, sequence | 1)
    page[AT + _SEQUENCE.size : AT + _SEQUENCE.size + _FIELDS.size] = figures  # at once: nobody can read meanwhile
    _SEQUENCE.pack_into(page, AT, (sequence | 1) + 1)


def read(page: mmap.mmap) -> Pulse | None:
    """Return the last beat; None before the first, or if the rank stopped in the midst of writing one."""
    for _ in range(_TRIES):
        (before,) = _SEQUENCE.unpack_from(page, AT)
        figures = list(_FIELDS.unpack_from(page, AT + _SEQUENCE.size))
        (after,) = _SEQUENCE.unpack_from(page, AT)
        if before == after and not before % 2:
            figures[-1] = figures[-1].rstrip(b"\0")
            return Pulse(*figures) if before else None
    return None
