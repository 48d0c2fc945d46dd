"""Recovery, rare cases: faults during a recovery, and state that it must not touch."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.client import lifecycle, session
from jupyter_disttrain.client.cells import cell_run
from jupyter_disttrain.errors import GivenUpError, LaunchError, RankFailure

from ...support.listeners import Interrupter
from ...support.process_tools import wait_until
from ...support.recovery_tools import IGNORE_INTERRUPTS, SUM, failure_of, interrupted, is_intact, stop, waits

if TYPE_CHECKING:
    from pathlib import Path


def test_late_interrupt_hides_no_failure(three: Cluster) -> None:
    interrupter = Interrupter(lambda run: run.state.done and run.coming_back, times=1)
    with pytest.raises(RankFailure, match="RankDied"):
        three.run("import os\nif rank == 1: os._exit(1)\ndist.barrier()", listener=interrupter)
    assert interrupter.sent
    run = three.run(SUM)
    assert run.results == {rank: [6.0] for rank in range(3)}
    assert any(note.startswith("rank 1 was replaced") for note in run.notes), (
        "the interrupted wait is reported with the next cell"
    )


def test_abandoned_cell_ends_once_and_its_rank_may_return(
    torchless: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell_run, "GIVE_UP_SECONDS", 0.0)
    interrupter = Interrupter(lambda run: any(run.stdout.values()) and run.interrupts < 3)
    path = tmp_path / "let-go"
    code = f"{IGNORE_INTERRUPTS}kept = 'as it was'\nstay({str(path)!r})"
    with pytest.raises(GivenUpError, match=r"rank 1 has not ended the cell: .* the last resort, which loses variables"):
        torchless.run(code, 1, listener=interrupter)
    assert interrupter.ends == 1
    (left,) = torchless.running_cells
    assert left.running_now == {1}
    assert torchless.run("rank", 0).results == {0: 0}
    path.touch()
    assert wait_until(lambda: torchless.table[1].state == "idle")
    run = torchless.run("kept", 1)
    assert run.results == {1: "as it was"}
    (note,) = run.notes
    assert re.fullmatch(r"rank 1 has ended cell \d+ and kept its variables", note)
    assert torchless.running_cells == []


def test_ranks_that_are_not_killed_are_not_reported_as_replaced(
    torchless: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "CLUSTER_END_SECONDS", 0.1)
    monkeypatch.setattr(lifecycle, "CLUSTER_SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(session, "CLUSTER_SETTLE_SECONDS", 0.1)
    nannies = [psutil.Process(entry.nanny_pid) for entry in torchless.table]
    pids = [entry.info.pid for entry in torchless.table]
    for nanny in nannies:
        nanny.suspend()
    torchless._session.supervisor.note("of another rank")
    try:
        with pytest.raises(LaunchError, match="ranks 0-1 did not end: the nanny of a rank"):
            torchless.replace([0, 1])
    finally:
        for nanny in nannies:
            nanny.resume()
    monkeypatch.undo()
    assert wait_until(lambda: not {entry.info.pid for entry in torchless.table} & set(pids))
    run = torchless.run("rank")
    assert run.results == {0: 0, 1: 1}
    assert "of another rank" in run.notes


def test_rank_that_cannot_form_the_group_delays_no_other(three: Cluster, pids: dict[int, int]) -> None:
    three.run(
        "from jupyter_disttrain.rank.process_group.group import Group\n"
        "prove = Group._prove\n"
        "def fail(self):\n"
        "    Group._prove = prove\n"
        "    raise OSError(24, 'Too many open files')\n"
        "if rank == 1: Group._prove = fail"
    )
    error = interrupted(three, "if rank: dist.barrier()\nelse:\n    while True: pass", {1, 2})
    assert not [note for note in error.notes if "Too many open files" in note], "the next attempt succeeds"
    assert set(three.run("Group._prove is prove").results.values()) == {True}, "the first attempt failed"
    assert is_intact(three, pids)


# Models


MODEL = """
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
model = DistributedDataParallel(net, find_unused_parameters=True)
"""
SAME = """
model.zero_grad()
model(torch.full((2, 4), float(rank + 1))).sum().backward()
[each.grad is not None and each.grad.sum().item() for each in net.parameters()]
"""


def test_parameters_frozen_during_a_recovery_are_reduced_once_unfrozen(three: Cluster, pids: dict[int, int]) -> None:
    three.run(MODEL + "net[0].requires_grad_(False)")
    interrupted(three, "if rank == 0: dist.barrier()", {0})
    assert three.run("[each.requires_grad for each in net.parameters()]").results[0] == [False, False, True, True]
    three.run("net[0].requires_grad_(True)")
    gradients = three.run(SAME).results
    assert gradients[0] == gradients[1] == gradients[2]
    assert is_intact(three, pids)


def test_model_that_cannot_get_a_new_reducer_affects_only_itself(three: Cluster, pids: dict[int, int]) -> None:
    three.run(
        MODEL + "class Fails(DistributedDataParallel):\n"
        "    def _build_params_for_reducer(self):\n"
        "        if fails: raise torch.OutOfMemoryError('no memory for the buckets')\n"
        "        return super()._build_params_for_reducer()\n"
        "fails = False\n"
        "other = Fails(torch.nn.Linear(2, 2))\n"
        "fails = True"
    )
    error = interrupted(three, "if rank == 0: dist.barrier()", {0})
    (note,) = [note for note in error.notes if "DistributedDataParallel of Linear" in note]
    assert "ranks 0-2" in note
    assert "no memory for the buckets" in note
    gradients = three.run(SAME).results
    assert gradients[0] == gradients[1] == gradients[2]
    assert is_intact(three, pids)


SHARDED = """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
for layer in net: fully_shard(layer)
fully_shard(net)
net(torch.ones(2, 8)).sum().backward()
"""


def test_typo_between_two_halves_of_a_step_keeps_the_step(three: Cluster, pids: dict[int, int]) -> None:
    three.run(SHARDED)
    three.run("net.zero_grad(); loss = net(torch.ones(2, 8)).sum()")
    with pytest.raises(RankFailure, match="NameError"):
        three.run("a_typo", 1)
    three.run("loss.backward()", timeout_s=30)
    found = three.run("net[0].weight.grad.full_tensor().sum().item()", timeout_s=30).results
    assert found[0] == found[1] == found[2]
    assert is_intact(three, pids)


# Groups


def test_point_to_point_messages_are_not_collectives(three: Cluster, pids: dict[int, int]) -> None:
    pipeline = """
for _ in range(4):
    x = torch.ones(4)
    if rank > 0: dist.recv(x, rank - 1)
    if rank < 2: dist.send(x, rank + 1)
works = []
if rank == 0: works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1)])
if rank == 1: works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 0)])
for work in works: work.wait()
dist.monitored_barrier()
dist.all_reduce(x)
"""
    assert three.run(pipeline).notes == []
    failure = failure_of(three, pipeline + "if rank == 1: 1 / 0")
    assert failure.notes == []
    assert is_intact(three, pids)


def test_unawaited_collective_delays_nothing(three: Cluster) -> None:
    three.run("import os; big = torch.ones(125_000_000)")
    begun = "work = dist.all_reduce(big, async_op=True)\ndel work"
    stop = "if rank == 1: __import__('threading').Timer(0.02, os.kill, (os.getpid(), 19)).start()"
    pid = three.table[1].info.pid
    run = three.run(f"{stop}\n{begun}\nif rank != 1: raise ValueError\n__import__('time').sleep(1000)", block=False)
    assert wait_until(lambda: run.running_now == {1})
    assert wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    psutil.Process(pid).kill()  # the others have parts of a message that never ends
    with pytest.raises(RankFailure, match="RankDied"):
        run.wait()
    assert three.run(SUM, timeout_s=30).results == {rank: [6.0] for rank in range(3)}


def test_group_created_by_a_cell_counts_from_its_beginning(three: Cluster, pids: dict[int, int]) -> None:
    three.run("for _ in range(4): rank < 2 and (dist.send if rank == 0 else dist.recv)(torch.ones(1), 1 - rank)")
    three.run("dist.barrier()")
    again = three.run("dist.destroy_process_group(); dist.init_process_group('gloo'); dist.all_reduce(torch.ones(4))")
    assert again.notes == []
    assert is_intact(three, pids)


def test_group_without_counts_is_ignored(three: Cluster, pids: dict[int, int]) -> None:
    three.run("import torch.testing._internal.distributed.fake_pg\nfake = dist.new_group([0, 1, 2], backend='fake')")
    assert three.run("dist.get_backend(fake)").results == dict.fromkeys(range(3), "fake")
    interrupted(three, "if rank == 0: dist.barrier()", {0})
    three.run("dist.destroy_process_group(fake)")
    assert is_intact(three, pids)


def test_user_variable_named_comm_is_kept() -> None:
    with Cluster(n=2, backend="none", name="theirs") as cluster:
        cluster.run("comm = 'mine'")
        cluster.replace([1])
        assert cluster.run("comm", 0).results == {0: "mine"}


def test_deep_stack_names_the_cell_line(three: Cluster, pids: dict[int, int]) -> None:
    deep = (
        "net = torch.nn.ReLU()\n"
        "class Waits(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        dist.barrier() if rank == 0 else None\n"
        "        return x\n"
        "net = Waits()\n"
        "for _ in range(30): net = torch.nn.Sequential(net)\n"
        "net(torch.ones(1))"
    )
    run = three.run(deep, block=False)
    assert wait_until(waits(run, {0}))
    assert "at line 4: dist.barrier() if rank == 0 else None" in three.where()[0]
    stop(three, run)
    assert is_intact(three, pids)


NO_PEER = """
import threading
from datetime import timedelta
def speak_for_the_other():
    store.wait(["0/0"])
    said = bytearray(store.get("0/0"))
    port = said.index(b"\\x02\\x00", 8) + 2  # after the name of the host stands the address: family, port
    said[port : port + 2] = b"\\xff\\xff"  # the higher port is the one that connects
    store.set("0/1", bytes(said))
store = dist.HashStore()
threading.Thread(target=speak_for_the_other).start()
dist.ProcessGroupGloo(store, 0, 2, timedelta(hours=1))
"""


def test_rank_waiting_for_a_peer_that_never_connects_is_released(three: Cluster, pids: dict[int, int]) -> None:
    run = three.run(NO_PEER, 1, block=False)
    assert wait_until(lambda: any("ProcessGroupGloo" in line for line in three.where()))
    three.interrupt(forced=True)
    with pytest.raises(RankFailure) as caught:
        run.wait()
    assert "The peer did not connect" in str(caught.value) or "KeyboardInterrupt" in str(caught.value)
    assert is_intact(three, pids)


def test_rank_is_replaced_where_no_more_threads_are_allowed(three: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "disttrain recovery":
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RankFailure, match="RankDied"):
        three.run("import os\nif rank == 1: os._exit(1)\ndist.barrier()")
    assert three.run(SUM).results == {rank: [6.0] for rank in range(3)}
    assert refused
