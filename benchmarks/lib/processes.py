"""Find, weigh and end the processes that a benchmark started.

Covers: processes known by a token in their environment, their memory and processor time, their end.
Does not cover: starting them (``kernel``, ``torchrun``).

The token is inherited by every child, also by those that left their parent, so nothing that was started is missed and
nothing else is ever signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

TOKEN_VARIABLE = "DISTTRAIN_BENCHMARK_TOKEN"
MB = 1e6


def new_token() -> str:
    """Return a token that marks one session's processes."""
    return uuid.uuid4().hex


def with_token(token: str) -> list[psutil.Process]:
    """Return the living processes that carry ``token``, this one left out."""
    needle = f"{TOKEN_VARIABLE}={token}".encode()
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(OSError, psutil.Error):
            if needle in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                found.append(process)
    return found


def end(token: str, *, patience_s: float = 5.0) -> int:
    """End every process that carries ``token`` and return how many there were."""
    ended: set[int] = set()
    for sign, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, patience_s)):
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            living = with_token(token)
            if not living:
                return len(ended)
            for process in living:
                if process.pid not in ended or sign == signal.SIGKILL:
                    with contextlib.suppress(psutil.Error):
                        process.send_signal(sign)  # psutil compares the start time: a reused pid is safe
                ended.add(process.pid)
            psutil.wait_procs(living, timeout=0.2)
    return len(ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one process holds, in MB of 10**6 bytes."""

    pss_mb: float  # its own pages, and its share of those it shares
    rss_mb: float
    private_mb: float


def memory_of(pid: int) -> Memory:
    """Read the memory of a process from the kernel's own sums."""
    fields: dict[str, float] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        fields[name] = float(rest.split()[0]) * 1024 / MB
    return Memory(
        pss_mb=fields["Pss"],
        rss_mb=fields["Rss"],
        private_mb=fields["Private_Clean"] + fields["Private_Dirty"],
    )


def name_of(process: psutil.Process) -> str:
    """Name what a process is for, from its command line."""
    with contextlib.suppress(psutil.Error, IndexError):
        words = process.cmdline()
        if "-m" in words and Path(words[0]).name.startswith("python"):
            return str(words[words.index("-m") + 1])
        script = next((word for word in words[1:] if word.endswith(".py")), words[0])
        return Path(script).name
    return "?"


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Return the processor time that the processes have used so far."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total
