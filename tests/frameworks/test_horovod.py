"""Horovod on the ranks of a session: it starts, is released and recovers as process groups do."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import RankFailure
from jupyter_disttrain.features.horovod.build import prove

from ..integration.features.scripts.test_scripts import lines_of, write
from ..support.listeners import IgnoringListener
from ..support.process_tools import wait_until
from ..support.recovery_tools import HOST, failure_of, interrupted, is_intact, stop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ADDED = "hvd.allreduce(torch.full((3,), float(rank + 1)), op=hvd.Sum).tolist()"
TRAIN = """
import horovod.torch as hvd
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
def step(seed):
    torch.manual_seed(seed + rank)
    inputs = torch.randn(8, 4)
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()
"""
IN_SET = "hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=some).item() if rank != 1 else None"
WEIGHTS = "[weight.tolist() for weight in model.parameters()]"
SCRIPT = """
import os
import torch, horovod.torch as hvd
hvd.init()
print(f"{hvd.rank()}/{hvd.size()}, {hvd.local_rank()}: {hvd.allreduce(torch.ones(1), op=hvd.Sum).item()}")
"""


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    """Three ranks of MPI with short timeouts."""
    with Cluster(n=3, grace_s=0.5, hang_after_s=0.5, name="three") as cluster:
        yield cluster


@pytest.fixture
def agreeing(three: Cluster) -> Cluster:
    """The ranks, with a model that Horovod trains."""
    three.run(TRAIN)
    return three


def test_check_that_it_runs_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", str(tmp_path))
    assert prove() == ""
    assert list(tmp_path.iterdir()) == []


def test_it_starts_at_its_first_use_and_again(three: Cluster) -> None:
    assert three.run(ADDED).results == {rank: [6.0] * 3 for rank in range(3)}
    assert three.run("hvd.rank(), hvd.size(), hvd.local_rank()").results == {rank: (rank, 3, rank) for rank in range(3)}
    for _ in range(2):
        three.run("hvd.shutdown()\nassert not hvd.is_initialized()\nhvd.init()\nhvd.init()")
        assert three.run(ADDED).results == {rank: [6.0] * 3 for rank in range(3)}
    three.run("import horovod.torch as other\nassert other.is_initialized() and other.size() == 3")


def test_it_trains_like_a_process_group(agreeing: Cluster) -> None:
    agreeing.run("for seed in range(20): step(seed)")
    weights = agreeing.run(WEIGHTS).results
    assert weights[0] == weights[1] == weights[2]
    agreeing.run("""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in range(20): step(seed)
    """)
    beside = agreeing.run(WEIGHTS).results[0]
    assert [value for row in weights[0] for value in _flat(row)] == pytest.approx(
        [value for row in beside for value in _flat(row)], abs=1e-6
    )


def _flat(row: list[list[float]] | float) -> list[float]:
    return [row] if isinstance(row, float) else [value for part in row for value in _flat(part)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "waits",
    [
        "hvd.allreduce(torch.ones(1), name='mine')",
        "hvd.barrier()",
        "hvd.broadcast_object({}, 1)",
        "step(0)",
    ],
)
def test_ranks_waiting_for_a_failed_rank_are_released(agreeing: Cluster, waits: str, pids: dict[int, int]) -> None:
    error = failure_of(agreeing, f"if rank == 1: raise ValueError('the cause')\n{waits}")
    assert [failure.headline for failure in error.failures] == [f"rank 1 ({HOST}), line 1: ValueError: the cause"]
    assert set(error.waited) == {0, 2}
    _trains_on(agreeing, pids)


def test_interrupted_join_affects_only_horovod(agreeing: Cluster, pids: dict[int, int]) -> None:
    failure = failure_of(agreeing, "if rank == 1: raise ValueError('the cause')\nhvd.join()")
    assert set(failure.waited) == {0, 2}
    assert any("hvd.join() was interrupted" in note for note in failure.notes)
    assert is_intact(agreeing, pids)
    with pytest.raises(RankFailure, match=r"hvd\.join\(\) was interrupted, after which Horovod 0\.28 can't"):
        agreeing.run("hvd.init()")
    assert is_intact(agreeing, pids)
    agreeing.reset()
    assert agreeing.run(ADDED).results == {rank: [6.0] * 3 for rank in range(3)}


def test_interrupt_ends_an_operation(agreeing: Cluster, pids: dict[int, int]) -> None:
    error = interrupted(agreeing, "if rank: step(0)\nelse:\n    while True: pass", {1, 2})
    assert {failure.ename for failure in error.failures} == {"KeyboardInterrupt"}
    _trains_on(agreeing, pids)


def test_rank_that_starts_it_alone_is_released(agreeing: Cluster, pids: dict[int, int]) -> None:
    agreeing.run("hvd.shutdown()")
    run = agreeing.run("hvd.init()", 0, block=False)
    run.listener = IgnoringListener()
    assert wait_until(lambda: bool(run.hang))
    assert run.hang[0] == "rank 0: waits in hvd.init at line 1: hvd.init()"
    agreeing.interrupt()
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        run.wait()
    agreeing.run("hvd.init()")
    _trains_on(agreeing, pids)


def test_hang_names_the_operation(agreeing: Cluster, pids: dict[int, int]) -> None:
    run = agreeing.run("if rank != 1: hvd.allgather(torch.ones(2, 3), name='mine')", block=False)
    run.listener = IgnoringListener()
    # The first sample may find a rank that is about to begin the cell.
    waits = "ranks 0,2: waits in hvd.allgather of 'mine' (float32 2x3) at line 1: if rank != 1: "
    assert wait_until(lambda: any(line.startswith(waits) for line in run.hang))
    assert "rank 1: has ended the cell" in run.hang
    stop(agreeing, run)
    _trains_on(agreeing, pids)


def test_mismatched_ranks_are_reported_and_resynchronized(agreeing: Cluster, pids: dict[int, int]) -> None:
    run = agreeing.run("handle = None if rank else hvd.allreduce_async(torch.ones(3))")
    assert any(it.startswith("out of step: rank 0 is 1 collective ahead of ranks 1-2, so") for it in run.notes)
    interrupted(agreeing, ADDED, {0})  # the others are matched with what it called before
    _trains_on(agreeing, pids)
    assert not agreeing.run("for _ in range(rank): hvd.allreduce(torch.ones(1))\nhvd.join()").notes


def test_operations_of_a_subset_are_not_a_mismatch(agreeing: Cluster) -> None:
    run = agreeing.run("""
    hvd.shutdown()
    if rank != 1:
        hvd.init(comm=[0, 2])
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        hvd.shutdown()
    hvd.init()
    hvd.size()
    """)
    assert run.results == dict.fromkeys(range(3), 3)
    assert not run.notes
    with pytest.raises(RankFailure, match=r"rank 1 is not in comm=\[0, 2\]; call hvd.init\(\) on those ranks only"):
        agreeing.run("hvd.shutdown(); hvd.init(comm=[0, 2])")
    agreeing.run("if rank != 1: hvd.shutdown()\nhvd.init()")


def test_dead_rank_is_replaced(agreeing: Cluster, pids: dict[int, int]) -> None:
    agreeing.run("os.environ['HOROVOD_DYNAMIC_PROCESS_SETS'] = '1'; hvd.shutdown(); hvd.init()")
    agreeing.run("some = hvd.add_process_set([0, 2])")
    run = agreeing.run("while True: step(0)", block=False)
    assert wait_until(lambda: all(entry.state == "running" for entry in agreeing.table))
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RankFailure, match=r"rank 1 .*RankDied"):
        run.wait()
    assert agreeing.run(ADDED).results == {rank: [6.0] * 3 for rank in range(3)}
    assert agreeing.run("hvd.size(), comm.Get_size()").results == dict.fromkeys(range(3), (3, 3))
    assert agreeing.run(IN_SET).results == {0: 2.0, 1: None, 2: 2.0}
    # By name: rank 1 has called fewer without one.
    added = "hvd.allreduce(torch.ones(1), op=hvd.Sum, name='more', process_set=more).item() if rank else None"
    assert agreeing.run(f"more = hvd.add_process_set([1, 2])\n{added}").results == {0: None, 1: 2.0, 2: 2.0}
    agreeing.run(TRAIN)
    agreeing.run("step(0)")
    weights = agreeing.run(WEIGHTS).results
    assert weights[0] == weights[1] == weights[2]


def test_process_sets_survive_a_release(agreeing: Cluster, pids: dict[int, int]) -> None:
    agreeing.run("hvd.shutdown(); some = hvd.ProcessSet([0, 2]); hvd.init(process_sets=[some])")
    assert agreeing.run(IN_SET).results == {0: 2.0, 1: None, 2: 2.0}
    interrupted(agreeing, "if rank: hvd.barrier()\nelse:\n    while True: pass", {1, 2})
    assert agreeing.run(IN_SET).results == {0: 2.0, 1: None, 2: 2.0}
    assert is_intact(agreeing, pids)


def _trains_on(cluster: Cluster, pids: dict[int, int]) -> None:
    """Check that the same processes continue to train the same model, and that all parameters agree."""
    assert is_intact(cluster, pids)
    assert cluster.run(ADDED).results == {rank: [6.0] * 3 for rank in range(3)}
    cluster.run("for seed in range(3): step(seed)")
    weights = cluster.run(WEIGHTS).results
    assert weights[0] == weights[1] == weights[2]


def test_scripts_run_repeatedly(three: Cluster, folder: Path) -> None:
    three.run("hvd.shutdown()")
    script = write(folder, "train.py", SCRIPT)
    for _ in range(2):
        assert lines_of(three.scripts.run(script)) == {rank: [f"{rank}/3, {rank}: 3.0"] for rank in range(3)}
        assert three.run("hvd.is_initialized()").results == dict.fromkeys(range(3), False)


def test_process_set_starts_nothing(three: Cluster) -> None:
    three.reset()
    assert three.run("some = hvd.ProcessSet([0, 1]); hvd.is_initialized()").results == dict.fromkeys(range(3), False)
    three.run("hvd.init(process_sets=[some])")
    in_set = "hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=some).item() if rank < 2 else None"
    assert three.run(in_set).results == {0: 2.0, 1: 2.0, 2: None}


def test_ranks_of_the_local_launcher_get_advice(folder: Path) -> None:
    with Cluster(n=2, launcher="local", name="local") as local:
        for code in ("hvd.rank()", "import horovod.torch as hvd; hvd.init()"):
            with pytest.raises(
                RankFailure, match=r"Horovod needs ranks that were started by MPI: %dist_init --launcher mpi"
            ):
                local.run(code)
        script = write(folder, "train.py", SCRIPT)
        assert lines_of(local.scripts.run(script)) == {0: ["0/2, 0: 2.0"], 1: ["1/2, 1: 2.0"]}


@pytest.mark.parametrize("launch", ["mpi", "horovodrun"])
def test_session_is_exported(agreeing: Cluster, tmp_path: Path, launch: str) -> None:
    from ..integration.features.export.test_export import launched  # noqa: PLC0415

    agreeing.reset()
    agreeing.run(TRAIN)
    agreeing.run("losses = [step(seed) for seed in range(5)]")
    agreeing.run("print(f'rank {rank} {losses}\\n', end='', flush=True)")
    expected = sorted(
        text.strip() for text in agreeing.run("print(f'rank {rank} {losses}')", values=False).stdout.values()
    )
    exported = agreeing.scripts.export(tmp_path / "train.py", launch)
    found = sorted(set(launched(exported.command, tmp_path)))
    if launch == "mpi":
        assert found == expected
        return
    for line, before in zip(found, expected, strict=True):
        assert line.split()[:2] == before.split()[:2]
        # Not to the last digit: horovodrun reduces by Gloo, in another order than MPI.
        assert json.loads(line.split(maxsplit=2)[2]) == pytest.approx(json.loads(before.split(maxsplit=2)[2]), rel=1e-5)
