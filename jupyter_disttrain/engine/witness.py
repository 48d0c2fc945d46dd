"""How a rank ended, and where it is when it can't say so itself.

Covers: exit code or signal, the last words on stderr, Python's report of a crash, memory; the stack of a rank that
answers nobody.
Does not cover: telling it (``nanny``).
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from ..messages import RankDeath
from .connection import LAUNCHER
from .family import signal_main_thread
from .noise import without_noise

if TYPE_CHECKING:
    import resource

    from .wire import Wire

TAIL_BYTES = 16384
COUNT_SECONDS = 1.0
STACK_SIGNAL = signal.SIGRTMAX - 4  # at which Python writes down where it is, without its lock
STACK_SECONDS = 0.1  # for that; a stopped process never does it


class Witness:
    """Watch one rank's process from its parent."""

    def __init__(self, pid: int, wire: Wire) -> None:
        self._pid = pid
        self._crash_file = wire.crash_file
        self._stack_file = wire.stack_file
        self._stderr_tail: deque[bytes] = deque()
        self._kills_before = _out_of_memory_kills()
        self._counted_at = time.monotonic()
        self._asked = False  # where it is

    def hear(self, chunk: bytes) -> None:
        """Take what the rank wrote on stderr."""
        self._stderr_tail.append(without_noise(chunk)[-TAIL_BYTES:])
        while sum(map(len, self._stderr_tail)) > 2 * TAIL_BYTES and len(self._stderr_tail) > 1:
            self._stderr_tail.popleft()

    def begin_cell(self) -> None:
        """Leave aside what happened on this host before the cell; many short cells are not worth a look each."""
        if time.monotonic() - self._counted_at > COUNT_SECONDS:
            self._kills_before = _out_of_memory_kills()
            self._counted_at = time.monotonic()

    def stack(self) -> str:
        """Return where the rank's main thread is, the innermost call first; empty if it did not say."""
        if not self._asked or os.fstat(self._stack_file).st_size:  # such signals queue up in a process that is stopped
            os.lseek(self._stack_file, 0, os.SEEK_SET)  # the rank writes at the same place: it was open at the fork
            os.ftruncate(self._stack_file, 0)
            signal_main_thread(self._pid, STACK_SIGNAL)
            self._asked = True
        deadline = time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline and not os.fstat(self._stack_file).st_size:
            time.sleep(0.001)
        return os.pread(self._stack_file, TAIL_BYTES, 0).decode(errors="replace")

    def crash(self) -> bytes:
        """Return Python's report of a crash in C code; empty without one."""
        return os.pread(self._crash_file, TAIL_BYTES, 0)

    def death(self, engine: str, status: int, usage: resource.struct_rusage, *, expected: bool) -> RankDeath:
        """Return what is to be told of the rank's end.

        Parameters
        ----------
        engine
            The name of the rank's sockets.
        status, usage
            As ``os.wait4`` returns them.
        expected
            Whether it was asked to end.
        """
        code = os.waitstatus_to_exitcode(status)
        return RankDeath(
            engine=engine,
            pid=self._pid,
            host=socket.gethostname(),
            exit_code=code if code >= 0 else None,
            signal_number=-code if code < 0 else None,
            crash=self.crash().decode(errors="replace"),
            stderr_tail=b"".join(self._stderr_tail)[-TAIL_BYTES:].decode(errors="replace"),
            expected=expected,
            launcher=os.environ.get(LAUNCHER, ""),
            peak_bytes=usage.ru_maxrss * 1024,
            out_of_memory_kills=_out_of_memory_kills() - self._kills_before,
        )


def _out_of_memory_kills() -> int:
    """Return how many processes the kernel has ended for want of memory since this machine started."""
    try:
        counters = Path("/proc/vmstat").read_text()
    except FileNotFoundError:
        return 0  # no Linux
    return next((int(line.split()[1]) for line in counters.splitlines() if line.startswith("oom_kill ")), 0)
