"""Report that Open MPI lacks shared memory.

Covers: how much there is, and the remedy.
Does not cover: large values, which travel in messages where there is none (``protocol.shared_memory``).
"""

from __future__ import annotations

import shutil
import socket
from typing import TYPE_CHECKING

from ..protocol.shared_memory import ROOT

if TYPE_CHECKING:
    from ..config.cluster import ClusterConfig

LEAST_BYTES = 1 << 20  # with less, Open MPI's ranks on one machine don't start


def scarce_shared_memory(config: ClusterConfig) -> str:
    """Return why MPI's ranks may have failed to start; empty if this machine has enough shared memory."""
    if not config.has_mpi or config.hosts or not ROOT.is_dir():
        return ""
    there = shutil.disk_usage(ROOT)
    if there.free >= LEAST_BYTES:
        return ""
    return (
        f"Open MPI can't create its shared memory: {ROOT} on {socket.gethostname()} has {there.total / 1024:.0f} KiB, "
        f"of which {there.free / 1024:.0f} KiB are free, and it needs at least {LEAST_BYTES // 1024} KiB; free some, "
        "give the container more (docker run --shm-size=1g), or start without MPI: %dist_init --launcher local"
    )
