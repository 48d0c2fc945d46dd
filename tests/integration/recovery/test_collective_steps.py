"""Ranks with different collective counts are detected, and resynchronized after a cell that fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.errors import RankFailure

from ...conftest import LAUNCHERS
from ...support.process_tools import wait_until
from ...support.recovery_tools import stop, waits

if TYPE_CHECKING:
    from jupyter_disttrain import Cluster

pytestmark = [pytest.mark.parametrize("three", LAUNCHERS, indirect=True), pytest.mark.usefixtures("pids")]

PENDING = "pending = dist.all_reduce(torch.ones(4), async_op=True)"
# torch's all_reduce is interrupted in Python code on rank 0, between the call of the backend and the wait for it.
CUT = """import signal
whole = vars(dist.ProcessGroup)["allreduce"]
def cut(group, *args):
    dist.ProcessGroup.allreduce = whole
    work = whole(group, *args)
    signal.raise_signal(signal.SIGINT)
    return work
if rank == 0: dist.ProcessGroup.allreduce = cut
dist.all_reduce(torch.ones(4))"""
ALL = "x = torch.full((4,), float(rank)); dist.all_reduce(x); x[0].item()"


def collective_works(cluster: Cluster) -> bool:
    """Return whether a collective ends on all ranks with the right value; a hang would fail by its timeout."""
    run = cluster.run(ALL, timeout_s=20)
    return run.results == dict.fromkeys(range(3), 3.0) and run.notes == []


def test_mismatch_left_by_an_earlier_cell_is_remembered(three: Cluster) -> None:
    note = (
        "out of step: rank 0 is 1 collective ahead of ranks 1-2, so the next one that all ranks call will hang, "
        "unless the others call it first (if it hangs, interrupt it: all are in step again afterwards)"
    )
    assert three.run(f"if rank == 0: {PENDING}").notes == [note]
    assert three.run("1 + 1").notes == [], "it is reported once"
    # Equally many collectives in the interrupted cell, and no rank waits in one.
    run = three.run(f"import time\n{PENDING}\nif rank == 0: time.sleep(100)", block=False)
    assert wait_until(lambda: three.table[1].state == three.table[2].state == "idle" and "line 3" in three.where()[0])
    three.interrupt()
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        run.wait()
    assert collective_works(three)
    # The same, with the interrupt within torch's own code.
    assert three.run(f"if rank == 0: {PENDING}").notes == [note]
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        three.run(CUT, timeout_s=20)
    assert collective_works(three)
    # A cell on one rank is compared with the ranks on which it did not run.
    with pytest.raises(RankFailure, match="ZeroDivisionError"):
        three.run(f"{PENDING}; 1 / 0", 0)
    assert collective_works(three)
    # As the note promises, an interrupt of the hang resynchronizes all ranks.
    assert three.run(PENDING, 0).notes == [note]
    hanging = three.run("dist.all_reduce(torch.ones(4))", block=False)
    assert wait_until(lambda: three.table[1].state == three.table[2].state == "idle")
    stop(three, hanging)
    assert collective_works(three)
    # Subgroups are compared separately.
    three.run("pair = dist.new_group([0, 1])")
    run = three.run("x = torch.ones(4)\nif rank == 1: pending = dist.all_reduce(x, group=pair, async_op=True)")
    assert [text.partition(",")[0] for text in run.notes] == [
        "out of step in group 1 of ranks 0-1: rank 1 is 1 collective ahead of rank 0"
    ]
    with pytest.raises(RankFailure, match="ZeroDivisionError"):
        three.run("1 / 0", 2)
    assert three.run("x = torch.ones(4)\nif rank < 2: dist.all_reduce(x, group=pair)\nx[0].item()").results == {
        0: 2.0,
        1: 2.0,
        2: 1.0,
    }


def test_groups_that_only_some_ranks_make_are_reported_and_do_not_hang_later(three: Cluster) -> None:
    make = "pair = dist.new_group([0])"
    in_all = "all_of = dist.new_group(); x = torch.ones(1); dist.all_reduce(x, group=all_of); x.item()"
    note = "out of step in new_group: rank 0 is 1 call ahead of ranks 1-2"
    assert [text.partition(", so")[0] for text in three.run(make, 0).notes] == [note]
    assert three.run(make, "1-2", timeout_s=20).notes == []
    assert three.run(in_all, timeout_s=20).results == {0: 3.0, 1: 3.0, 2: 3.0}
    with pytest.raises(RankFailure, match="ZeroDivisionError"):
        three.run(f"if rank == 0: {make}\n1 / 0")
    assert three.run(in_all, timeout_s=20).results == {0: 3.0, 1: 3.0, 2: 3.0}
    # Only its own ranks make this one.
    assert three.run("if rank == 1: local = dist.new_group([1], use_local_synchronization=True)").notes == []


def test_ranks_in_step_keep_their_group_when_a_cell_fails(three: Cluster) -> None:
    def generation() -> int:
        return three._session.launch.state.generation

    before = generation()
    with pytest.raises(RankFailure, match="ZeroDivisionError"):  # pending on all ranks equally
        three.run(f"{PENDING}; dist.barrier(); 1 / 0")
    # One rank after the other: while nothing fails, a user may call a collective this way.
    three.run(PENDING, 0)
    three.run("dist.all_reduce(torch.ones(4))", "1-2")
    assert three.run("pending.wait()", 0).notes == []
    # A rank whose cell runs is awaited: it may be about to call what the others have called.
    first = three.run("x = torch.ones(1); dist.all_reduce(x); x.item()", 0, block=False)
    assert wait_until(waits(first, {0}))
    with pytest.raises(RankFailure, match="ZeroDivisionError"):
        three.run("1 / 0", "1-2")
    assert three.run("x = torch.ones(1); dist.all_reduce(x); x.item()", "1-2").results == {1: 3.0, 2: 3.0}
    assert first.wait().results == {0: 3.0}
    # Ranks in a separate group, and messages between two ranks.
    three.run("pair = dist.new_group([1, 2])")
    with pytest.raises(RankFailure, match="ZeroDivisionError"):
        three.run("dist.all_reduce(torch.ones(4), group=pair); 1 / 0", "1-2")
    three.run("if rank == 0: dist.send(torch.ones(1), 1)\nif rank == 1: dist.recv(torch.ones(1), 0)")
    with pytest.raises(RankFailure, match="ZeroDivisionError"):
        three.run("1 / 0")
    assert generation() == before


def test_message_left_by_a_failed_cell_is_not_received_by_a_later_one(three: Cluster) -> None:
    swap = """x = torch.zeros(1)
if rank == 0: dist.send(torch.full((1,), 42.0), 1)
if rank == 1: dist.recv(x, 0)
x.item()"""
    for ranks in ("all", "0"):
        with pytest.raises(RankFailure, match="ZeroDivisionError"):
            three.run("if rank == 0:\n    work = dist.isend(torch.ones(1), 1)\n    1 / 0", ranks)
        assert three.run(swap, timeout_s=20).results == {0: 0.0, 1: 42.0, 2: 0.0}
    # A message sent by a successful cell is received by a later one, whatever fails meanwhile.
    three.run("work = dist.isend(torch.full((1,), 7.0), 1)", 0)
    with pytest.raises(RankFailure, match="ZeroDivisionError"):
        three.run("1 / 0", 1)
    assert three.run("dist.recv(x, group_src=0); x.item()", 1, timeout_s=20).results == {1: 7.0}
