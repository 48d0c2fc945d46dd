"""State how a rank's process ended, as the user reads it: by which signal or exit code, and the likely cause.

Covers: the record that a nanny, or who finds the nanny or the host gone, publishes; its texts.
Does not cover: finding out how the process ended (``rank.nanny.exit_report``), the failure of the cell that it ran
(``client.cells.failures``).
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import ClassVar

from .messages import Record

SOME_KILLER = ": kill -9, or the kernel's out-of-memory killer"


def signal_text(number: int, killer: str = SOME_KILLER) -> str:
    """Return the name of the signal that ended a process, explained where the name alone is not enough."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return name + {"SIGKILL": killer, "SIGSEGV": ": a segmentation fault", "SIGBUS": ": a bus error"}.get(name, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDeath(Record):
    """A rank's process exited."""

    msg_type: ClassVar[str] = "rank_death"

    engine: str
    pid: int
    host: str
    exit_code: int | None = None
    signal_number: int | None = None
    crash: str = ""  # Python's report of a crash in C code; empty without one
    stderr_tail: str = ""
    expected: bool = False  # the rank was asked to exit
    launcher: str = ""  # what started it: see ``config``; empty if a process other than its nanny reports the exit
    peak_bytes: int = 0  # peak resident memory
    out_of_memory_kills: int = 0  # processes of its host ended by the kernel's out-of-memory killer during its cell
    has_closed_wire: bool = False  # it closed the connections of the session while it ran
    host_silent_s: float = 0.0  # time without response of its host, which counts as lost; 0: it responds

    @property
    def cause(self) -> str:
        """How the process exited, for the user."""
        if self.host_silent_s:
            return (
                f"lost with its host: {self.host} has not replied for {self.host_silent_s:.1f} s, because it is "
                "down or disconnected from the network"
            )
        if self.has_closed_wire:
            return (
                "ended, most likely because the cell had closed file descriptors that the session needs, e.g. by "
                "os.closerange(); close only those that the cell has opened"
            )
        if self.signal_number is None and self.exit_code is None:
            return "ended, and its nanny's report of that can't be read"
        if self.signal_number is None:
            return f"exited with code {self.exit_code}"
        return f"was killed by {signal_text(self.signal_number, self._killer)}"

    @property
    def unfinished(self) -> str:
        """Why it was killed after it had been asked to exit; empty if it exited by itself."""
        if self.expected and self.signal_number == signal.SIGALRM:
            return "its atexit functions, its threads and its open files took longer than 2 s to end"
        if self.expected and self.signal_number == signal.SIGKILL:
            return "it did not react within 3 s, so its atexit functions and open files may be lost"
        return ""

    @property
    def _killer(self) -> str:
        count = self.out_of_memory_kills
        if not count:
            return SOME_KILLER
        those = "a process" if count == 1 else f"{count} processes"
        return (
            f", most likely because memory ran out: the kernel killed {those} on {self.host} for this reason meanwhile"
        )
