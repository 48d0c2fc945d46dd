"""Recovery, rare cases: faults during a recovery, and state that it must not touch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.errors import RankFailure

from ...support.process_tools import wait_until
from ...support.recovery_tools import NO_PEER, failure_of, interrupted, stop, waits

if TYPE_CHECKING:
    from jupyter_disttrain import Cluster

pytestmark = pytest.mark.usefixtures("pids")


def test_rank_that_cannot_form_the_group_delays_no_other(three: Cluster) -> None:
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


def test_parameters_frozen_during_a_recovery_are_reduced_once_unfrozen(three: Cluster) -> None:
    three.run(MODEL + "net[0].requires_grad_(False)")
    interrupted(three, "if rank == 0: dist.barrier()", {0})
    assert three.run("[each.requires_grad for each in net.parameters()]").results[0] == [False, False, True, True]
    three.run("net[0].requires_grad_(True)")
    gradients = three.run(SAME).results
    assert gradients[0] == gradients[1] == gradients[2]


def test_model_that_cannot_get_a_new_reducer_affects_only_itself(three: Cluster) -> None:
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


SHARDED = """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
for layer in net: fully_shard(layer)
fully_shard(net)
net(torch.ones(2, 8)).sum().backward()
"""


def test_typo_between_two_halves_of_a_step_keeps_the_step(three: Cluster) -> None:
    three.run(SHARDED)
    three.run("net.zero_grad(); loss = net(torch.ones(2, 8)).sum()")
    with pytest.raises(RankFailure, match="NameError"):
        three.run("a_typo", 1)
    three.run("loss.backward()", timeout_s=30)
    found = three.run("net[0].weight.grad.full_tensor().sum().item()", timeout_s=30).results
    assert found[0] == found[1] == found[2]


# Groups


def test_point_to_point_messages_are_not_collectives(three: Cluster) -> None:
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


def test_group_created_by_a_cell_counts_from_its_beginning(three: Cluster) -> None:
    three.run("for _ in range(4): rank < 2 and (dist.send if rank == 0 else dist.recv)(torch.ones(1), 1 - rank)")
    three.run("dist.barrier()")
    again = three.run("dist.destroy_process_group(); dist.init_process_group('gloo'); dist.all_reduce(torch.ones(4))")
    assert again.notes == []


def test_group_without_counts_is_ignored(three: Cluster) -> None:
    three.run("import torch.testing._internal.distributed.fake_pg\nfake = dist.new_group([0, 1, 2], backend='fake')")
    assert three.run("dist.get_backend(fake)").results == dict.fromkeys(range(3), "fake")
    interrupted(three, "if rank == 0: dist.barrier()", {0})
    three.run("dist.destroy_process_group(fake)")


def test_deep_stack_names_the_cell_line(three: Cluster) -> None:
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


def test_rank_waiting_for_a_peer_that_never_connects_is_released(three: Cluster) -> None:
    run = three.run(NO_PEER, 1, block=False)
    assert wait_until(lambda: any("ProcessGroupGloo" in line for line in three.where()))
    three.interrupt(forced=True)
    with pytest.raises(RankFailure) as caught:
        run.wait()
    assert "The peer did not connect" in str(caught.value) or "KeyboardInterrupt" in str(caught.value)
