"""Report how a rank exited, and the stack of one that does not respond.

Covers: exit code or signal, the last lines on stderr, Python's report of a crash, memory; the stack of a rank that does
not answer requests.
Does not cover: publishing the report (``nanny``).
"""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ...protocol.environment import LAUNCHER
from ...protocol.rank_death import RankDeath
from ...protocol.time_limits import COUNT_SECONDS, STACK_SECONDS
from .process_tree import signal_main_thread
from .stderr_filter import without_noise

if TYPE_CHECKING:
    import resource

    from .ipc import Wire

TAIL_BYTES = 16384
STACK_SIGNAL = signal.SIGRTMAX - 4  # Python writes the current stack at this signal, without the GIL
_OF_PYTHON = "Fatal Python error"  # start of Python's report of a crash


class StackReader:
    """Have a process write its stack to a file, which it has opened with faulthandler, and read that."""

    def __init__(self, pid: int, file: int) -> None:
        self._pid, self._file = pid, file
        self._asked = False  # whether the stack was requested before

    def read(self) -> str:
        """Return the stack of the main thread, the innermost call first; empty if the process did not write it."""
        if not self._asked or os.fstat(self._file).st_size:  # these signals queue up in a stopped process
            os.lseek(self._file, 0, os.SEEK_SET)  # both share the position
            os.ftruncate(self._file, 0)
            signal_main_thread(self._pid, STACK_SIGNAL)
            self._asked = True
        deadline = time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline and not os.fstat(self._file).st_size:
            time.sleep(0.001)
        return os.pread(self._file, TAIL_BYTES, 0).decode(errors="replace")


class ExitReport:
    """Monitor one rank's process from its parent."""

    def __init__(self, pid: int, wire: Wire) -> None:
        self._pid = pid
        self._crash_file = wire.crash_file
        self.stack = StackReader(pid, wire.stack_file)
        self._stderr_tail = b""
        self._kills_before = _out_of_memory_kills()
        self._counted_at = time.monotonic()
        self.has_closed_wire = False  # the rank closed its end of the socket while it ran

    def add_stderr(self, chunk: bytes) -> None:
        """Keep the end of the rank's stderr."""
        self._stderr_tail = (self._stderr_tail + without_noise(chunk))[-TAIL_BYTES:]

    def begin_cell(self) -> None:
        """Discard what happened before the cell; the host's counter is read at most every ``COUNT_SECONDS``."""
        self._stderr_tail = b""
        if time.monotonic() - self._counted_at > COUNT_SECONDS:
            self._kills_before = _out_of_memory_kills()
            self._counted_at = time.monotonic()

    def crash(self) -> bytes:
        """Return Python's report of a crash in C code; empty without one."""
        return os.pread(self._crash_file, TAIL_BYTES, 0)

    def death(self, engine: str, status: int, usage: resource.struct_rusage, *, expected: bool) -> RankDeath:
        """Return the report of the rank's exit from what ``os.wait4`` returned; ``expected``: it was asked to exit."""
        code = os.waitstatus_to_exitcode(status)
        tail = self._stderr_tail.decode(errors="replace")
        crash = self.crash().decode(errors="replace")
        # A library that can't continue without its descriptors aborts, and the crash report's descriptor is closed
        # too.
        is_cut_off = code == -signal.SIGABRT and not crash and _OF_PYTHON not in tail
        return RankDeath(
            engine=engine,
            pid=self._pid,
            host=socket.gethostname(),
            exit_code=code if code >= 0 else None,
            signal_number=-code if code < 0 else None,
            crash=crash,
            stderr_tail=tail,
            expected=expected,
            has_closed_wire=self.has_closed_wire or is_cut_off,
            launcher=os.environ.get(LAUNCHER, ""),
            peak_bytes=usage.ru_maxrss * 1024,
            out_of_memory_kills=_out_of_memory_kills() - self._kills_before,
        )


def _out_of_memory_kills() -> int:
    """Return the number of processes that the kernel's out-of-memory killer has ended since this machine started."""
    try:
        counters = Path("/proc/vmstat").read_text()
    except FileNotFoundError:
        return 0  # not Linux
    return next((int(line.split()[1]) for line in counters.splitlines() if line.startswith("oom_kill ")), 0)
