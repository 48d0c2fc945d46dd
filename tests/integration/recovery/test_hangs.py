"""A hang is explained, and waiting ranks are released."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain.errors import CellTimeoutError, RankFailure
from jupyter_disttrain.protocol.time_limits import LONG_SECONDS

from ...support.process_tools import wait_until
from ...support.recovery_tools import holding_gil, send_signal, stop, waits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_disttrain import Cluster

pytestmark = pytest.mark.usefixtures("pids")


def test_hang_is_explained(three: Cluster) -> None:
    code = "import time\nx = torch.ones(30, 2)\nif rank != 1:\n    dist.all_reduce(x)\nelse:\n    time.sleep(1000)"
    run = three.run(code, block=False)
    assert wait_until(waits(run, {0, 2}, "all_reduce"))
    assert wait_until(lambda: "at line 6" in three.where()[-1])  # rank 1 may be slower
    lines = three.where()
    number = lines[0].split("number ")[1].split()[0]
    assert lines == [
        f"ranks 0,2: waits in all_reduce number {number} (Float 30x2) at line 4: dist.all_reduce(x)",
        "rank 1: in Python code at line 6: time.sleep(1000)",
    ]
    assert wait_until(lambda: run.hang == lines)
    assert wait_until(lambda: (run._supervisor.stacks.collect({0}, 5)[0].waits_s or 0) > LONG_SECONDS)
    failure = stop(three, run)
    assert "\n  ".join(["when it was interrupted:", *lines]) in failure.notes
    assert three.where() == ["ranks 0-2: idle"]


def test_pending_async_collective_is_a_wait_only_while_it_is_waited_for(three: Cluster) -> None:
    start = (
        "import time\n"
        "if rank == 0: work = dist.all_reduce(torch.ones(2), async_op=True)\n"
        "while rank: time.sleep(0.01)\n"
    )
    last = {"rank 0: in Python code at": "while True: time.sleep(0.01)", "rank 0: waits in all_red": "work.wait()"}
    for expected, code in last.items():
        run = three.run(start + code, block=False)
        assert wait_until(lambda expected=expected: expected in "\n".join(three.where()))
        stop(three, run)


def test_ended_ranks_and_ranks_without_the_cell_are_distinguished(three: Cluster) -> None:
    run = three.run("if rank == 0: dist.barrier()", "0-1", block=False)
    assert wait_until(waits(run, {0}))
    assert wait_until(lambda: "rank 1: has ended the cell" in three.where())
    assert "rank 2: in no cell" in three.where()
    stop(three, run)


def test_failed_rank_is_reported_as_failed_while_others_continue(three: Cluster) -> None:
    code = "import time\nif rank == 1: raise ValueError('the cause\\nand more')\nwhile True: time.sleep(0.01)"
    run = three.run(code, block=False)
    assert wait_until(lambda: "rank 1: its cell failed: ValueError: the cause" in three.where())
    assert wait_until(lambda: "ranks 0,2: in Python code at line 3: while True: time.sleep(0.01)" in three.where())
    stop(three, run)


@pytest.fixture
def no_hang_reports(three: Cluster) -> Iterator[Cluster]:
    """Ranks whose cells report no wait, however long it takes."""
    before = three.config.hang_after_s
    three.change(hang_after_s=1e6)
    three.run("import time; x = torch.ones(4)")
    yield three
    three.change(hang_after_s=before)


@pytest.mark.parametrize(
    ("code", "output"),
    [
        pytest.param(
            "dist.all_reduce(x) if rank else dist.broadcast(x, 1)",
            "rank 0 in broadcast (Float 4); ranks 1-2 in all_reduce (Float 4)",
            id="other operations",
        ),
        pytest.param(
            "time.sleep(2)  # past the first look\n"
            "if rank == 0: dist.broadcast(x, 0)\nelif rank == 1: dist.all_reduce(x)\nelse: time.sleep(1000)",
            "rank 0 in broadcast (Float 4); rank 1 in all_reduce (Float 4)",
            id="one of them came through",
        ),
        pytest.param(
            "dist.all_reduce(torch.ones(3 + (rank == 2)))",
            "ranks 0-1 in all_reduce (Float 3); rank 2 in all_reduce (Float 4)",
            id="other sizes",
        ),
    ],
)
def test_certain_mismatch_is_reported_at_once(no_hang_reports: Cluster, code: str, output: str) -> None:
    run = no_hang_reports.run(code, block=False)
    line = rf"collective number \d+ is not the same on all ranks, so it can't complete: {re.escape(output)}"
    assert wait_until(lambda: any(re.fullmatch(line, each) for each in run.hang))
    assert re.fullmatch(line, no_hang_reports.where()[0])
    failure = stop(no_hang_reports, run)
    assert any(note.startswith("when it was interrupted") and output in note for note in failure.notes)


def test_groups_are_distinguished_and_a_differing_root_is_suggested(no_hang_reports: Cluster) -> None:
    no_hang_reports.run("pair, other = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])")
    run = no_hang_reports.run("dist.all_reduce(x, group=other if rank == 1 else pair)", block=False)
    assert wait_until(waits(run, {0, 1, 2}))
    assert [line.split(" (")[0].rpartition(" of ")[0] for line in no_hang_reports.where()] == [
        "ranks 0,2: waits in all_reduce number 1",
        "rank 1: waits in all_reduce number 1",
    ]
    stop(no_hang_reports, run)
    run = no_hang_reports.run("dist.broadcast(x, src=0 if rank else 1)", block=False)
    assert wait_until(waits(run, {0, 1, 2}))
    assert no_hang_reports.where()[1:] == ["all of them wait in it; check that they pass the same src or dst"]
    stop(no_hang_reports, run)


def test_hang_of_an_earlier_cell_is_not_attributed_to_the_next(no_hang_reports: Cluster) -> None:
    first = no_hang_reports.run("if rank: dist.barrier()", block=False)
    assert wait_until(waits(first, {1, 2}))
    no_hang_reports.change(hang_after_s=0.2)
    assert wait_until(lambda: first.hang != [])
    stop(no_hang_reports, first)
    following = no_hang_reports.run("time.sleep(0.5)", block=False)
    messages = []
    while not following.done:
        messages += following.hang
    assert following.done
    assert messages == []
    no_hang_reports.change(hang_after_s=0.0)
    calm = no_hang_reports.run("time.sleep(1.5)", block=False)
    while not calm.done:
        messages += calm.hang
    assert messages == []


def test_timeout_reports_which_rank_waited_for_which(no_hang_reports: Cluster) -> None:
    with pytest.raises(CellTimeoutError) as caught:
        no_hang_reports.run("if rank: dist.barrier()", timeout_s=2 * LONG_SECONDS)
    (note,) = caught.value.notes
    first, *rest = note.split("\n")
    assert first == "when it was interrupted:"
    assert rest[0].startswith("  ranks 1-2: waits in barrier number")
    assert "\n".join(rest) in "".join(caught.value._render_traceback_())


@pytest.mark.parametrize(
    ("code", "waiting"),
    [
        pytest.param("if rank == 0: dist.barrier()", {0}, id="nobody else came"),
        pytest.param(
            "if rank < 2:\n    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)\ndist.all_reduce(x)\n"
            "if rank == 2: dist.barrier()",
            {2},
            id="messages between two are not counted",
        ),
        pytest.param(
            "dist.all_reduce([torch.ones(4), torch.ones(2, 2), None][rank]) if rank < 2 else time.sleep(1000)",
            {0, 1},
            id="as many numbers in another shape",
        ),
        pytest.param(
            "dist.scatter(x, [x] * 3 if rank == 0 else None, 0) if rank < 2 else time.sleep(1000)",
            {0},
            id="the root gives more",
        ),
    ],
)
def test_collectives_that_may_complete_are_not_reported_as_mismatch(
    no_hang_reports: Cluster, code: str, waiting: set[int]
) -> None:
    for _ in range(2):  # the second time in a new group, whose sequence numbers meant other collectives before
        no_hang_reports.run("for _ in range(3): dist.all_reduce(x)")
        run = no_hang_reports.run(code, block=False)
        assert wait_until(waits(run, waiting))
        assert not any("can't complete" in line for line in no_hang_reports.where())
        assert run.hang == []
        stop(no_hang_reports, run)
        assert no_hang_reports.where() == ["ranks 0-2: idle"]


def test_stopped_rank_is_reported_as_not_responding(three: Cluster, pids: dict[int, int]) -> None:
    run = three.run("import time\nif rank == 1: time.sleep(1000)\ndist.barrier()", block=False)
    assert wait_until(waits(run, {0, 2}))
    os.kill(pids[1], signal.SIGSTOP)
    try:
        assert wait_until(lambda: any("rank 1: not responding for" in line for line in three.where(0.1)))
    finally:
        os.kill(pids[1], signal.SIGCONT)
    stop(three, run)


@pytest.mark.parametrize(
    ("stopped", "waiting"),
    [
        ("dist.irecv(big, 0).wait()", "dist.send(big, 1)"),  # half of it is sent
        ("dist.isend(big, 0).wait()", "dist.recv(big, 1)"),  # half of it is received
    ],
)
def test_rank_waiting_for_the_rest_of_a_message_is_released(
    three: Cluster, pids: dict[int, int], stopped: str, waiting: str
) -> None:
    receiver = 1 if "irecv" in stopped else 0
    three.run(f"""import threading; big = torch.full((125_000_000,), float(rank))
def stop_rank_1():
    while big[0] == rank:
        pass  # nothing has come yet
    os.kill({pids[1]}, 19)
if rank == {receiver}:
    threading.Thread(target=stop_rank_1).start()""")
    run = three.run(f"if rank == 1:\n    {stopped}\nif rank == 0:\n    {waiting}", block=False)
    assert wait_until(waits(run, {0}))
    assert wait_until(lambda: psutil.Process(pids[1]).status() == psutil.STATUS_STOPPED)
    three.interrupt()
    assert wait_until(lambda: three.table[0].state == "idle"), three.where()
    os.kill(pids[1], signal.SIGCONT)
    with pytest.raises(RankFailure):
        run.wait()


def test_interrupt_of_a_stopped_rank_is_delivered_when_it_continues(three: Cluster, pids: dict[int, int]) -> None:
    for _ in range(5):  # while it is stopped, Linux may deliver a process's signal to any of its threads
        run = three.run("import time\ntime.sleep(1000)", 1, block=False)
        # Python checks for signals before it calls sleep(), and in there only after a wake-up.
        assert wait_until(lambda: Path(f"/proc/{pids[1]}/wchan").read_text() == "hrtimer_nanosleep")
        os.kill(pids[1], signal.SIGSTOP)
        three.interrupt()
        assert send_signal(three, 1, 0)["status"] == "ok"  # so the nanny has passed the interrupt on
        os.kill(pids[1], signal.SIGCONT)
        with pytest.raises(RankFailure):
            run.wait()


def test_stack_collection_does_not_interrupt_c_code_before_it_counts_as_a_hang(torchless: Cluster) -> None:
    code = "import ctypes\n0 if rank else ctypes.PyDLL(None).sleep(6)"  # returns the remaining time
    assert torchless.run(code).results == {0: 0, 1: 0}


def test_rank_that_holds_the_gil_is_detected_from_outside(three: Cluster, tmp_path: Path) -> None:
    with holding_gil(tmp_path) as call:
        run = three.run(f"import ctypes, os\nif rank == 1:\n    {call}\ndist.barrier()", block=False)
        assert wait_until(lambda: any("in code that holds the GIL, at line 3" in line for line in three.where(1.1)))
    run.wait()


def test_rank_that_is_slow_to_reply_is_described_by_its_heartbeat(three: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "let-go"
    code = f"""import os, time
from jupyter_disttrain.features.telemetry.rank import stacks
def stay(*_):
    while not os.path.exists({str(path)!r}): time.sleep(0.01)
original = stacks.mpi_call
if rank == 1: stacks.mpi_call = stay  # called on the thread that replies
stay()
stacks.mpi_call = original"""
    run = three.run(code, block=False)
    try:
        assert wait_until(lambda: "rank 1: in Python code at line 4" in three.where(1.1))
    finally:
        path.touch()
        run.wait()
