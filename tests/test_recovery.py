"""The session always comes back: interrupts, failures, hangs and deaths in the midst of collectives."""

from __future__ import annotations

import os
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import ClusterClosedError, GivenUpError, RankFailure

from .test_lifecycle import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jupyter_disttrain import CellRun
    from jupyter_disttrain.cluster.events import Event

HOST = socket.gethostname()
SUM = "probe = torch.full((1000,), float(rank + 1)); dist.all_reduce(probe); probe.unique().tolist()"


@pytest.fixture(scope="module", params=["mpi", "local"])
def three(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three ranks that soon lose patience; every test leaves them usable, or that is its failure."""
    with Cluster(n=3, launcher=request.param, grace_s=0.5, hang_after_s=0.5, name="three") as cluster:
        yield cluster


@pytest.fixture
def pids(three: Cluster) -> dict[int, int]:
    """The ranks' processes before the test, each with a variable that must stay."""
    return three.run("import os; kept = rank * 11; os.getpid()").results


def is_whole(cluster: Cluster, pids: dict[int, int]) -> bool:
    """Whether the same processes hold the same variables and can talk to each other."""
    total = float(sum(range(1, cluster.world_size + 1)))
    assert cluster.run(SUM).results == {rank: [total] for rank in range(cluster.world_size)}
    assert cluster.run("(os.getpid(), kept)").results == {rank: (pid, rank * 11) for rank, pid in pids.items()}
    return True


def waits(run: CellRun, ranks: set[int], what: str = "") -> Callable[[], bool]:
    """Whether these ranks are seen waiting for others."""

    def look() -> bool:
        looks = run._guardian.look_now(ranks, 5)
        seen = [look for look in looks.values() if look.waits_s is not None and what in str(look.told)]
        return len(seen) == len(ranks)

    return look


def interrupted(cluster: Cluster, code: str, waiting: set[int], **options: Any) -> RankFailure:
    """Run code, interrupt it once these ranks wait for others, and return how it ended."""
    run = cluster.run(code, block=False, **options)
    assert wait_until(waits(run, waiting))
    cluster.interrupt()
    with pytest.raises(RankFailure) as caught:
        run.wait()
    return caught.value


# Interrupts


@pytest.mark.parametrize(
    ("code", "waiting"),
    [
        ("if rank:\n    dist.barrier()\nelse:\n    while True: pass", {1, 2}),
        ("if rank == 0:\n    dist.all_reduce(torch.ones(1 << 20))", {0}),
        ("if rank == 1:\n    dist.broadcast(torch.ones(8), 0)", {1}),
        ("if rank == 2:\n    dist.recv(torch.ones(8), 0)", {2}),
        ("try:\n    while True: pass\nfinally:\n    dist.barrier() if rank else None", set()),
        ("if rank == 0:\n    dist.destroy_process_group()\n    dist.init_process_group('gloo')", {0}),
        ("if rank == 0:\n    dist.new_group([0, 1])", {0}),
    ],
    ids=["barrier", "all_reduce", "broadcast", "recv", "finally", "rendezvous", "new_group"],
)
def test_an_interrupt_reaches_ranks_that_wait_for_others(
    three: Cluster, pids: dict[int, int], code: str, waiting: set[int]
) -> None:
    error = interrupted(three, code, waiting)
    assert {failure.ename for failure in error.failures} == {"KeyboardInterrupt"}
    assert is_whole(three, pids)


def test_groups_meshes_and_models_that_a_person_holds_go_on_working(three: Cluster, pids: dict[int, int]) -> None:
    three.run(
        "from torch.nn.parallel import DistributedDataParallel\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "pair = dist.new_group([0, 2])\n"
        "held = {'in a list': [pair], 'default': dist.group.WORLD}\n"
        "mesh = init_device_mesh('cpu', (3,))\n"
        "torch.manual_seed(0)\n"
        "model = DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "def step(batch):\n"
        "    loss = model(batch).pow(2).mean()\n"
        "    loss.backward()\n"
        "    with torch.no_grad():\n"
        "        for each in model.parameters(): each -= 0.1 * each.grad\n"
        "        model.zero_grad()\n"
        "step(torch.full((2, 4), float(rank)))"
    )
    # In the midst of a backward pass, which leaves a reducer that waits for the end of its iteration.
    error = interrupted(three, "if rank: step(torch.ones(2, 4))", {1, 2})
    assert {failure.ename for failure in error.failures} == {"KeyboardInterrupt"}
    three.run("model.zero_grad()\nfor number in range(3): step(torch.full((2, 4), float(rank + number)))")
    weights = three.run("model.module.weight.tolist()").results
    assert weights[0] == weights[1] == weights[2]
    code = "one = torch.ones(1)\nif rank != 1: dist.all_reduce(one, group=held['in a list'][0])\none.item()"
    assert three.run(code).results == {0: 2.0, 1: 1.0, 2: 2.0}
    assert three.run("held['default'] is dist.group.WORLD and mesh.get_group().size()").results[1] == 3
    assert is_whole(three, pids)


def test_only_the_group_s_own_connections_end(three: Cluster, pids: dict[int, int]) -> None:
    three.run(
        "import socket, asyncio, selectors\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname())\n"
        "other, _ = server.accept()\n"
        "own = selectors.EpollSelector()\n"
        "for each in (server, client, other): own.register(each, selectors.EVENT_READ)\n"
        "mine = dist.TCPStore('127.0.0.1', 0, is_master=True)\n"
    )
    interrupted(three, "if rank == 0: dist.barrier()", {0})
    code = "client.send(b'still here'); mine.set('a', 'b'); (other.recv(100), mine.get('a'))"
    assert three.run(code).results == dict.fromkeys(range(3), (b"still here", b"b"))
    assert is_whole(three, pids)


def test_nothing_grows_with_the_interrupts(three: Cluster, pids: dict[int, int]) -> None:
    count = "(len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task')))"
    interrupted(three, "if rank == 0: dist.barrier()", {0})
    before = three.run(count).results
    for _ in range(4):
        interrupted(three, "if rank == 0: dist.barrier()", {0})
    after = three.run(count).results
    assert all(after[rank][0] <= before[rank][0] + 1 for rank in range(3)), (before, after)
    assert all(after[rank][1] <= before[rank][1] for rank in range(3)), (before, after)
    assert is_whole(three, pids)


def test_a_group_that_a_person_destroys_is_gone(three: Cluster, pids: dict[int, int]) -> None:
    count = "len(os.listdir('/proc/self/task'))"
    before = three.run(count).results
    three.run("for _ in range(3):\n    pg = dist.new_group([0, 1, 2])\n    dist.destroy_process_group(pg)\n    del pg")
    assert three.run(count).results == before
    assert is_whole(three, pids)


def test_a_cell_sent_right_after_an_interrupt_runs_on_every_rank(three: Cluster, pids: dict[int, int]) -> None:
    for number in range(10):
        run = three.run("while True: pass" if number % 2 else "if rank: dist.barrier()\nwhile True: pass", block=False)
        threading.Timer(0.02 * number, three.interrupt).start()
        with pytest.raises(RankFailure):
            run.wait()
        assert three.run(f"{number} + rank").results == {rank: number + rank for rank in range(3)}
    assert is_whole(three, pids)


class Presser:
    """Press stop again and again, once only some ranks still run."""

    def __init__(self, left: set[int]) -> None:
        self._left = left

    def on_events(self, _events: Sequence[Event], run: CellRun) -> None:
        if run.state.running == self._left:
            signal.raise_signal(signal.SIGINT)

    def on_end(self, run: CellRun) -> None:
        pass


def test_what_hears_nothing_is_given_up_and_replaced_alone() -> None:
    with Cluster(n=2, launcher="local", name="deaf") as cluster:
        cluster.run("kept = rank")
        code = "if rank == 1:\n    import ctypes\n    ctypes.PyDLL(None).sleep(1000)"  # without giving the lock away
        with pytest.raises(GivenUpError, match=r"rank 1 has not come back.*%dist_reset -r 1 replaces just that rank"):
            cluster.run(code, listener=Presser({1}))
        assert cluster.replace([1]) == [
            "rank 1 was replaced by a new process with fresh variables; %dist_copy --from 0 --to 1 NAME... fills it"
        ]
        cluster.copy(["kept"], 0, 1)
        assert cluster.run("kept").results == {0: 0, 1: 0}
        assert cluster.run(SUM).results == {0: [3.0], 1: [3.0]}


def test_an_error_holds_no_memory(three: Cluster, pids: dict[int, int]) -> None:
    three.run("import weakref, gc\nclass Big: pass\nseen = []")
    code = "def fail():\n    big = Big(); seen.append(weakref.ref(big))\n    raise MemoryError('none left')\nfail()"
    with pytest.raises(RankFailure, match="MemoryError"):
        three.run(code)
    assert three.run("gc.collect(); seen[0]()").results == {0: None, 1: None, 2: None}
    assert is_whole(three, pids)


# Failures


def test_ranks_that_wait_for_one_that_failed_are_released(three: Cluster, pids: dict[int, int]) -> None:
    with pytest.raises(RankFailure) as caught:
        three.run("x = torch.ones(1)\nif rank == 1:\n    raise ValueError('the cause')\ndist.all_reduce(x)")
    error = caught.value
    assert str(error) == f"rank 1 ({HOST}), line 3: ValueError: the cause"
    assert set(error.waited) == {0, 2}
    told = "\n".join(error._render_traceback_())
    assert told.endswith("ranks 0,2 waited for rank 1 at line 4 and were released")
    assert told.count("Traceback") == 1
    assert is_whole(three, pids)


def test_ranks_that_do_not_wait_go_on_after_a_failure(three: Cluster, pids: dict[int, int]) -> None:
    code = "import time\nif rank == 1: 1 / 0\ntime.sleep(1.5)\ndone = True"
    with pytest.raises(RankFailure, match="ZeroDivisionError"):
        three.run(code)
    assert three.run("globals().pop('done', False)").results == {0: True, 1: False, 2: True}
    assert is_whole(three, pids)


def test_a_group_that_timed_out_is_formed_anew(three: Cluster, pids: dict[int, int]) -> None:
    code = "from datetime import timedelta\npg = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))\n"
    with pytest.raises(RankFailure):
        three.run(code + "if rank == 0: dist.all_reduce(torch.ones(1), group=pg)")
    assert is_whole(three, pids)


# Hangs


def test_a_hang_explains_itself(three: Cluster, pids: dict[int, int]) -> None:
    code = "import time\nx = torch.ones(30, 2)\nif rank != 1:\n    dist.all_reduce(x)\nelse:\n    time.sleep(1000)"
    run = three.run(code, block=False)
    assert wait_until(waits(run, {0, 2}, "all_reduce"))
    lines = three.where()
    number = lines[0].split("number ")[1].split()[0]
    assert lines == [
        f"ranks 0,2: waits in all_reduce number {number} (Float 30x2) at line 4: dist.all_reduce(x)",
        "rank 1: in Python code at line 6: time.sleep(1000)",
    ]
    assert wait_until(lambda: run.hang == lines)
    three.interrupt()
    with pytest.raises(RankFailure):
        run.wait()
    assert three.where() == ["ranks 0-2: idle"]
    assert is_whole(three, pids)


def test_collectives_that_do_not_match_are_called_that(three: Cluster, pids: dict[int, int]) -> None:
    code = "x = torch.ones(4)\nif rank == 0: dist.all_reduce(x)\nelif rank == 1: dist.broadcast(x, 2)"
    run = three.run(code, block=False)
    assert wait_until(waits(run, {0, 1}))
    first = three.where()[0]
    assert first.startswith("collective number ")
    assert (
        "is not the same on all ranks, so it can't end well: rank 0 in all_reduce of [[4]]; rank 1 in broadcast"
        in first
    )
    three.interrupt()
    with pytest.raises(RankFailure):
        run.wait()
    assert is_whole(three, pids)


def test_a_rank_that_is_stopped_is_seen_to_be_silent(three: Cluster, pids: dict[int, int]) -> None:
    run = three.run("import time\nif rank == 1: time.sleep(1000)\ndist.barrier()", block=False)
    assert wait_until(waits(run, {0, 2}))
    os.kill(pids[1], signal.SIGSTOP)
    try:
        assert wait_until(lambda: any("rank 1: not responding for" in line for line in three.where(0.1)))
    finally:
        os.kill(pids[1], signal.SIGCONT)
    three.interrupt()
    with pytest.raises(RankFailure):
        run.wait()
    assert is_whole(three, pids)


# Deaths


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_dead_rank_is_replaced_and_the_others_keep_everything(three: Cluster, victim: int) -> None:
    pids = three.run("import os; kept = rank * 11; pair = dist.new_group([0, 1]); os.getpid()").results
    run = three.run("while True: dist.all_reduce(torch.ones(1000))", block=False)
    psutil.Process(pids[victim]).kill()
    with pytest.raises(RankFailure) as caught:
        run.wait()
    error = caught.value
    assert str(error) == (
        f"rank {victim} ({HOST}): RankDied: process {pids[victim]} was killed by SIGKILL: "
        "kill -9, or the kernel's out-of-memory killer"
    )
    assert set(error.waited) == {0, 1, 2} - {victim}
    assert any(note.startswith(f"rank {victim} was replaced by a new process") for note in error.notes)
    gone = [note for note in error.notes if note.startswith("gone with") and "os.getpid()" in note]
    others = {0, 1} - {victim}
    assert len(gone) == (1 if victim < 2 else 0)
    assert all(f"rank {other}" in note and "pair = dist.new_group([0, 1])" in note for note in gone for other in others)
    assert three.run(SUM).results == {rank: [6.0] for rank in range(3)}
    kept = three.run("(os.getpid(), kept) if 'kept' in globals() else None").results
    assert kept == {rank: None if rank == victim else (pid, rank * 11) for rank, pid in pids.items()}


def test_a_rank_that_dies_while_the_group_is_formed_anew_is_replaced_too(three: Cluster) -> None:
    pids = three.run("import os; os.getpid()").results
    psutil.Process(pids[1]).kill()
    assert wait_until(lambda: three.table[1].info.pid != pids[1])
    psutil.Process(pids[2]).kill()
    assert three.run(SUM).results == {rank: [6.0] for rank in range(3)}


def test_comm_says_that_mpi_has_no_world_any_more() -> None:
    with Cluster(n=2, name="comm") as cluster:
        assert cluster.run("comm.allreduce(1)").results == {0: 2, 1: 2}
        cluster.replace([1])
        with pytest.raises(RankFailure, match=r"rank 1 was replaced after a death, and MPI has no world.*%dist_reset"):
            cluster.run("comm.allreduce(1)")
        assert cluster.run(SUM).results == {0: [3.0], 1: [3.0]}
        cluster.reset()
        assert cluster.run("comm.allreduce(1)").results == {0: 2, 1: 2}


def test_two_ranks_die_at_once(three: Cluster) -> None:
    pids = three.run("import os; os.getpid()").results
    run = three.run("dist.barrier() if rank == 0 else __import__('time').sleep(1000)", block=False)
    for rank in (1, 2):
        psutil.Process(pids[rank]).kill()
    with pytest.raises(RankFailure) as caught:
        run.wait()
    assert {failure.ename for failure in caught.value.failures} == {"RankDied"}
    assert three.run(SUM).results == {rank: [6.0] for rank in range(3)}


def test_all_ranks_start_anew_if_the_person_wants_that() -> None:
    with Cluster(n=2, launcher="local", on_rank_death="reset", name="reset") as cluster:
        cluster.run("kept = 1")
        with pytest.raises(RankFailure, match="RankDied"):
            cluster.run("import os\nif rank == 1: os._exit(1)\ndist.barrier()")
        assert cluster.run("'kept' in globals()").results == {0: False, 1: False}


def test_the_cluster_ends_if_the_person_wants_that() -> None:
    with Cluster(n=2, launcher="local", on_rank_death="stop", name="stop") as cluster:
        with pytest.raises(RankFailure, match="RankDied"):
            cluster.run("import os\nif rank == 1: os._exit(1)\ndist.barrier()")
        assert wait_until(lambda: cluster.closed)
        with pytest.raises(ClusterClosedError):
            cluster.run("1")
