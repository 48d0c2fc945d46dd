"""State machines of a cell and of collective counts, with simulated events; ``test_collective_steps`` runs ranks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from jupyter_disttrain.client.cells.cell_state import CellState
from jupyter_disttrain.client.cells.events import Died, Event, OutputEnded, Printed, Replied
from jupyter_disttrain.client.cells.failures import SHORT_TEXT, differing_part
from jupyter_disttrain.client.recovery.collective_steps import Steps
from jupyter_disttrain.errors import RankFailure
from jupyter_disttrain.protocol.rank_death import RankDeath

if TYPE_CHECKING:
    from collections.abc import Sequence

RANKS = 3
HOSTS = {rank: f"node{rank}" for rank in range(RANKS)}


def replied(rank: int, *, quiet: bool = False, time_s: float = 1.0, **failure: object) -> Replied:
    content = {"status": "error" if failure else "ok", **failure}
    return Replied(rank=rank, time_s=time_s, content=content, buffers=[], quiet=quiet)


def idle(rank: int) -> OutputEnded:
    return OutputEnded(rank=rank, time_s=1.0)


def died(rank: int, stderr: str = "", **how: int | None) -> Died:
    status = {"exit_code": None, "signal_number": None} | how
    common = {
        "engine": f"e{rank}",
        "pid": 7,
        "host": HOSTS[rank],
        "stderr_tail": stderr,
        "crash": "",
        "expected": False,
    }
    record = RankDeath.from_content(common | status)
    return Died(rank=rank, time_s=1.0, record=record)


EVENTS = st.one_of(
    st.builds(idle, st.integers(0, RANKS - 1)),
    st.builds(replied, st.integers(0, RANKS - 1), quiet=st.booleans()),
    st.builds(lambda rank: replied(rank, ename="ValueError", evalue="bad"), st.integers(0, RANKS - 1)),
    st.builds(lambda rank: died(rank, exit_code=3), st.integers(0, RANKS - 1)),
    st.builds(lambda rank: Printed(rank=rank, time_s=1.0, stream="stdout", text="x"), st.integers(0, RANKS - 1)),
)


def has_ended(rank: int, events: Sequence[Event]) -> bool:
    """A death ends a rank; so does a reply after its last output, or together with the idle message."""
    own = [event for event in events if event.rank == rank]
    is_silent = any(isinstance(event, OutputEnded) for event in own)
    return any(isinstance(event, Died) or (isinstance(event, Replied) and (event.quiet or is_silent)) for event in own)


@given(st.lists(EVENTS, max_size=30))
def test_cell_is_done_exactly_when_every_rank_has_ended(events: list[Event]) -> None:
    state = CellState(range(RANKS), HOSTS)
    for count, event in enumerate(events, start=1):
        state.apply(event)
        ended = {rank for rank in range(RANKS) if has_ended(rank, events[:count])}
        assert state.running == set(range(RANKS)) - ended
        assert state.done == (len(ended) == RANKS)


@given(st.permutations([event for rank in range(RANKS) for event in (replied(rank), idle(rank))]))
def test_order_of_replies_and_idle_messages_does_not_matter(events: list[Event]) -> None:
    state = CellState(range(RANKS), HOSTS)
    for event in events:
        assert not state.done
        state.apply(event)
    assert state.done
    assert not state.failures
    assert sorted(state.replies) == [0, 1, 2]


@given(st.lists(EVENTS, max_size=10))
def test_messages_after_the_end_change_nothing(late: list[Event]) -> None:
    state = CellState(range(RANKS), HOSTS)
    for rank in range(RANKS):
        state.apply(replied(rank, quiet=True))
    for event in late:
        state.apply(event)
    assert state.done
    assert not state.failures


def test_equal_failures_are_merged_and_sorted_by_time() -> None:
    state = CellState(range(RANKS), HOSTS)
    trace = ["File ipykernel_{}/12.py:3, at 0x7f{}"]
    for rank, time_s in ((0, 5.0), (2, 4.0)):
        here = [line.format(rank, rank) for line in trace]
        state.apply(replied(rank, time_s=time_s, ename="RuntimeError", evalue="peer gone", traceback=here, line=3))
    state.apply(replied(1, time_s=3.0, ename="ValueError", evalue="bad", traceback=["other"], line=2))
    first, second = state.distinct_failures()
    assert first.headline == "rank 1 (node1), line 2: ValueError: bad"
    assert second.headline == "ranks 0,2 (node0, node2), line 3: RuntimeError: peer gone"


def test_equal_errors_are_merged_whatever_their_stack_depth() -> None:
    state = CellState(range(2), HOSTS)
    for rank, times in ((0, 958), (1, 959)):
        text = ["Traceback", f"    \x1b[31m[... skipping similar frames: f at line 1 ({times} times)]\x1b[39m"]
        state.apply(replied(rank, ename="RecursionError", evalue="too deep", traceback=text, line=1))
    assert [failure.ranks for failure in state.distinct_failures()] == [(0, 1)]


def test_death_is_reported_with_signal_and_last_stderr_lines() -> None:
    state = CellState([0], HOSTS)
    state.apply(died(0, stderr="first\nlast\n", signal_number=9))
    (failure,) = state.distinct_failures()
    assert failure.headline == (
        "rank 0 (node0): RankDied: process 7 was killed by SIGKILL: kill -9, or the kernel's out-of-memory killer"
    )
    assert failure.traceback == ("Last lines on stderr:", "first", "last")


def in_step() -> Steps:
    steps = Steps()
    steps.formed({rank: {"collectives": {"0": 1}} for rank in range(RANKS)}, "session/1")
    return steps


def cell(steps: Steps, totals: dict[int, int], failed: set[int] | None = None, group: str = "0") -> bool:
    """Run a cell on some ranks; return whether the groups have to be formed again."""
    steps.sent(totals)
    failed = failed or set()
    reports = {rank: {"collectives": {group: total}} for rank, total in totals.items()}
    replies = [steps.replied(rank, "session/1", reports[rank], failed=rank in failed) for rank in totals]
    return any(replies)


@given(st.lists(st.tuples(st.sets(st.integers(0, RANKS - 1), min_size=1), st.booleans(), st.data()), max_size=8))
def test_failed_cell_detects_mismatch_left_by_earlier_cells(cells: list[tuple[set[int], bool, st.DataObject]]) -> None:
    steps = in_step()
    totals = dict.fromkeys(range(RANKS), 1)
    for ranks, fails, data in cells:
        for rank in ranks:
            totals[rank] += data.draw(st.integers(0, 2))
        formed_again = cell(steps, {rank: totals[rank] for rank in ranks}, ranks if fails else set())
        assert formed_again == (fails and len(set(totals.values())) > 1)
        if formed_again:
            steps.formed({rank: {"collectives": {"0": 1}} for rank in range(RANKS)}, "session/1")
            totals = dict.fromkeys(range(RANKS), 1)


def test_rank_with_pending_reply_is_compared_after_its_reply() -> None:
    steps = in_step()
    steps.sent(range(RANKS))
    assert not steps.replied(0, "session/1", {"collectives": {"0": 2}}, failed=True), (
        "the others may be about to call it"
    )
    assert not steps.replied(1, "session/1", {"collectives": {"0": 2}}, failed=False)
    assert steps.notes() == []
    assert steps.replied(2, "session/1", {"collectives": {"0": 1}}, failed=False), (
        "it has ended well, but never meets the others"
    )


def test_lag_over_successful_cells_is_reported_once() -> None:
    steps = in_step()
    assert not cell(steps, {0: 3})
    assert not cell(steps, {1: 2})
    (note,) = steps.notes()
    assert note.startswith(
        "out of step: rank 0 is 2 collectives ahead, rank 1 is 1 collective ahead of rank 2, so the next one"
    )
    assert steps.notes() == []
    assert not cell(steps, {1: 3, 2: 3})
    assert steps.notes() == []
    assert not cell(steps, {0: 3, 1: 3, 2: 3}, {0, 1, 2}), "all counts are equal again"


def test_only_members_of_one_group_are_compared() -> None:
    steps = in_step()
    cell(steps, {0: 4, 1: 4}, group="1 of ranks 0-1")
    assert not cell(steps, {2: 1}, {2})
    assert not cell(steps, {2: 9}, {2}, group="1 of rank 2"), "of the same name, in other ranks"
    assert cell(steps, {0: 5}, {0}, group="1 of ranks 0-1")


def test_counts_restart_for_replaced_ranks_and_new_groups() -> None:
    steps = in_step()
    cell(steps, {0: 5})
    steps.died(0)
    assert not cell(steps, {1: 1, 2: 1}, {1, 2})
    steps.sent([0])  # a reply from the previous group does not count for this one
    steps.formed({rank: {"collectives": {"0": 1}} for rank in (1, 2)}, "session/2")
    assert not steps.replied(0, "session/1", {"collectives": {"0": 7}}, failed=True)


def messages(steps: Steps, ranks: dict[int, dict[str, int]], failed: set[int] | None = None) -> bool:
    """Run a cell on ranks that have sent and received this many messages when it ends."""
    steps.sent(ranks)
    report = {rank: {"collectives": {"0": 1}, "messages": counts} for rank, counts in ranks.items()}
    failed = failed or set()
    replies = [steps.replied(rank, "session/1", report[rank], failed=rank in failed) for rank in ranks]
    return any(replies)


def test_unreceived_message_of_failed_cell_is_not_matched_to_a_later_cell() -> None:
    for order in ((0, 1, 2), (2, 1, 0)):
        steps = in_step()
        messages(steps, {0: {}, 1: {}, 2: {}})
        counts = {0: {"0>1": 1}, 1: {}, 2: {}}
        assert messages(steps, {rank: counts[rank] for rank in order}, {0}), "sent but not received"
    steps = in_step()
    messages(steps, {0: {}, 1: {}, 2: {}})
    assert not messages(steps, {0: {"0>1": 1}, 1: {"0>1": 1}, 2: {}}, {0, 1}), "sent and received"
    assert not messages(steps, {0: {"0>1": 2}}), "it is received in a later cell"
    assert not messages(steps, {1: {"0>1": 1}, 2: {}}, {1, 2}), "the receiving cell has not started when it fails"
    assert messages(steps, {1: {"0>1": 3}}, {1}), "more than was sent"


def test_mismatch_among_many_ranks_stays_readable_in_rank_order() -> None:
    hosts = dict.fromkeys(range(64), "node0")
    state = CellState(range(64), hosts)
    for rank in reversed(range(64)):
        text = f"no file cat{rank}.jpg in " + "/a/very/long/path" * 500
        details = [f"note: shard {rank}"]
        state.apply(replied(rank, ename="OSError", evalue=text, traceback=["trace", text], line=3, details=details))
    (failure,) = state.distinct_failures()
    assert failure.where == "ranks 0-63 (node0), line 3"
    assert "cat0.jpg" in failure.evalue
    lines = RankFailure([failure], state.failures)._render_traceback_()
    shown = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines[3:]]
    assert [line.partition(":")[0] for line in shown] == [*(f"rank {rank}" for rank in range(1, 24)), "ranks 24-63"]
    assert shown[0].startswith("rank 1: OSError: … no file cat1.jpg in /a/very")
    assert shown[0].endswith("; note: shard 1")
    assert all(len(line) < 500 for line in shown)
    assert shown[-1] == "ranks 24-63: others; each rank's is in by_rank of this RankFailure"


def test_failures_without_a_line_merge_only_if_their_text_is_equal() -> None:
    state = CellState(range(3), HOSTS)
    for rank, text in enumerate(("no file 1", "no file 2", "no space")):
        state.apply(replied(rank, ename="ScriptError", evalue=text, traceback=[f"ScriptError: {text}"]))
    assert [failure.ranks for failure in state.distinct_failures()] == [(0, 1), (2,)]


@given(st.text(max_size=400), st.text(max_size=400))
def test_mismatch_summary_is_bounded(text: str, other: str) -> None:
    assert len(differing_part(text, other)) <= 2 * SHORT_TEXT + 200
