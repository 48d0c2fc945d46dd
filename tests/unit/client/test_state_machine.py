"""The state machine of recovery under any order of events; ``test_recovery`` uses real ranks.

The ranks are simulated, but behave as real ones: a wait in a collective ends only by a release, Python code ends
by itself or by an interrupt, and a requested action completes some time later, or fails.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jupyter_disttrain.client.recovery.state_machine import FORM_LIMIT, REPLACE_LIMIT, Action, Do, Phase, Recovery
from jupyter_disttrain.config.cluster import ClusterConfig
from jupyter_disttrain.protocol.time_limits import INTERRUPT_SECONDS

RANKS = 3
ranks = st.integers(0, RANKS - 1)


class Session(RuleBasedStateMachine):
    """Simulated ranks and a simulated user."""

    def __init__(self) -> None:
        super().__init__()
        self.state = Recovery(RANKS, ClusterConfig(grace_s=3.0, hang_after_s=30.0))
        self.now = 0.0
        self.waiting: dict[int, float] = {}  # the time at which the wait began
        self.in_python: set[int] = set()
        self.looking = self.forming = False
        self.replacing: set[int] = set()
        self.reached = True  # an aborted group has no members

    def act(self) -> None:
        for action in self.state.actions(self.now):
            if action.do is Do.INSPECT:
                self.looking = True
            elif action.do is Do.RELEASE:
                for rank in list(self.waiting):
                    self.end(rank, failed=True, broken=True)
                self.reached = False
            elif action.do is Do.REPLACE:
                assert action.rank is not None
                assert action.rank not in self.replacing, "replaced twice at once"
                self.replacing.add(action.rank)
            elif action.do is Do.FORM:
                assert not self.state.running, "the group is formed while a cell runs"
                assert not self.state.dead, "the group is formed without a rank"
                assert not self.forming, "the group is formed twice at once"
                self.forming = True

    def end(self, rank: int, *, failed: bool, broken: bool) -> None:
        self.waiting.pop(rank, None)
        self.in_python.discard(rank)
        self.state.on_reply(rank, self.now, failed=failed, broken=broken)

    # What the user and the ranks do

    @rule(chosen=st.sets(ranks, min_size=1), waits=st.sets(ranks))
    @precondition(lambda self: self.state.settled and not self.state.running and self.state.phase is not Phase.LOST)
    def send(self, chosen: set[int], waits: set[int]) -> None:
        chosen -= self.state.dead
        for rank in chosen:
            self.state.on_sent(rank, self.now)
            if rank in waits:
                self.waiting[rank] = self.now
            else:
                self.in_python.add(rank)
        self.act()

    @rule(rank=ranks, failed=st.booleans())
    def reply(self, rank: int, failed: bool) -> None:
        if rank in self.in_python:
            self.end(rank, failed=failed, broken=False)
            self.act()

    @rule(rank=ranks)
    def enter_a_collective(self, rank: int) -> None:
        if rank in self.in_python:
            self.in_python.discard(rank)
            self.waiting[rank] = self.now

    @rule(rank=ranks)
    def die(self, rank: int) -> None:
        if rank not in self.state.dead:
            self.waiting.pop(rank, None)
            self.in_python.discard(rank)
            self.state.on_death(rank, self.now)
            self.act()

    @rule(forced=st.booleans())
    def interrupt(self, forced: bool) -> None:
        if self.state.running:
            self.state.on_interrupt(self.now, forced=forced)
            for rank in list(self.in_python):
                self.end(rank, failed=True, broken=False)
            self.act()

    # Requested actions complete

    @rule(seconds=st.floats(0.01, 10.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.act()

    @rule()
    def see(self) -> None:
        if self.looking:
            self.looking = False
            for rank in self.state.running:
                since = self.waiting.get(rank)
                self.state.on_inspected(rank, self.now, None if since is None else self.now - since)
            self.act()

    @rule(rank=ranks, well=st.booleans())
    def come_up(self, rank: int, well: bool) -> None:
        if rank in self.replacing:
            self.replacing.discard(rank)
            self.state.on_replaced(rank, well=well)
            self.act()

    @rule(well=st.booleans())
    def formed(self, well: bool) -> None:
        if self.forming:
            self.forming = False
            self.state.on_formed(well=well and not self.state.dead)
            self.act()

    # Invariants

    @invariant()
    def dead_ranks_run_nothing(self) -> None:
        assert not self.state.running & self.state.dead

    def teardown(self) -> None:
        """From any state, interrupts and time make every rank usable again."""
        for rank in list(self.in_python):
            self.end(rank, failed=False, broken=False)
        hopeless = any(member.deaths > REPLACE_LIMIT for member in self.state.members if member.dead)
        if self.waiting:
            self.interrupt(forced=False)
        for _ in range(40):
            self.wait(1.0)
            self.see()
            for rank in range(RANKS):
                self.come_up(rank, well=True)
            self.formed(well=True)
        assert self.state.settled
        assert not self.waiting
        if not hopeless and self.state.phase is not Phase.LOST:
            assert self.state.phase is Phase.FORMED


TestSession = Session.TestCase
TestSession.settings = settings(max_examples=200, stateful_step_count=40)


def actions(state: Recovery, now: float) -> list[Do]:
    return [action.do for action in state.actions(now)]


def running(world_size: int, **rules: Any) -> Recovery:
    """Return the state of ranks that have begun a cell at time 0."""
    state = Recovery(world_size, ClusterConfig(**rules))
    for rank in range(world_size):
        state.on_sent(rank, 0.0)
    return state


def test_other_ranks_keep_running_for_a_grace_period_after_a_failure() -> None:
    state = running(2, grace_s=3.0)
    state.on_reply(1, 1.0, failed=True, broken=False)
    assert actions(state, 1.0) == [Do.INSPECT]
    state.on_inspected(0, 1.1, 0.9)
    assert actions(state, 1.1) == []
    state.on_inspected(0, 3.2, 3.0)
    assert Do.RELEASE in actions(state, 3.2)
    state.on_reply(0, 3.3, failed=True, broken=True)
    assert actions(state, 3.3) == [Do.FORM]
    assert not state.settled
    state.on_formed(well=True)
    assert state.settled


def test_short_waits_do_not_cause_a_release() -> None:
    state = running(3, grace_s=3.0)
    state.on_reply(1, 1.0, failed=True, broken=False)
    for second in range(2, 100):
        state.on_inspected(0, float(second), 0.2)  # ranks 0 and 2 continue to train in their own group
        assert Do.RELEASE not in actions(state, float(second))


def test_forming_the_group_stops_after_repeated_failures() -> None:
    state = Recovery(2, ClusterConfig())
    state.on_death(1, 0.0)
    assert actions(state, 0.0) == [Do.REPLACE]
    state.on_replaced(1, well=True)
    for _ in range(FORM_LIMIT):
        assert actions(state, 1.0) == [Do.FORM]
        state.on_formed(well=False)
    assert state.phase is Phase.LOST
    assert state.settled


@pytest.mark.parametrize(("choice", "what"), [("reset", Do.RESET), ("stop", Do.STOP)])
def test_configured_action_runs_once_the_cell_has_ended(choice: str, what: Do) -> None:
    state = running(2, on_rank_death=choice)
    state.on_death(1, 1.0)
    assert actions(state, 1.0)[0] is Do.RELEASE
    state.on_reply(0, 1.1, failed=True, broken=True)
    assert state.after_death.endswith(f"(--on-rank-death {choice})")
    assert actions(state, 1.1) == [what]
    assert actions(state, 1.2) == []
    assert not state.settled


@pytest.mark.parametrize("for_good", [False, True])
def test_failed_start_of_a_new_process_is_retried_unless_it_is_impossible(for_good: bool) -> None:
    state = Recovery(2, ClusterConfig())
    state.on_death(1, 0.0)
    for _ in range(1 if for_good else REPLACE_LIMIT):
        assert actions(state, 1.0) == [Do.REPLACE]
        assert not state.settled
        state.on_replaced(1, well=False, for_good=for_good)
    assert state.phase is Phase.LOST
    assert actions(state, 1.0) == []
    assert state.settled
    state.on_asked(1)  # the user may still retry
    assert actions(state, 2.0) == [Do.REPLACE]
    state.on_replaced(1, well=True)
    assert actions(state, 2.0) == [Do.FORM]


def test_interrupt_releases_ranks_seen_waiting_after_it_and_a_second_one_all() -> None:
    state = running(2)
    state.on_inspected(0, 1.0, 0.001)
    state.on_interrupt(2.0, forced=False)
    state.on_inspected(0, 1.9, 0.001)  # a reply that was in transit
    assert Do.RELEASE not in actions(state, 2.2)
    state.on_inspected(0, 2.2, 0.2)
    assert Do.RELEASE in actions(state, 2.3)
    state = running(2)
    state.on_interrupt(1.0, forced=False)
    assert Do.RELEASE not in actions(state, 1.2)
    state.on_interrupt(2.0, forced=False)
    assert Do.RELEASE in actions(state, 2.0)


def test_ranks_are_inspected_once_an_interrupt_had_time_to_end_their_cell_however_young_it_is() -> None:
    for young_s in (0.0, 0.4, 5.0):
        state = running(2)
        state.on_interrupt(young_s, forced=False)
        actions(state, young_s)
        assert Do.INSPECT in actions(state, young_s + INTERRUPT_SECONDS)


def test_failure_in_one_cell_does_not_release_ranks_waiting_in_another() -> None:
    state = Recovery(3, ClusterConfig(grace_s=1.0))
    state.on_sent(0, 0.0, cell=1)
    for rank in (1, 2):
        state.on_sent(rank, 0.0, cell=2)
    state.on_reply(1, 1.0, failed=True, broken=False)
    state.on_inspected(0, 5.0, 5.0)
    assert Do.RELEASE not in actions(state, 5.0)
    state.on_inspected(2, 5.0, 4.0)
    assert Do.RELEASE in actions(state, 5.0)


def test_rank_killed_by_the_user_is_replaced_under_any_death_policy() -> None:
    state = Recovery(2, ClusterConfig(on_rank_death="stop"))
    state.on_asked(1)
    state.on_death(1, 0.0)
    assert actions(state, 0.0) == [Do.REPLACE]
    assert state.after_death == "the other ranks keep their variables"
    state.on_replaced(1, well=True)
    assert actions(state, 0.0) == [Do.FORM]
    state.on_death(0, 1.0)
    assert state.after_death == "the cluster ends (--on-rank-death stop)"
    state = Recovery(1, ClusterConfig())
    state.on_death(0, 0.0)
    assert state.after_death == "", "there is no other rank"


def test_rank_stuck_in_mpi_is_killed_after_three_interrupts() -> None:
    state = running(RANKS)
    state.on_reply(0, 0.5, failed=False, broken=False)
    kills = []
    for now in (1.0, 1.2, 1.4, 2.0, 2.9, 3.1, 3.2):
        if now < 2.0:
            state.on_interrupt(now, forced=now > 1.0)
        kills += [(now, action.rank) for action in state.actions(now) if action.do is Do.KILL]
        state.on_inspected(1, now + 0.01, 0.1, in_mpi=True)
        state.on_inspected(2, now + 0.01, 0.1)
    assert kills[:1] == [(3.1, 1)]
    assert {rank for _, rank in kills} == {1}


def test_rank_that_is_being_killed_is_awaited() -> None:
    state = Recovery(2, ClusterConfig())
    state.on_ending(1)
    assert not state.settled
    assert state.actions(0.0) == []  # the group is not formed with it
    state.on_death(1, 1.0)
    assert [action.do for action in state.actions(1.0)] == [Do.REPLACE]
    state.on_replaced(1, well=True)
    assert [action.do for action in state.actions(2.0)] == [Do.FORM]


def test_ranks_not_seen_waiting_are_released_for_a_few_seconds_only() -> None:
    state = Recovery(2, ClusterConfig())
    state.on_sent(0, 0.0)
    state.on_interrupt(1.0, forced=True)
    times = [1.0 + at / 10 for at in range(600)]
    released = [now for now in times if Do.RELEASE in actions(state, now)]
    assert len(released) > 20
    assert max(released) < 20.0
    state.on_interrupt(100.0, forced=False)
    assert Do.RELEASE in actions(state, 100.0)
    state.on_inspected(0, 200.0, 0.0)  # it does wait
    assert Do.RELEASE in actions(state, 200.0)


def test_failed_reset_leaves_the_other_ranks_usable() -> None:
    state = Recovery(2, ClusterConfig(on_rank_death="reset"))
    state.on_death(1, 0.0)
    assert [action.do for action in state.actions(0.0)] == [Do.RESET]
    assert not state.settled
    state.on_end_failed()
    assert state.settled
    assert state.after_death == "the other ranks keep their variables"
    assert state.actions(1.0) == []


def test_programs_end_once_after_a_failure_of_their_cell_and_nothing_is_released_for_them() -> None:
    """They have groups of their own, and an interrupt ends them by itself, which would cut off what they save."""
    state = Recovery(3, ClusterConfig(grace_s=1.0))
    for rank in range(2):
        state.on_sent(rank, 0.0, cell=1, program=True)
    state.on_sent(2, 0.0, cell=2)
    due = {Do.RELEASE, Do.END_PROGRAMS}
    state.on_death(2, 0.1)  # of another cell, before any inspection: the session's group is broken
    assert not due & {action.do for action in state.actions(0.2)}
    for rank in range(2):
        state.on_inspected(rank, 1.0, 0.5, in_program=True)
    state.on_interrupt(2.0, forced=False, ranks=[0, 1])
    state.on_inspected(1, 3.0, 1.0, in_program=True)
    assert not due & {action.do for action in state.actions(4.0)}
    state.on_reply(0, 7.0, failed=True, broken=False)
    assert not due & {action.do for action in state.actions(7.5)}
    assert [action for action in state.actions(8.5) if action.do in due] == [Action(Do.END_PROGRAMS, cell=1)]
    assert not due & {action.do for action in state.actions(9.0)}
