"""Report the memory use of ranks after a shortage.

Covers: ranks of this host; the GPUs of all ranks.
Does not cover: measuring GPUs (``features.telemetry.rank.gpu_stats``).
"""

from __future__ import annotations

import re
import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil

from ...rank_sessions import descendants

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ...protocol.messages import RankVitals
    from ...protocol.rank_death import RankDeath
    from ..startup.rank_table import RankEntry

_SHORTAGE = re.compile(
    r"can't allocate memory|cannot allocate memory|not enough memory|out of memory|bad_alloc", re.IGNORECASE
)
_SHORTAGE_OF_GPU = re.compile(r"(CUDA|HIP).*out of memory|NVML_SUCCESS == r INTERNAL ASSERT", re.IGNORECASE)


def after_failure(
    content: Mapping[str, Any], table: Sequence[RankEntry], vitals: Callable[[], Mapping[int, RankVitals]]
) -> str:
    """Return a text with the memory in use, if a failed cell's reply shows a shortage of a GPU's or the host's."""
    name, text = content.get("ename"), content.get("evalue", "")
    if name == "OutOfMemoryError" or _SHORTAGE_OF_GPU.search(text):
        return _held_on_gpus(vitals())
    if name != "MemoryError" and not _SHORTAGE.search(text):
        return ""
    return _held(table, programs={rank: usage.program for rank, usage in vitals().items()})


def after_death(death: RankDeath, table: Sequence[RankEntry]) -> str:
    """Return a text with the memory in use, if the kernel's out-of-memory killer most likely ended the process."""
    if death.signal_number != signal.SIGKILL or not death.out_of_memory_kills or death.expected:
        return ""
    return _held(table, {death.engine: death.peak_bytes})


def _held_on_gpus(vitals: Mapping[int, RankVitals]) -> str:
    parts = []
    for rank, usage in vitals.items():
        gpu = usage.gpu or {}
        if "memory_used_bytes" in gpu and "memory_total_bytes" in gpu:
            others = gpu.get("others")
            shared = f" (with {others} other process{'' if others == 1 else 'es'})" if others else ""
            used, total = gpu["memory_used_bytes"] / 2**30, _size(gpu["memory_total_bytes"])
            parts.append(f"rank {rank} {used:.1f} of {total}{shared}")
    return f"GPU memory in use: {', '.join(parts)}" if parts else ""


def _held(
    table: Sequence[RankEntry], peaks: Mapping[str, int] | None = None, programs: Mapping[int, int] | None = None
) -> str:
    """Return a text with the memory of each rank of this host, or its peak by engine, and the host's free memory.

    ``programs`` has the process IDs of the ranks' programs, which count as the ranks; 0 for none.
    """
    host = socket.gethostname()
    parts = []
    for entry in table:
        if entry.info.host == host:
            peak = (peaks or {}).get(entry.engine)
            pids = {entry.info.pid, (programs or {}).get(entry.info.rank, 0)} - {0}
            size = f"{_size(peak)} at most" if peak else _size(_resident(pids))
            parts.append(f"rank {entry.info.rank} {size}")
    memory = psutil.virtual_memory()
    return f"memory held: {', '.join(parts)}; {host} has {_size(memory.total)}, {_size(memory.available)} of it free"


def _resident(pids: Collection[int]) -> int:
    """Return the memory of processes and their children."""
    found: dict[int, int] = {}
    for pid in pids:
        with suppress(psutil.Error):  # it has just ended, or belongs to another user
            for each in (psutil.Process(pid), *descendants(pid)):
                found[each.pid] = each.memory_info().rss
    return sum(found.values())


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
