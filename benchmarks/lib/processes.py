"""Find, measure and end the processes that a benchmark started.

Covers: processes with a token in their environment, their memory and processor time, ending them.
Does not cover: starting them (kernel, compare.torchrun).

Every child inherits the token, also one whose parent has exited, so no process is missed and no other is signalled.
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

TOKEN_VARIABLE = "BENCHMARK_TOKEN"  # not DISTTRAIN_...: those variables are not passed on to the warm process
WARM_PROCESS = "jupyter_disttrain.rank.warm"
MB = 1e6


def new_token() -> str:
    """Return a token for the environment of one session's processes."""
    return uuid.uuid4().hex


def with_token(token: str) -> list[psutil.Process]:
    """Return the running processes that have ``token``, except this one."""
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


def left(token: str) -> int:
    """Return how many processes run that should have ended; the warm process stays for the next start."""
    return sum(name_of(each) != WARM_PROCESS for each in with_token(token))


def end(token: str, *, timeout_s: float = 5.0) -> int:
    """End every process that has ``token``, by SIGTERM and then SIGKILL; return how many there were."""
    ended: set[int] = set()
    for sign in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            running = with_token(token)
            if not running:
                return len(ended)
            for process in running:
                if process.pid not in ended or sign == signal.SIGKILL:
                    with contextlib.suppress(psutil.Error):
                        process.send_signal(sign)  # psutil compares start times, so a reused pid is not signalled
                ended.add(process.pid)
            psutil.wait_procs(running, timeout=0.2)
    return len(ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of one process, in MB of 10**6 bytes."""

    pss_mb: float  # private pages, and its share of shared pages
    rss_mb: float
    private_mb: float


def memory_of(pid: int) -> Memory:
    """Return the memory of a process, from ``smaps_rollup``."""
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
    """Return the module, script or program that a process runs."""
    with contextlib.suppress(psutil.Error, IndexError):
        argv = process.cmdline()
        if "-m" in argv and Path(argv[0]).name.startswith("python"):
            return str(argv[argv.index("-m") + 1])
        script = next((argument for argument in argv[1:] if argument.endswith(".py")), argv[0])
        return Path(script).name
    return "?"


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Return the processor time, user and system, that the processes have used so far."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total
