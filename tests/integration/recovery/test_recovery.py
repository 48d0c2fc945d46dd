"""The session recovers from interrupts and failures within collectives."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.errors import RankFailure

from ...conftest import LAUNCHERS
from ...support.process_tools import wait_until
from ...support.recovery_tools import HOST, failure_of, interrupted, stop, waits

if TYPE_CHECKING:
    from jupyter_disttrain import Cluster

pytestmark = pytest.mark.usefixtures("pids")


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
def test_interrupt_reaches_ranks_that_wait_for_others(three: Cluster, code: str, waiting: set[int]) -> None:
    error = interrupted(three, code, waiting)
    assert {failure.ename for failure in error.failures} == {"KeyboardInterrupt"}
    assert all(failure.line for failure in error.failures), "each with the line that was interrupted"


def test_model_whose_constructor_failed_is_ignored_later(three: Cluster) -> None:
    model = "s = torch.nn.parallel.DistributedDataParallel(torch.nn.SyncBatchNorm(3))"  # needs a GPU
    with pytest.raises(RankFailure, match="SyncBatchNorm layers only work with GPU"):
        three.run(model)
    three.run(f"import torch\ntry: {model}\nexcept ValueError as error: kept_error = error")
    failure = failure_of(three, "if rank == 1: 1/0\ndist.barrier()")
    assert not [note for note in failure.notes if note.startswith("lost with the old")]
    three.run("del kept_error")


def test_groups_meshes_and_models_of_the_user_keep_working(three: Cluster) -> None:
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
    # Within a backward pass, which leaves a reducer that waits for the end of its iteration.
    error = interrupted(three, "if rank: step(torch.ones(2, 4))", {1, 2})
    assert {failure.ename for failure in error.failures} == {"KeyboardInterrupt"}
    three.run("model.zero_grad()\nfor number in range(3): step(torch.full((2, 4), float(rank + number)))")
    weights = three.run("model.module.weight.tolist()").results
    assert weights[0] == weights[1] == weights[2]
    code = "one = torch.ones(1)\nif rank != 1: dist.all_reduce(one, group=held['in a list'][0])\none.item()"
    assert three.run(code).results == {0: 2.0, 1: 1.0, 2: 2.0}
    assert three.run("held['default'] is dist.group.WORLD and mesh.get_group().size()").results[1] == 3


@pytest.mark.parametrize("three", LAUNCHERS, indirect=True)
def test_only_connections_of_the_group_are_closed(three: Cluster) -> None:
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


@pytest.mark.parametrize("three", ["mpi"], indirect=True)
def test_repeated_interrupts_leak_nothing(three: Cluster) -> None:
    count = "(len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task')))"
    interrupted(three, "if rank == 0: dist.barrier()", {0})
    before = three.run(count).results
    for _ in range(4):
        interrupted(three, "if rank == 0: dist.barrier()", {0})
    after = three.run(count).results
    assert all(after[rank][0] <= before[rank][0] + 1 for rank in range(3)), (before, after)
    assert all(after[rank][1] <= before[rank][1] for rank in range(3)), (before, after)


def test_group_destroyed_by_the_user_is_freed(three: Cluster) -> None:
    count = "len(os.listdir('/proc/self/task'))"
    before = three.run(count).results
    three.run("for _ in range(3):\n    pg = dist.new_group([0, 1, 2])\n    dist.destroy_process_group(pg)\n    del pg")
    # It is kept for a second (process_group.destroyed_groups). Threads of earlier tests may end meanwhile.
    assert wait_until(lambda: all(now <= before[rank] for rank, now in three.run(count).results.items()))


@pytest.mark.parametrize("three", ["mpi"], indirect=True)
def test_cell_sent_right_after_an_interrupt_runs_on_every_rank(three: Cluster) -> None:
    for number in range(10):
        run = three.run("while True: pass" if number % 2 else "if rank: dist.barrier()\nwhile True: pass", block=False)
        threading.Timer(0.02 * number, three.interrupt).start()
        with pytest.raises(RankFailure):
            run.wait()
        assert three.run(f"{number} + rank").results == {rank: number + rank for rank in range(3)}


STEP = """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
net = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(6)])
for block in net: fully_shard(block)
fully_shard(net)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
def step():
    optimizer.zero_grad()
    loss = net(torch.ones(8, 64)).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()
step()
"""


def test_sharded_model_continues_after_an_interrupt_at_any_point_of_a_step(three: Cluster) -> None:
    three.run(STEP)
    for _ in range(5):
        run = three.run("while True: step()", block=False)
        assert wait_until(lambda: all(entry.state == "running" for entry in three.table))
        three.where()  # which takes about as long as some steps
        three.interrupt()
        with pytest.raises(RankFailure, match="KeyboardInterrupt"):
            run.wait()
        losses = three.run("step()", timeout_s=30).results
        assert losses[0] == losses[1] == losses[2]


CUT_OFF = """
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
whole = FSDPParam.to_unsharded
def cut_off(parameter):
    FSDPParam.to_unsharded = whole
    whole(parameter)
    raise KeyboardInterrupt
FSDPParam.to_unsharded = cut_off
step()
"""


def test_sharded_model_with_one_parameter_ahead_continues(three: Cluster) -> None:
    three.run(STEP)
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        three.run(CUT_OFF)
    losses = three.run("step()", timeout_s=30).results
    assert losses[0] == losses[1] == losses[2]


# Failures


@pytest.mark.parametrize("three", LAUNCHERS, indirect=True)
def test_ranks_that_wait_for_a_failed_one_are_released(three: Cluster) -> None:
    code = "x = torch.ones(1)\nif rank == 1:\n    raise ValueError('the cause')\ndist.all_reduce(x)"
    error = failure_of(three, code)
    assert str(error) == f"rank 1 ({HOST}), line 3: ValueError: the cause"
    assert set(error.waited) == {0, 2}
    text = "\n".join(error._render_traceback_())
    assert text.endswith("ranks 0,2 waited for rank 1 at line 4 and were released")
    assert text.count("Traceback") == 1


def test_ranks_that_do_not_wait_continue_after_a_failure(three: Cluster) -> None:
    code = "import time\nif rank == 1: 1 / 0\ntime.sleep(1.5)\ndone = True"
    with pytest.raises(RankFailure, match="ZeroDivisionError"):
        three.run(code)
    assert three.run("globals().pop('done', False)").results == {0: True, 1: False, 2: True}


def test_group_that_timed_out_is_formed_again(three: Cluster) -> None:
    code = "from datetime import timedelta\npg = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))\n"
    with pytest.raises(RankFailure):
        three.run(code + "if rank == 0: dist.all_reduce(torch.ones(1), group=pg)")


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("dist.irecv(torch.ones(3), 1).wait()", id="irecv"),
        pytest.param(
            "[w.wait() for w in dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(3), 1)])]", id="batch"
        ),
    ],
)
def test_rank_waiting_for_a_message_begun_earlier_is_detected_and_released(three: Cluster, code: str) -> None:
    run = three.run(f"if rank == 0: {code}", block=False)
    assert wait_until(waits(run, {0}, "wait() of a send or recv"))
    assert three.where()[0].startswith("rank 0: waits in wait() of a send or recv at line 1")
    stop(three, run)
