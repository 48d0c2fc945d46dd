"""What has to be done so that a session comes back.

Covers: when to look at ranks, to release them, to replace a dead one, to form the process group anew.
Does not cover: doing it (``guardian``), what a person reads (``hang``, ``errors``).

:class:`Recovery` is a state machine without I/O: what happens goes in with its time, what is to be done comes out.
Times are seconds of one clock that never goes back.

The process group is one for all ranks: once one rank has left it, by death or by an abort, all leave it, and it is
formed anew as soon as no rank runs a cell any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

INTERRUPT_SECONDS = 0.1  # for ranks in Python code to end their cell, before the others are looked at
LOOK_SECONDS = 0.25  # between two looks at ranks that should end
FORM_LIMIT = 3  # attempts to form the process group
REPLACE_LIMIT = 3  # deaths of one rank in a row without a cell that ended well


class Phase(Enum):
    """What the process group is like."""

    FORMED = "formed"
    BROKEN = "broken"
    FORMING = "forming"
    LOST = "lost"  # it can't be formed any more: only a reset helps


class Do(Enum):
    """What is to be done."""

    LOOK = "look at the ranks that run: are they waiting in a collective?"
    RELEASE = "abort the process group on all ranks"
    REPLACE = "start a new process for a rank"
    FORM = "form the process group anew"
    RESET = "start all ranks anew"
    STOP = "end the cluster"


@dataclass(frozen=True, slots=True)
class Action:
    """Something to be done, on a rank or on all."""

    do: Do
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the person has chosen."""

    grace_s: float = 3.0  # for ranks to end by themselves once another has failed
    hang_after_s: float = 30.0  # in one collective, before it is called a hang
    on_rank_death: str = "replace"  # "replace", "reset" or "stop"
    has_group: bool = True  # there is a process group at all


@dataclass(slots=True)
class Member:
    """One rank."""

    running: bool = False
    dead: bool = False
    replacing: bool = False
    deaths: int = 0
    waits_s: float | None = None  # in the collective it waits in; None: in none, or not known
    looked_at: float = -1.0


class Recovery:
    """The state of a session, as far as its coming back goes."""

    def __init__(self, world_size: int, rules: Rules) -> None:
        self.rules = rules
        self.phase = Phase.FORMED
        self.members = [Member() for _ in range(world_size)]
        self._began_at = 0.0
        self._failed_at: float | None = None  # the first failure among the cells that run
        self._interrupted_at: float | None = None
        self._forced = False
        self._released_at = -1.0
        self._is_forming = False  # whatever the phase is by now
        self._is_stuck_forming = False
        self._form_failures = 0
        self._is_ending = False
        self._next_look = 0.0

    # What happens

    def on_sent(self, rank: int, now: float) -> None:
        """Note that a cell was sent to a rank."""
        if not self.running:
            self._failed_at = self._interrupted_at = None
            self._forced = False
            self._began_at = now
            self._next_look = now
        member = self.members[rank]
        member.running, member.waits_s = True, None

    def on_reply(self, rank: int, now: float, *, failed: bool, broken: bool) -> None:
        """Note that a rank has ended its cell; ``broken``: its process group can't be used any more."""
        member = self.members[rank]
        member.running, member.waits_s = False, None
        if failed and self._failed_at is None:
            self._failed_at = now
        if not failed:
            member.deaths = 0
        if broken and self.phase is Phase.FORMED:
            self.phase = Phase.BROKEN

    def on_death(self, rank: int, now: float) -> None:
        """Note that a rank's process has ended."""
        member = self.members[rank]
        if member.dead:
            return
        member.dead, member.running, member.waits_s, member.replacing = True, False, None, False
        member.deaths += 1
        if self._failed_at is None:
            self._failed_at = now
        self._is_stuck_forming = self._is_forming  # the others wait for it
        if self.phase is not Phase.LOST:
            self.phase = Phase.BROKEN

    def on_interrupt(self, now: float, *, forced: bool) -> None:
        """Note that the person has interrupted the cell; ``forced``: for the second time, so nothing is spared."""
        if self._interrupted_at is None:
            self._interrupted_at = now
        self._forced = self._forced or forced
        self._next_look = min(self._next_look, now + INTERRUPT_SECONDS)

    def on_look(self, rank: int, now: float, waits_s: float | None) -> None:
        """Note what a rank was seen doing."""
        member = self.members[rank]
        if member.running:
            member.looked_at, member.waits_s = now, waits_s

    def on_replaced(self, rank: int, *, well: bool) -> None:
        """Note that a dead rank has a new process, or that none could be started."""
        member = self.members[rank]
        if not member.replacing:
            return  # the new process has died as well, or all was reset meanwhile
        member.replacing = False
        if well:
            member.dead = False
        else:
            self.phase = Phase.LOST

    def on_formed(self, *, well: bool) -> None:
        """Note that the process group was formed anew, or could not be."""
        self._is_forming = self._is_stuck_forming = False
        if self.phase is not Phase.FORMING:
            return  # a rank has died meanwhile
        self._form_failures = 0 if well else self._form_failures + 1
        if well:
            self.phase = Phase.FORMED
        else:
            self.phase = Phase.LOST if self._form_failures >= FORM_LIMIT else Phase.BROKEN

    # What is so

    @property
    def running(self) -> set[int]:
        """The ranks that run a cell."""
        return {rank for rank, member in enumerate(self.members) if member.running}

    @property
    def dead(self) -> set[int]:
        """The ranks without a process."""
        return {rank for rank, member in enumerate(self.members) if member.dead}

    @property
    def is_calm(self) -> bool:
        """Whether nothing has gone wrong that is not over."""
        return self._failed_at is None and self._interrupted_at is None and self.phase is Phase.FORMED

    @property
    def settled(self) -> bool:
        """Whether nothing is left to be done that could be done now."""
        if self.phase is Phase.LOST or self.phase is Phase.FORMED:
            return True
        if self.dead:
            return not self._is_ending and not self._replaces_all() and self.rules.on_rank_death == "replace"
        return self.phase is Phase.BROKEN and bool(self.running)

    def _replaces_all(self) -> bool:
        limited = any(member.dead and member.deaths > REPLACE_LIMIT for member in self.members)
        return self.rules.on_rank_death == "replace" and not limited

    # What is to be done

    def actions(self, now: float) -> list[Action]:
        """Return what is to be done now, in this order; it is taken as begun."""
        actions = self._releases(now)
        if self._replaces_all() and self.phase is not Phase.LOST:
            for rank, member in enumerate(self.members):
                if member.dead and not member.replacing:
                    member.replacing = True
                    actions.append(Action(Do.REPLACE, rank))
        if self.dead and self.rules.on_rank_death != "replace" and not self.running and not self._is_ending:
            self._is_ending = True
            actions.append(Action(Do.RESET if self.rules.on_rank_death == "reset" else Do.STOP))
        if self.phase is Phase.BROKEN and not self.running and not self.dead and not self._is_forming:
            self.phase = Phase.FORMING
            self._is_forming = True
            actions.append(Action(Do.FORM))
        if self.running and now >= self._look_due():
            self._next_look = now + self._look_pause(now)
            actions.append(Action(Do.LOOK))
        return actions

    def _releases(self, now: float) -> list[Action]:
        """Release who waits, once that can't end well."""
        if self._is_stuck_forming:
            self._is_stuck_forming = False
            return [Action(Do.RELEASE)]
        if not self.rules.has_group or not self.running or not self._should_release(now):
            return []
        if self.phase is not Phase.LOST:
            self.phase = Phase.BROKEN
        self._released_at = now
        for member in self.members:
            member.waits_s = None  # what is seen from now on is a wait that came after it
        return [Action(Do.RELEASE)]

    def _should_release(self, now: float) -> bool:
        first = self._released_at < self._began_at
        if self.phase in (Phase.BROKEN, Phase.LOST) and first:
            return True  # somebody has left the group, so nobody will come
        if self._forced and now - self._released_at >= LOOK_SECONDS:
            return True
        waits = [member.waits_s for member in self.members if member.running and member.waits_s is not None]
        if not waits:
            return False
        if not first:
            return True  # in a group that was made after the last release
        if self._interrupted_at is not None and now - self._interrupted_at >= INTERRUPT_SECONDS:
            return True
        return self._failed_at is not None and max(waits) >= self.rules.grace_s

    def _look_due(self) -> float:
        return max(self._next_look, self._began_at + min(self.rules.hang_after_s, 1.0) if self.is_calm else 0.0)

    def _look_pause(self, now: float) -> float:
        """Return how long to wait for the next look: ranks that are expected to end are looked at often."""
        if not self.is_calm:
            return LOOK_SECONDS
        early = now - self._began_at < self.rules.hang_after_s / 2
        return max(LOOK_SECONDS, self.rules.hang_after_s / (4 if early else 10))

    def next_time(self, now: float) -> float | None:
        """Return when to ask for actions again, if nothing happens before; None: not before something happens."""
        if not self.running:
            return None
        return max(now + 0.01, self._look_due())
