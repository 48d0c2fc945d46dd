"""Name the states of a rank, as the client sees them and as the rank reports them."""

from __future__ import annotations

from enum import Enum


class _Name(str, Enum):
    """A name that is its own text in messages, in JSON and in comparisons."""

    __str__ = str.__str__


class RankState(_Name):
    """The client's view of a rank: whether a cell can be sent to it."""

    STARTING = "starting"  # it has not reported yet
    IDLE = "idle"
    RUNNING = "running"
    ENDED = "ended"  # on request; shown in place of DEAD
    DEAD = "dead"


class RankActivity(_Name):
    """The activity that a rank reports once a second."""

    IDLE = "idle"
    RUNNING = "running"
    IN_COLLECTIVE = "in collective"
    NOT_RESPONDING = "not responding"
    STOPPED = "stopped"  # by SIGSTOP
