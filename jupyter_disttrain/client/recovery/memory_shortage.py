"""Report the memory use of ranks after a shortage.

Covers: ranks of this host; the GPUs of all ranks.
Does not cover: measuring GPUs (``features.telemetry.rank.gpu_stats``).
"""

from __future__ import annotations

import re
import signal
import socket
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...protocol.messages import RankDeath, RankVitals
    from ..startup.rank_table import RankEntry

_SHORTAGE = re.compile(
    r"can't allocate memory|cannot allocate memory|not enough memory|out of memory|bad_alloc", re.IGNORECASE
)


_SHORTAGE_OF_GPU = re.compile(r"(CUDA|HIP).*out of memory|NVML_SUCCESS == r INTERNAL ASSERT", re.IGNORECASE)


def is_shortage(content: Mapping[str, Any]) -> bool:
    """Whether a failed cell's reply shows a shortage of host memory."""
    if is_shortage_of_gpu(content):
        return False
    return content.get("ename") == "MemoryError" or bool(_SHORTAGE.search(content.get("evalue", "")))


def is_shortage_of_gpu(content: Mapping[str, Any]) -> bool:
    """Whether a failed cell's reply shows a shortage of GPU memory."""
    return content.get("ename") == "OutOfMemoryError" or bool(_SHORTAGE_OF_GPU.search(content.get("evalue", "")))


def held_on_gpus(vitals: Mapping[int, RankVitals]) -> str:
    """Return a text with the GPU memory in use for each rank."""
    parts = []
    for rank, usage in vitals.items():
        gpu = usage.gpu or {}
        if "memory_used_bytes" in gpu and "memory_total_bytes" in gpu:
            others = gpu.get("others")
            shared = f" (with {others} other process{'' if others == 1 else 'es'})" if others else ""
            used, total = gpu["memory_used_bytes"] / 2**30, _size(gpu["memory_total_bytes"])
            parts.append(f"rank {rank} {used:.1f} of {total}{shared}")
    return f"GPU memory in use: {', '.join(parts)}" if parts else ""


def may_be_shortage(death: RankDeath) -> bool:
    """Whether the kernel's out-of-memory killer most likely ended a process."""
    return death.signal_number == signal.SIGKILL and death.out_of_memory_kills > 0 and not death.expected


def held(table: Sequence[RankEntry], peaks: Mapping[int, int] | None = None) -> str:
    """Return a text with the memory of each rank of this host, children included, and the free memory.

    Parameters
    ----------
    peaks
        Peak memory of ranks that have died, in bytes.
    """
    host = socket.gethostname()
    parts = []
    for entry in table:
        rank = entry.info.rank
        if entry.info.host == host:
            peak = (peaks or {}).get(rank)
            size = _size(_resident(entry.info.pid)) if peak is None else f"{_size(peak)} at most"
            parts.append(f"rank {rank} {size}")
    memory = psutil.virtual_memory()
    return f"memory held: {', '.join(parts)}; {host} has {_size(memory.total)}, {_size(memory.available)} of it free"


def _resident(pid: int) -> int:
    total = 0
    try:
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            total += each.memory_info().rss
    except psutil.Error:
        return total  # it has just ended, or belongs to another user
    return total


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
