"""Decide what to do after interrupts, failures and deaths of ranks.

Covers: when to inspect ranks, release them, replace a dead one, and form the process group again.
Does not cover: carrying it out (``supervisor``), the texts of errors (``errors``).

:class:`Recovery` is a state machine without I/O: it takes timestamped events and returns actions. Times are seconds of
one monotonic clock.

All ranks share one process group: once one rank has left it, by death or by an abort, all leave it, and it is formed
again as soon as no rank runs a cell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ...protocol.time_limits import (
    BLIND_SECONDS,
    CALM_SECONDS,
    INTERRUPT_SECONDS,
    MPI_LAST_SECONDS,
    MPI_SECONDS,
    RECOVERY_CHECK_SECONDS,
    RECOVERY_MEET_SECONDS,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from ...config.cluster import ClusterConfig

MPI_PRESSES = 3  # interrupts after which a rank inside an MPI call is killed, since nothing else ends such a call
FORM_LIMIT = 3  # attempts to form the process group
REPLACE_LIMIT = 3  # consecutive deaths of one rank without a successful cell; also failed starts of a new process


class Phase(Enum):
    """State of the process group."""

    FORMED = "formed"
    BROKEN = "broken"
    FORMING = "forming"
    LOST = "lost"  # can't be formed any more; requires a reset


class Do(Enum):
    """Kinds of actions."""

    INSPECT = "inspect the ranks that run: are they waiting in a collective?"
    RELEASE = "abort the process group on all ranks"
    END_PROGRAMS = "end the programs of a cell, because that of another rank has failed"
    KILL = "end the process of a rank whose MPI call can't be aborted"
    REPLACE = "start a new process for a rank"
    FORM = "form the process group again"
    RESET = "start all ranks again"
    STOP = "end the cluster"


@dataclass(frozen=True, slots=True)
class Action:
    """One action, on one rank or on all."""

    do: Do
    rank: int = -1  # for KILL and REPLACE
    forced: bool = False  # for RELEASE: also abort calls that no inspection has seen
    cell: int = 0  # for END_PROGRAMS: its number


@dataclass(slots=True)
class RunningCell:
    """A cell that runs on some ranks."""

    began_at: float
    failed_at: float | None = None  # first failure on one of its ranks
    interrupted_at: float | None = None
    forced: bool = False  # interrupted a second time
    presses: int = 0  # number of interrupts
    pressed_at: float = 0.0  # time of the last interrupt
    released_at: float | None = None  # time of the last release
    runs_program: bool = False  # its ranks wait for programs, which have groups of their own
    has_ended_programs: bool = False
    count: int = 0  # number of ranks that still run it

    @property
    def is_calm(self) -> bool:
        """Whether it has neither failed nor been interrupted."""
        return self.failed_at is None and self.interrupted_at is None


@dataclass(slots=True)
class Member:
    """The state of one rank."""

    cell: int | None = None  # number of the cell that it runs
    dead: bool = False
    replacing: bool = False
    ending: bool = False  # its process is being ended, because it is not usable any more
    asked: bool = False  # the user requested a new process for it
    deaths: int = 0
    failed_starts: int = 0  # failed starts of a new process
    waits_s: float | None = None  # seconds in the current collective; None: in none, or unknown
    in_mpi: bool = False  # was last seen in an MPI call


class Recovery:
    """State machine that decides how a session recovers."""

    def __init__(self, world_size: int, config: ClusterConfig) -> None:
        self.config = config
        self.phase = Phase.FORMED
        self.members = [Member() for _ in range(world_size)]
        self._cells: dict[int, RunningCell] = {}  # by cell number
        self._is_forming = False  # an attempt to form the group is under way, whatever the phase
        self._is_stuck_forming = False
        self._form_failures = 0
        self._is_ending = False
        self._has_end_failed = False
        self._next_check = 0.0

    def change(self, config: ClusterConfig) -> None:
        """Use other settings from now on."""
        self.config = config
        self._next_check = 0.0

    # Events

    def on_sent(self, rank: int, now: float, cell: int = 0, *, program: bool = False) -> None:
        """Record that a cell was sent to a rank; ``program``: it runs one, and waits for it."""
        if not self._cells:
            self._next_check = now
        self._leave(rank)
        self._cells.setdefault(cell, RunningCell(began_at=now, runs_program=program)).count += 1
        self.members[rank].cell = cell

    def on_reply(self, rank: int, now: float, *, failed: bool, broken: bool) -> None:
        """Record that a rank has ended its cell; ``broken``: its process group is unusable."""
        if failed:
            self._fail(rank, now)
        else:
            self.members[rank].deaths = 0
        self._leave(rank)
        if broken and self.phase is Phase.FORMED:
            self.phase = Phase.BROKEN

    def _fail(self, rank: int, now: float) -> None:
        cell = self._cell_of(self.members[rank])
        if cell is not None and cell.failed_at is None:
            cell.failed_at = now

    def _cell_of(self, member: Member) -> RunningCell | None:
        return None if member.cell is None else self._cells[member.cell]

    def _leave(self, rank: int) -> None:
        """Remove the rank from its cell, and the cell once no rank runs it."""
        member = self.members[rank]
        number, member.cell = member.cell, None
        member.waits_s, member.in_mpi = None, False
        if number is not None:
            self._cells[number].count -= 1
            if not self._cells[number].count:
                del self._cells[number]

    def on_death(self, rank: int, now: float) -> None:
        """Record that a rank's process has ended."""
        member = self.members[rank]
        if member.dead:
            return
        self._fail(rank, now)
        self._leave(rank)
        member.dead, member.replacing, member.ending = True, False, False
        member.deaths += 1
        self._is_stuck_forming = self._is_forming  # the other ranks wait for it
        if self.phase is not Phase.LOST:
            self.phase = Phase.BROKEN

    def on_end_failed(self) -> None:
        """Record that a reset or stop, if one was begun after a death, has failed; it is not tried again."""
        self._has_end_failed = self._is_ending

    def on_ending(self, rank: int) -> None:
        """Record that a rank's process is being ended: no action is taken on it until it has ended."""
        self.members[rank].ending = True
        if self.phase is not Phase.LOST:
            self.phase = Phase.BROKEN

    def on_interrupt(self, now: float, *, forced: bool, ranks: Collection[int] | None = None) -> None:
        """Record that the user has interrupted what ranks run; ``ranks`` None means all.

        The second interrupt of a cell, or one that is ``forced``, releases its ranks without checking whether they
        wait.
        """
        reached = [rank for rank in self.running if ranks is None or rank in ranks]
        for number in {number for rank in reached if (number := self.members[rank].cell) is not None}:
            cell = self._cells[number]
            cell.forced = cell.forced or forced or cell.interrupted_at is not None
            cell.interrupted_at = now if cell.interrupted_at is None else cell.interrupted_at
            cell.presses, cell.pressed_at = cell.presses + 1, now
        for rank in reached:
            self.members[rank].waits_s = None  # earlier observations do not apply after an interrupt
        self._next_check = min(self._next_check, now + INTERRUPT_SECONDS)

    def on_inspected(
        self, rank: int, now: float, waits_s: float | None, *, in_program: bool = False, in_mpi: bool = False
    ) -> None:
        """Record what a rank was doing; ``now`` is the time of the request, not of the reply.

        ``in_program``: it waits for a child process, which may wait for other ranks' child processes.
        """
        member = self.members[rank]
        cell = self._cell_of(member)
        if cell is not None and in_program and now >= cell.began_at:
            cell.runs_program = True  # an earlier notebook has sent it
        if cell is not None and now >= (cell.interrupted_at or 0.0) and now >= (cell.released_at or 0.0):
            if member.waits_s is None and waits_s is not None and self.is_calm:
                # Soon see which collective the other ranks call.
                self._next_check = min(self._next_check, now + RECOVERY_MEET_SECONDS)
            member.waits_s, member.in_mpi = waits_s, in_mpi

    def on_asked(self, rank: int) -> None:
        """Record that the user wants a new process for a rank; the old one now ends and failure counts are reset."""
        member = self.members[rank]
        member.asked, member.deaths, member.failed_starts = True, 0, 0
        member.ending = not member.dead
        self._form_failures = 0
        if self.phase is Phase.LOST:
            self.phase = Phase.BROKEN

    def on_replaced(self, rank: int, *, well: bool, for_good: bool = False) -> None:
        """Record whether a dead rank's new process started; ``for_good``: no later attempt can succeed either."""
        member = self.members[rank]
        if not member.replacing:
            return  # the new process has died as well, or all ranks were reset meanwhile
        member.replacing = False
        if well:
            member.dead, member.asked, member.failed_starts = False, False, 0
            return
        member.failed_starts = REPLACE_LIMIT if for_good else member.failed_starts + 1
        if member.failed_starts >= REPLACE_LIMIT:
            member.asked = False
            self.phase = Phase.LOST

    def on_group_ended(self) -> None:
        """Record that cells have destroyed the process group on all ranks."""
        if self.phase is Phase.FORMED:
            self.phase = Phase.BROKEN

    def on_formed(self, *, well: bool) -> None:
        """Record whether forming the process group succeeded."""
        self._is_forming = self._is_stuck_forming = False
        if self.phase is not Phase.FORMING:
            return  # a rank has died meanwhile
        self._form_failures = 0 if well else self._form_failures + 1
        if well:
            self.phase = Phase.FORMED
        else:
            self.phase = Phase.LOST if self._form_failures >= FORM_LIMIT else Phase.BROKEN

    # State

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
        """A live rank that kept its variables; None if all ranks have died since a cell ended well."""
        return next((rank for rank, member in enumerate(self.members) if not member.dead and not member.deaths), None)

    @property
    def given_up(self) -> set[int]:
        """The dead ranks for which no new process is started any more."""
        is_lost = self.phase is Phase.LOST
        return {
            rank
            for rank, member in enumerate(self.members)
            if member.dead and not member.replacing and (is_lost or not self._may_replace(member))
        }

    @property
    def after_death(self) -> str:
        """What follows for the other ranks from the deaths so far, as text; empty if no other rank is left."""
        policy = self.config.on_rank_death
        if policy != "replace" and not self._has_end_failed and (self._is_ending or self.given_up):
            what = "all ranks are started again, with fresh variables" if policy == "reset" else "the cluster ends"
            return f"{what} (--on-rank-death {policy})"
        return "" if self.survivor is None else "the other ranks keep their variables"

    @property
    def is_calm(self) -> bool:
        """Whether the group is formed and no running cell has failed or was interrupted."""
        return self.phase is Phase.FORMED and all(cell.is_calm for cell in self._cells.values())

    @property
    def settled(self) -> bool:
        """Whether no action is left that could be taken now."""
        if self.phase is Phase.LOST:
            # The reasons of all ranks are reported together.
            return not any(member.replacing for member in self.members)
        if self.phase is Phase.FORMED:
            return True
        if any(member.ending for member in self.members):
            return False
        if self.dead:
            return not any(member.dead and self._follows(member) for member in self.members)
        return self.phase is Phase.BROKEN and bool(self.running)

    def _follows(self, member: Member) -> bool:
        """Whether an action follows the rank's death: a new process, or what the user chose instead."""
        return self._may_replace(member) or (self.config.on_rank_death != "replace" and not self._has_end_failed)

    def _may_replace(self, member: Member) -> bool:
        return member.asked or (self.config.on_rank_death == "replace" and member.deaths <= REPLACE_LIMIT)

    # Actions

    def actions(self, now: float) -> list[Action]:
        """Return the actions due now, in order; they count as started."""
        actions = [*self._program_ends(now), *self._releases(now)]
        for rank, member in enumerate(self.members):
            cell = self._cell_of(member)
            if member.in_mpi and cell is not None and self._gives_up_mpi(cell, now):
                member.in_mpi = False
                actions.append(Action(Do.KILL, rank))
        for rank, member in enumerate(self.members):
            if member.dead and not member.replacing and self._may_replace(member) and self.phase is not Phase.LOST:
                member.replacing = True
                actions.append(Action(Do.REPLACE, rank))
        left = any(member.dead and not self._may_replace(member) for member in self.members)
        if left and self.config.on_rank_death != "replace" and not self.running and not self._is_ending:
            self._is_ending = True
            actions.append(Action(Do.RESET if self.config.on_rank_death == "reset" else Do.STOP))
        ending = any(member.ending for member in self.members)
        if self.phase is Phase.BROKEN and not (self.running or self.dead or self._is_forming or ending):
            self.phase = Phase.FORMING
            self._is_forming = True
            actions.append(Action(Do.FORM))
        if self.running and now >= self._inspection_due():
            # Ranks that are expected to end are inspected often.
            calm_s = max(RECOVERY_CHECK_SECONDS, min(CALM_SECONDS, self.config.hang_after_s / 4))
            regular = now + (calm_s if self.is_calm else RECOVERY_CHECK_SECONDS)
            self._next_check = min([regular, *self._ends_of_interrupts(now)])
            actions.append(Action(Do.INSPECT))
        return actions

    def _ends_of_interrupts(self, now: float) -> list[float]:
        """Return when the interrupts of running cells will have had time to end them."""
        interrupts = [cell.interrupted_at for cell in self._cells.values() if cell.interrupted_at is not None]
        return [due for at in interrupts if (due := at + INTERRUPT_SECONDS) > now]

    def _gives_up_mpi(self, cell: RunningCell, now: float) -> bool:
        """Whether the cell's MPI calls have had their time to end, and their ranks can be replaced."""
        if self.config.job or cell.presses < MPI_PRESSES or cell.interrupted_at is None:
            return False
        return now - cell.interrupted_at >= MPI_SECONDS and now - cell.pressed_at >= MPI_LAST_SECONDS

    def _program_ends(self, now: float) -> list[Action]:
        """End programs that may wait for that of a failed rank. An interrupt ends those of its ranks by itself."""
        actions = []
        for number, cell in self._cells.items():
            had_grace = cell.failed_at is not None and now - cell.failed_at >= self.config.grace_s
            if cell.runs_program and had_grace and not cell.has_ended_programs:
                cell.has_ended_programs = True
                actions.append(Action(Do.END_PROGRAMS, cell=number))
        return actions

    def _releases(self, now: float) -> list[Action]:
        """Release waiting ranks once their wait can't succeed."""
        if self._is_stuck_forming:
            self._is_stuck_forming = False
            return [Action(Do.RELEASE)]
        can_wait = self.config.backend != "none" or self.config.has_mpi  # for each other, in a process group or in MPI
        in_session = [number for number, cell in self._cells.items() if not cell.runs_program]
        if not can_wait or not any(self._should_release(number, now) for number in in_session):
            return []
        if self.phase is not Phase.LOST:
            self.phase = Phase.BROKEN
        for cell in self._cells.values():
            cell.released_at = now
        for member in self.members:
            member.waits_s = None  # waits seen from now on began after the release
        return [Action(Do.RELEASE, forced=any(cell.forced for cell in self._cells.values()))]

    def _should_release(self, number: int, now: float) -> bool:
        """Whether this cell's wait can't succeed; ranks of another cell may still join its collective."""
        cell = self._cells[number]
        first = cell.released_at is None
        if self.phase in (Phase.BROKEN, Phase.LOST) and first:
            return True  # a rank has left the group, so the collective can't complete
        pressed = cell.forced and (first or now - (cell.released_at or 0.0) >= RECOVERY_CHECK_SECONDS)
        if pressed and now - cell.pressed_at < BLIND_SECONDS:
            return True
        waits = [member.waits_s for member in self.members if member.cell == number and member.waits_s is not None]
        if not waits:
            return False
        if not first:
            return True  # a wait in a group that was created after the last release
        if cell.interrupted_at is not None and now - cell.interrupted_at >= INTERRUPT_SECONDS:
            return True
        return cell.failed_at is not None and max(waits) >= self.config.grace_s

    def since(self, rank: int) -> float:
        """Return the start time of the cell that a rank runs; if it runs none, the earliest start of a running cell."""
        number = self.members[rank].cell
        cells = self._cells.values() if number is None else [self._cells[number]]
        return min((cell.began_at for cell in cells), default=math.inf)

    def _inspection_due(self) -> float:
        if not self.is_calm:
            return self._next_check
        began_at = max((cell.began_at for cell in self._cells.values()), default=0.0)
        return max(self._next_check, began_at + min(self.config.hang_after_s, 1.0))

    def next_time(self, now: float) -> float | None:
        """Return when to call :meth:`actions` again if no event comes before; None: only after an event."""
        if not self.running:
            return None
        return max(now + 0.01, self._inspection_due())
