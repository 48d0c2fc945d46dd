"""What has to be done so that a session comes back.

Covers: when to look at ranks, to release them, to replace a dead one, to form the process group anew.
Does not cover: doing it (``guardian``), what a person reads (``hang``, ``errors``).

:class:`Recovery` is a state machine without I/O: what happens goes in with its time, what is to be done comes out.
Times are seconds of one clock that never goes back.

The process group is one for all ranks: once one rank has left it, by death or by an abort, all leave it, and it is
formed anew as soon as no rank runs a cell any more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from typing_extensions import Self

    from ..config import ClusterConfig

INTERRUPT_SECONDS = 0.1  # for ranks in Python code to end their cell, before the others are looked at
LOOK_SECONDS = 0.25  # between two looks at ranks that should end
CALM_SECONDS = 3.0  # between two looks at ranks that just run
MEET_SECONDS = 1.0  # from seeing one wait to looking at what the others do
MPI_PRESSES = 3  # interrupts after which a rank that is in a call of MPI is ended, which nothing else ends
MPI_SECONDS = 2.0  # after the first of them
MPI_LAST_SECONDS = 0.5  # after the last of them
FORM_LIMIT = 3  # attempts to form the process group
REPLACE_LIMIT = 3  # deaths of one rank in a row without a cell that ended well; failed starts of a new process


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
    KILL = "end the process of a rank that nothing gets out of a call of MPI"
    REPLACE = "start a new process for a rank"
    FORM = "form the process group anew"
    RESET = "start all ranks anew"
    STOP = "end the cluster"


@dataclass(frozen=True, slots=True)
class Action:
    """Something to be done, on a rank or on all."""

    do: Do
    rank: int | None = None
    forced: bool = False  # a release: also what nobody was seen waiting in


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the person has chosen."""

    grace_s: float = 3.0  # for ranks to end by themselves once another has failed
    hang_after_s: float = 30.0  # in one collective, before it is called a hang
    on_rank_death: str = "replace"  # "replace", "reset" or "stop"
    has_group: bool = True  # there is something that ranks wait in at all

    @classmethod
    def of(cls, config: ClusterConfig) -> Self:
        """Return what was chosen with the cluster."""
        return cls(
            grace_s=config.grace_s,
            hang_after_s=config.hang_after_s,
            on_rank_death=config.on_rank_death,
            has_group=config.backend != "none" or config.has_mpi,
        )


@dataclass(slots=True)
class RunningCell:
    """A cell that runs on some ranks."""

    began_at: float
    failed_at: float | None = None  # the first time, on one of its ranks
    interrupted_at: float | None = None
    forced: bool = False  # interrupted for the second time
    presses: int = 0  # of stop
    pressed_at: float = 0.0  # the last time
    released_at: float | None = None  # the last time
    ranks: set[int] = field(default_factory=set)  # that run it still

    @property
    def is_calm(self) -> bool:
        """Whether nothing has gone wrong with it."""
        return self.failed_at is None and self.interrupted_at is None


@dataclass(slots=True)
class Member:
    """One rank."""

    cell: int | None = None  # that it runs
    dead: bool = False
    replacing: bool = False
    ending: bool = False  # its process is being ended, because it is of no use any more
    asked: bool = False  # a person wants a new process for it
    deaths: int = 0
    failed_starts: int = 0  # of a new process
    waits_s: float | None = None  # in the collective it waits in; None: in none, or not known
    in_program: bool = False  # it waits for a process of its own, which may wait for others'
    in_mpi: bool = False  # it was seen in a call of MPI


class Recovery:
    """The state of a session, as far as its coming back goes."""

    def __init__(self, world_size: int, rules: Rules) -> None:
        self.rules = rules
        self.phase = Phase.FORMED
        self.members = [Member() for _ in range(world_size)]
        self._cells: dict[int, RunningCell] = {}  # by number
        self._is_forming = False  # whatever the phase is by now
        self._is_stuck_forming = False
        self._form_failures = 0
        self._is_ending = False
        self._next_look = 0.0

    def change(self, rules: Rules) -> None:
        """Go by other rules from now on."""
        self.rules = rules
        self._next_look = 0.0

    # What happens

    def on_sent(self, rank: int, now: float, cell: int = 0) -> None:
        """Note that a cell was sent to a rank."""
        if not self._cells:
            self._next_look = now
        self._leave(rank)
        self._cells.setdefault(cell, RunningCell(began_at=now)).ranks.add(rank)
        member = self.members[rank]
        member.cell, member.waits_s, member.in_program, member.in_mpi = cell, None, False, False

    def on_reply(self, rank: int, now: float, *, failed: bool, broken: bool) -> None:
        """Note that a rank has ended its cell; ``broken``: its process group can't be used any more."""
        self._end_cell(rank, now, failed=failed)
        if not failed:
            self.members[rank].deaths = 0
        if broken and self.phase is Phase.FORMED:
            self.phase = Phase.BROKEN

    def _end_cell(self, rank: int, now: float, *, failed: bool) -> None:
        member = self.members[rank]
        cell = self._cells.get(member.cell) if member.cell is not None else None
        if cell is not None and failed and cell.failed_at is None:
            cell.failed_at = now
        self._leave(rank)
        member.cell, member.waits_s, member.in_program = None, None, False

    def _leave(self, rank: int) -> None:
        """Forget the rank's cell once no rank runs it."""
        number = self.members[rank].cell
        if number is not None and (cell := self._cells.get(number)) is not None:
            cell.ranks.discard(rank)
            if not cell.ranks:
                del self._cells[number]

    def on_death(self, rank: int, now: float) -> None:
        """Note that a rank's process has ended."""
        member = self.members[rank]
        if member.dead:
            return
        self._end_cell(rank, now, failed=True)
        member.dead, member.replacing, member.ending = True, False, False
        member.deaths += 1
        self._is_stuck_forming = self._is_forming  # the others wait for it
        if self.phase is not Phase.LOST:
            self.phase = Phase.BROKEN

    def on_ending(self, rank: int) -> None:
        """Note that a rank's process is being ended: nothing is done with it before it has."""
        self.members[rank].ending = True
        if self.phase is not Phase.LOST:
            self.phase = Phase.BROKEN

    def on_interrupt(self, now: float, *, forced: bool, ranks: Collection[int] | None = None) -> None:
        """Note that the user has interrupted what ranks run; ``ranks`` None means all.

        The second interrupt of a cell, or one that is ``forced``, releases its ranks without looking whether they wait.
        """
        reached = [rank for rank in self.running if ranks is None or rank in ranks]
        for number in {number for rank in reached if (number := self.members[rank].cell) is not None}:
            cell = self._cells[number]
            cell.forced = cell.forced or forced or cell.interrupted_at is not None
            cell.interrupted_at = now if cell.interrupted_at is None else cell.interrupted_at
            cell.presses, cell.pressed_at = cell.presses + 1, now
        for rank in reached:
            self.members[rank].waits_s = None  # what was seen before says nothing of what follows
        self._next_look = min(self._next_look, now + INTERRUPT_SECONDS)

    def on_look(
        self, rank: int, now: float, waits_s: float | None, *, in_program: bool = False, in_mpi: bool = False
    ) -> None:
        """Note what a rank was seen doing; ``now`` is when it was asked."""
        member = self.members[rank]
        cell = None if member.cell is None else self._cells[member.cell]
        if cell is not None and now >= (cell.interrupted_at or 0.0) and now >= (cell.released_at or 0.0):
            if member.waits_s is None and waits_s is not None and self.is_calm:
                self._next_look = min(self._next_look, now + MEET_SECONDS)  # what do the others call there?
            member.waits_s, member.in_program, member.in_mpi = waits_s, in_program, in_mpi

    def on_asked(self, rank: int) -> None:
        """Note that a person wants a new process for a rank, whatever became of earlier ones."""
        member = self.members[rank]
        member.asked, member.deaths, member.failed_starts = True, 0, 0
        self._form_failures = 0
        if self.phase is Phase.LOST:
            self.phase = Phase.BROKEN

    def on_replaced(self, rank: int, *, well: bool, for_good: bool = False) -> None:
        """Note that a dead rank has a new process, or that none could be started; ``for_good``: nor can it later."""
        member = self.members[rank]
        if not member.replacing:
            return  # the new process has died as well, or all was reset meanwhile
        member.replacing = False
        if well:
            member.dead, member.asked, member.failed_starts = False, False, 0
            return
        member.failed_starts = REPLACE_LIMIT if for_good else member.failed_starts + 1
        if member.failed_starts >= REPLACE_LIMIT:
            member.asked = False
            self.phase = Phase.LOST

    def on_group_ended(self) -> None:
        """Note that cells have ended the process group on all ranks."""
        if self.phase is Phase.FORMED:
            self.phase = Phase.BROKEN

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
        return {rank for rank, member in enumerate(self.members) if member.cell is not None}

    @property
    def dead(self) -> set[int]:
        """The ranks without a process."""
        return {rank for rank, member in enumerate(self.members) if member.dead}

    @property
    def survivor(self) -> int | None:
        """A rank whose process is as old as its variables; None if all have died since a cell ended well."""
        return next((rank for rank, member in enumerate(self.members) if not member.dead and not member.deaths), None)

    @property
    def is_calm(self) -> bool:
        """Whether nothing has gone wrong that is not over."""
        return self.phase is Phase.FORMED and all(cell.is_calm for cell in self._cells.values())

    @property
    def settled(self) -> bool:
        """Whether nothing is left to be done that could be done now."""
        if self.phase is Phase.LOST:
            return not any(member.replacing for member in self.members)  # why each can't be replaced is told together
        if self.phase is Phase.FORMED:
            return True
        if any(member.ending for member in self.members):
            return False
        if self.dead:
            return not any(member.dead and self._follows(member) for member in self.members)
        return self.phase is Phase.BROKEN and bool(self.running)

    def _follows(self, member: Member) -> bool:
        """Whether something is to follow from a death: a new process, or what the person chose in place of it."""
        return self._may_replace(member) or self.rules.on_rank_death != "replace"

    def _may_replace(self, member: Member) -> bool:
        return member.asked or (self.rules.on_rank_death == "replace" and member.deaths <= REPLACE_LIMIT)

    # What is to be done

    def actions(self, now: float) -> list[Action]:
        """Return what is to be done now, in this order; it is taken as begun."""
        actions = self._releases(now)
        for rank, member in enumerate(self.members):
            if member.in_mpi and member.cell is not None and self._gives_up_mpi(self._cells[member.cell], now):
                member.in_mpi = False
                actions.append(Action(Do.KILL, rank))
        for rank, member in enumerate(self.members):
            if member.dead and not member.replacing and self._may_replace(member) and self.phase is not Phase.LOST:
                member.replacing = True
                actions.append(Action(Do.REPLACE, rank))
        left = any(member.dead and not self._may_replace(member) for member in self.members)
        if left and self.rules.on_rank_death != "replace" and not self.running and not self._is_ending:
            self._is_ending = True
            actions.append(Action(Do.RESET if self.rules.on_rank_death == "reset" else Do.STOP))
        ending = any(member.ending for member in self.members)
        if self.phase is Phase.BROKEN and not (self.running or self.dead or self._is_forming or ending):
            self.phase = Phase.FORMING
            self._is_forming = True
            actions.append(Action(Do.FORM))
        if self.running and now >= self._look_due():
            self._next_look = now + self._look_pause()
            actions.append(Action(Do.LOOK))
        return actions

    def _gives_up_mpi(self, cell: RunningCell, now: float) -> bool:
        """Whether the calls of MPI in which a cell waits have had their time to end."""
        if cell.presses < MPI_PRESSES or cell.interrupted_at is None:
            return False
        return now - cell.interrupted_at >= MPI_SECONDS and now - cell.pressed_at >= MPI_LAST_SECONDS

    def _releases(self, now: float) -> list[Action]:
        """Release who waits, once that can't end well."""
        if self._is_stuck_forming:
            self._is_stuck_forming = False
            return [Action(Do.RELEASE)]
        if not self.rules.has_group or not any(self._should_release(number, now) for number in self._cells):
            return []
        if self.phase is not Phase.LOST:
            self.phase = Phase.BROKEN
        for cell in self._cells.values():
            cell.released_at = now
        for member in self.members:
            member.waits_s = None  # what is seen from now on is a wait that came after it
        return [Action(Do.RELEASE, forced=any(cell.forced for cell in self._cells.values()))]

    def _should_release(self, number: int, now: float) -> bool:
        """Whether what this cell waits for will not come; another cell may still meet those that wait here."""
        cell = self._cells[number]
        first = cell.released_at is None
        if self.phase in (Phase.BROKEN, Phase.LOST) and first:
            return True  # somebody has left the group, so nobody will come
        pressed = cell.forced and (first or now - (cell.released_at or 0.0) >= LOOK_SECONDS)
        if pressed or self._has_program_to_end(number, now):
            return True
        waits = [member.waits_s for member in self.members if member.cell == number and member.waits_s is not None]
        if not waits:
            return False
        if not first:
            return True  # in a group that was made after the last release
        if cell.interrupted_at is not None and now - cell.interrupted_at >= INTERRUPT_SECONDS:
            return True
        return cell.failed_at is not None and max(waits) >= self.rules.grace_s

    def _has_program_to_end(self, number: int, now: float) -> bool:
        """Whether a rank's own process may wait for one of a rank that has failed."""
        failed_at = self._cells[number].failed_at
        if failed_at is None or now - failed_at < self.rules.grace_s:
            return False
        return any(member.cell == number and member.in_program for member in self.members)

    def since(self, rank: int) -> float:
        """Return when the cell began that a rank runs; for one that runs none the first of those that run."""
        number = self.members[rank].cell
        cells = self._cells.values() if number is None else [self._cells[number]]
        return min((cell.began_at for cell in cells), default=math.inf)

    @property
    def _began_at(self) -> float:
        """When the cell began that was sent last."""
        return max((cell.began_at for cell in self._cells.values()), default=0.0)

    def _look_due(self) -> float:
        return max(self._next_look, self._began_at + min(self.rules.hang_after_s, 1.0) if self.is_calm else 0.0)

    def _look_pause(self) -> float:
        """Return how long to wait for the next look: ranks that are expected to end are looked at often."""
        if not self.is_calm:
            return LOOK_SECONDS
        return max(LOOK_SECONDS, min(CALM_SECONDS, self.rules.hang_after_s / 4))

    def next_time(self, now: float) -> float | None:
        """Return when to ask for actions again, if nothing happens before; None: not before something happens."""
        if not self.running:
            return None
        return max(now + 0.01, self._look_due())
