"""The state machine of one cell, fed with every order of events."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from jupyter_disttrain.cluster.cell_state import CellState
from jupyter_disttrain.cluster.events import Died, Event, Replied, Said, Silent
from jupyter_disttrain.cluster.merging import SHORT_TEXT, differing_part
from jupyter_disttrain.errors import RankFailure
from jupyter_disttrain.messages import RankDeath

if TYPE_CHECKING:
    from collections.abc import Sequence

RANKS = 3
HOSTS = {rank: f"node{rank}" for rank in range(RANKS)}


def replied(rank: int, *, quiet: bool = False, time_s: float = 1.0, **failure: object) -> Replied:
    content = {"status": "error" if failure else "ok", **failure}
    return Replied(rank=rank, time_s=time_s, content=content, buffers=[], quiet=quiet)


def silent(rank: int) -> Silent:
    return Silent(rank=rank, time_s=1.0)


def died(rank: int, stderr: str = "", **how: int | None) -> Died:
    told = {"exit_code": None, "signal_number": None} | how
    common = {
        "engine": f"e{rank}",
        "pid": 7,
        "host": HOSTS[rank],
        "stderr_tail": stderr,
        "crash": "",
        "expected": False,
    }
    record = RankDeath.from_content(common | told)
    return Died(rank=rank, time_s=1.0, record=record)


EVENTS = st.one_of(
    st.builds(silent, st.integers(0, RANKS - 1)),
    st.builds(replied, st.integers(0, RANKS - 1), quiet=st.booleans()),
    st.builds(lambda rank: replied(rank, ename="ValueError", evalue="bad"), st.integers(0, RANKS - 1)),
    st.builds(lambda rank: died(rank, exit_code=3), st.integers(0, RANKS - 1)),
    st.builds(lambda rank: Said(rank=rank, time_s=1.0, stream="stdout", text="x"), st.integers(0, RANKS - 1)),
)


def has_ended(rank: int, events: Sequence[Event]) -> bool:
    """A death ends a rank; a reply does when it was quiet, or when the idle message is there too."""
    own = [event for event in events if event.rank == rank]
    is_silent = any(isinstance(event, Silent) for event in own)
    return any(isinstance(event, Died) or (isinstance(event, Replied) and (event.quiet or is_silent)) for event in own)


@given(st.lists(EVENTS, max_size=30))
def test_it_is_done_exactly_when_every_rank_has_ended(events: list[Event]) -> None:
    state = CellState(range(RANKS), HOSTS)
    for count, event in enumerate(events, start=1):
        state.apply(event)
        ended = {rank for rank in range(RANKS) if has_ended(rank, events[:count])}
        assert state.running == set(range(RANKS)) - ended
        assert state.done == (len(ended) == RANKS)


@given(st.permutations([event for rank in range(RANKS) for event in (replied(rank), silent(rank))]))
def test_the_order_of_replies_and_idle_messages_does_not_matter(events: list[Event]) -> None:
    state = CellState(range(RANKS), HOSTS)
    for event in events:
        assert not state.done
        state.apply(event)
    assert state.done
    assert not state.failures
    assert sorted(state.replies) == [0, 1, 2]


@given(st.lists(EVENTS, max_size=10))
def test_what_comes_after_the_end_changes_nothing(late: list[Event]) -> None:
    state = CellState(range(RANKS), HOSTS)
    for rank in range(RANKS):
        state.apply(replied(rank, quiet=True))
    for event in late:
        state.apply(event)
    assert state.done
    assert not state.failures


def test_ranks_that_fail_alike_are_one_failure_with_the_earliest_first() -> None:
    state = CellState(range(RANKS), HOSTS)
    trace = ["File ipykernel_{}/12.py:3, at 0x7f{}"]
    for rank, time_s in ((0, 5.0), (2, 4.0)):
        here = [line.format(rank, rank) for line in trace]
        state.apply(replied(rank, time_s=time_s, ename="RuntimeError", evalue="peer gone", traceback=here, line=3))
    state.apply(replied(1, time_s=3.0, ename="ValueError", evalue="bad", traceback=["other"], line=2))
    first, second = state.distinct_failures()
    assert first.headline == "rank 1 (node1), line 2: ValueError: bad"
    assert second.headline == "ranks 0,2 (node0, node2), line 3: RuntimeError: peer gone"


def test_an_error_is_one_however_deep_each_rank_was_when_it_came() -> None:
    state = CellState(range(2), HOSTS)
    for rank, times in ((0, 958), (1, 959)):
        text = ["Traceback", f"    \x1b[31m[... skipping similar frames: f at line 1 ({times} times)]\x1b[39m"]
        state.apply(replied(rank, ename="RecursionError", evalue="too deep", traceback=text, line=1))
    assert [failure.ranks for failure in state.distinct_failures()] == [(0, 1)]


def test_a_death_is_named_with_its_signal_and_last_words() -> None:
    state = CellState([0], HOSTS)
    state.apply(died(0, stderr="first\nlast\n", signal_number=9))
    (failure,) = state.distinct_failures()
    assert failure.headline == (
        "rank 0 (node0): RankDied: process 7 was killed by SIGKILL: kill -9, or the kernel's out-of-memory killer"
    )
    assert failure.traceback == ("Its last lines on stderr:", "first", "last")


def test_many_ranks_that_differ_stay_readable_in_the_order_of_the_ranks() -> None:
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
    told = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines[3:]]
    assert [line.partition(":")[0] for line in told] == [*(f"rank {rank}" for rank in range(1, 24)), "ranks 24-63"]
    assert told[0].startswith("rank 1: OSError: … no file cat1.jpg in /a/very")
    assert told[0].endswith("; note: shard 1")
    assert all(len(line) < 500 for line in told)
    assert told[-1] == "ranks 24-63: others; each rank's is in by_rank of this RankFailure"


def test_failures_without_a_line_are_one_only_if_they_say_the_same() -> None:
    state = CellState(range(3), HOSTS)
    for rank, text in enumerate(("no file 1", "no file 2", "no space")):
        state.apply(replied(rank, ename="ScriptError", evalue=text, traceback=[f"ScriptError: {text}"]))
    assert [failure.ranks for failure in state.distinct_failures()] == [(0, 1), (2,)]


@given(st.text(max_size=400), st.text(max_size=400))
def test_what_differs_is_never_long(text: str, other: str) -> None:
    assert len(differing_part(text, other)) <= 2 * SHORT_TEXT + 200
