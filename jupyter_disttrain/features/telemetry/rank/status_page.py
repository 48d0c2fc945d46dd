"""Share a rank's heartbeat and activity with its nanny, in shared memory.

Covers: writing on the rank, reading on the nanny.
Does not cover: sampling the activity (``sampler``), publishing it (``process_stats``).

No message and no lock: a rank whose code holds the GIL can't reply, but its last heartbeat can be read, and its age
shows that the rank does not respond.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

from ....protocol.messages import RankVitals

if TYPE_CHECKING:
    import mmap

AT = 256  # offset on the shared page
_HEAD = struct.Struct("=QQ")  # a number that is odd during a write; the length of the JSON that follows
_TRIES = 3


def write(page: mmap.mmap, vitals: RankVitals) -> None:
    """Write a heartbeat; only one thread of the rank may write."""
    data = json.dumps(vitals.to_content()).encode()
    writing = _HEAD.unpack_from(page, AT)[0] | 1
    _HEAD.pack_into(page, AT, writing, 0)
    page[AT + _HEAD.size : AT + _HEAD.size + len(data)] = data
    _HEAD.pack_into(page, AT, writing + 1, len(data))


def read(page: mmap.mmap) -> RankVitals | None:
    """Return the last heartbeat; None before the first, or if the rank stopped during a write.

    Also None if two processes have written at once, as the rank and its program can when the program begins.
    """
    for _ in range(_TRIES):
        head = _HEAD.unpack_from(page, AT)
        data = page[AT + _HEAD.size : AT + _HEAD.size + head[1]]
        if data and _HEAD.unpack_from(page, AT) == head:
            try:
                return RankVitals.from_content(json.loads(data))
            except ValueError:
                return None
    return None
