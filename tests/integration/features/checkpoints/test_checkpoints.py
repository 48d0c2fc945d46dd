"""``%dist_save`` and ``%dist_load``: saved values are restored, on any number of ranks."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import RankFailure, UsageError

from ....support.process_tools import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from ....support.notebook_driver import Notebook

MAKE = """
import random
import numpy as np
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(7)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
step = 0
"""
TRAIN = """
def train(steps):
    global step
    for _ in range(steps):
        # The same data on however many ranks, so that losses can be compared.
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(16, 4, generator=generator)).pow(2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()
        step += 1
    return loss.item(), scheduler.get_last_lr(), step
"""
DRAW = "(torch.rand(1).item(), random.random(), np.random.rand())"
SHARDED = """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
for layer in model: fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(3):
    loss = model(torch.ones(16, 4)).pow(2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
WHOLE = "{name: value.full_tensor().tolist() for name, value in model.state_dict().items()}"


@pytest.mark.parametrize("beside", [False, True])
def test_training_resumes_exactly(cluster: Cluster, tmp_path: Path, beside: bool) -> None:
    cluster.run(MAKE + TRAIN)
    cluster.run("mine = ['of', rank]; train(3)")
    run = cluster.checkpoints.save(tmp_path / "run", ["model", "optimizer", "scheduler", "step", "mine"], beside=beside)
    expected = cluster.run(DRAW).results, cluster.run("train(4)").results
    cluster.run("del mine; train(2)")
    cluster.checkpoints.load(tmp_path / "run")
    assert (tmp_path / "run" / "000001").is_dir()
    assert (cluster.run(DRAW).results, cluster.run("train(4)").results) == expected
    assert cluster.run("mine").results == {0: ["of", 0], 1: ["of", 1]}
    if not beside:
        assert "saved" in run.stdout[0]
        assert run.stdout[1] == ""


def test_checkpoint_is_loaded_on_another_number_of_ranks(tmp_path: Path) -> None:
    with Cluster(n=2, launcher="local", name="two") as two:
        two.run(SHARDED)
        whole = two.run(WHOLE).results[0]
        two.checkpoints.save(tmp_path, ["model", "optimizer", "step"])
        expected = two.run(
            "".join(SHARDED.splitlines(keepends=True)[7:]).replace("range(3)", "range(3, 6)") + "loss.item()"
        ).results
    for n in (1, 3):
        with Cluster(n=n, launcher="local", name=f"now{n}") as other:
            with pytest.raises(RankFailure, match="'model', 'optimizer' has to exist before its state can be loaded"):
                other.checkpoints.load(tmp_path)
            other.run(SHARDED.replace("range(3)", "range(1)"))
            other.checkpoints.load(tmp_path)
            assert other.run("step").results == dict.fromkeys(range(n), 2)
            assert other.run(WHOLE).results == dict.fromkeys(range(n), whole)
            again = other.run(
                "".join(SHARDED.splitlines(keepends=True)[7:]).replace("range(3)", "range(3, 6)") + "loss.item()"
            )
            assert again.results == pytest.approx(dict.fromkeys(range(n), expected[0]), rel=1e-5)


def test_versions_are_numbered_and_old_ones_removed(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run("value = 0")
    for _ in range(4):
        cluster.run("value += 1")
        cluster.checkpoints.save(tmp_path, ["value"], keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000003", "000004"]
    cluster.checkpoints.load(tmp_path / "000003", ["value"])
    assert cluster.run("value").results == {0: 3, 1: 3}
    cluster.checkpoints.load(tmp_path)
    assert cluster.run("value").results == {0: 4, 1: 4}


def test_kill_while_saving_keeps_the_latest_version(tmp_path: Path) -> None:
    slow = """
import os, time
class Slow:
    def __init__(self, folder): self.folder = folder
    def __getstate__(self):
        open(f"{self.folder}/reached", "w").close()
        time.sleep(1000 if rank == 1 else 0)
        return vars(self)
"""
    with Cluster(n=2, launcher="local", name="killed") as cluster:
        cluster.run("value = 'whole'")
        cluster.checkpoints.save(tmp_path / "run", ["value"])
        cluster.run(f"{slow}value = Slow({os.fspath(tmp_path)!r})")
        run = cluster.checkpoints.save(tmp_path / "run", ["value"], block=False)
        assert wait_until((tmp_path / "reached").exists)
        psutil.Process(cluster.table[1].info.pid).send_signal(signal.SIGKILL)
        with pytest.raises(RankFailure, match="RankDied"):
            run.wait()
        cluster.checkpoints.load(tmp_path / "run")
        assert cluster.run("value").results == {0: "whole", 1: "whole"}
        cluster.checkpoints.save(tmp_path / "run", ["value"])
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["000001", "000002"], (
            "no rest of the other"
        )


LOOSE = """
from torch.distributed.fsdp import fully_shard
value, parts = 1, [fully_shard(torch.nn.Linear(2, 2)) for _ in range(2)]
loose = torch.optim.SGD([each for part in parts for each in part.parameters()], lr=0.1, momentum=0.9)
sum(part(torch.ones(1, 2)).sum() for part in parts).backward()
loose.step()
"""


def test_unsupported_values_are_reported(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"ranks 0-1 .*CheckpointError: this rank has no 'nothing'"):
        cluster.checkpoints.save(tmp_path, ["nothing"])
    with pytest.raises(RankFailure, match=r"CheckpointError: there is no checkpoint in .*empty; %dist_save"):
        cluster.checkpoints.load(tmp_path / "empty")
    cluster.run(LOOSE)
    with pytest.raises(RankFailure, match="no model that is saved has all the parameters that loose steps"):
        cluster.checkpoints.save(tmp_path, ["loose"])
    cluster.checkpoints.save(tmp_path, ["value"])
    with pytest.raises(RankFailure, match="has no 'other'; it has value"):
        cluster.checkpoints.load(tmp_path, ["other"])
    with pytest.raises(UsageError, match="name the variables to save"):
        cluster.checkpoints.save(tmp_path, [])
    (tmp_path / "file").write_text("")
    with pytest.raises(RankFailure, match=r"CheckpointError: .*(File exists|Not a directory)"):
        cluster.checkpoints.save(tmp_path / "file", ["value"])
    assert cluster.run("value").results == {0: 1, 1: 1}


def test_magics(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("%%distributed\nsaved = rank + 1").check()
    outcome = notebook.run(f"%dist_save {tmp_path}/run saved --keep 3").check()
    assert outcome.lines[0].startswith(f"rank 0 │ saved {tmp_path}/run/000001 (")
    notebook.run("%%distributed\nsaved = None").check()
    assert notebook.run(f"%dist_load {tmp_path}/run").check().lines == [f"rank 0 │ loaded {tmp_path}/run/000001: saved"]
    assert notebook.run("%%distributed\nprint(saved)").check().lines == ["rank 0 │ 1", "rank 1 │ 2"]


def test_optimizer_is_loaded_with_a_value_before_it_and_alone(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(
        "first, model = 1, torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
        "model(torch.ones(1, 2)).sum().backward(); optimizer.step()\n"
        "def momentum(): return optimizer.state[model.bias]['momentum_buffer'].tolist()\n"
        "saved = momentum()"
    )
    cluster.checkpoints.save(tmp_path, ["first", "model", "optimizer"])
    for names in ([], ["optimizer"]):
        cluster.run(
            "globals().pop('first', None)\nfor each in optimizer.state.values(): each['momentum_buffer'].zero_()"
        )
        cluster.checkpoints.load(tmp_path, names)
        assert cluster.run("momentum() == saved").results == {0: True, 1: True}, names
    cluster.run("model = None")
    with pytest.raises(
        RankFailure, match="no variable of the checkpoint is the model whose parameters optimizer steps"
    ):
        cluster.checkpoints.load(tmp_path, ["optimizer"])
