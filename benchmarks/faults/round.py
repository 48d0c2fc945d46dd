"""Record one round of the campaign.

Covers: what was done and how the session recovered, the time limits of a round, the text of an error.
Does not cover: causing the fault (kinds, first_use), checking the session (campaign).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import DisttrainError, RankFailure

GRACE_S = 1.0  # for the other ranks to end after one has failed; included in the recovery times
CHECK_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 180.0  # for a complete first use of what was interrupted, on few cores


@dataclass
class Round:
    """One round: its fault, its cell and the outcome."""

    fault: str
    cell: str
    prepare: str = ""  # the cell that was run before
    probe: str = ""  # a cell that uses what was interrupted
    pids: dict[int, int] = field(default_factory=dict)  # by rank, of the processes that have the variables
    restart: bool = False  # restart all ranks after the checks
    cleanup: ExitStack = field(default_factory=ExitStack)  # runs after the checks
    recovery_s: float | None = None  # from the fault until all ranks have done an all_reduce
    reported_s: float | None = None  # from the failure until it was reported
    message: str = ""  # the error of the cell
    missed: bool = False  # the cell ended before the fault
    returned_early: bool = False  # the call returned while ranks still ran
    lost: str = ""  # why the session did not recover
    dropped: bool = False  # the next cell did not run on every rank
    forgotten: int = 0  # surviving ranks that lost their variables
    damaged: str = ""  # the error of the probe, on ranks that passed the checks
    damage_reported: bool = False  # a message names the damage and the remedy

    @property
    def failed(self) -> bool:
        """Whether the session did not recover completely."""
        return bool(self.lost or self.dropped or self.forgotten or (self.damaged and not self.damage_reported))


# Runs a cell, causes a fault on the victim's rank about a delay in seconds later, and waits until the cell has ended.
# Returns the time of the fault in seconds since the epoch.
Fault = Callable[[Cluster, Round, str, int, float], float]


class EarlyFailureError(DisttrainError):
    """A cell failed before its fault was caused."""


def error_text(error: BaseException) -> str:
    """Return the text of an error, with the tracebacks of ranks."""
    lines = error._render_traceback_() if isinstance(error, RankFailure) else [repr(error)]
    return "\n".join(lines)
