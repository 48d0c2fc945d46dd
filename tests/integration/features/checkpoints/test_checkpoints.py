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


EXTRA = """
import io
class Scaled(torch.nn.Linear):
    def get_extra_state(self):
        return io.BytesIO(b"scales %d" % self.scale)
    def set_extra_state(self, state):
        self.scale = int(state.read().split()[1])
scaled = Scaled(2, 2)
scaled.scale = 7
"""


def test_stream_in_the_state_of_a_model_is_restored(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(EXTRA)
    cluster.checkpoints.save(tmp_path, ["scaled"])
    cluster.run("scaled.scale = 0")
    cluster.checkpoints.load(tmp_path)
    assert cluster.run("scaled.scale").results == {0: 7, 1: 7}


@pytest.mark.parametrize("beside", [False, True])
def test_values_take_no_more_space_than_their_data(cluster: Cluster, tmp_path: Path, beside: bool) -> None:
    size = 8 * 2**20
    cluster.run(f"x = torch.randint(256, ({size},), dtype=torch.uint8); total = int(x.sum())")
    cluster.run("array = x.numpy(); data = array.tobytes()")
    cluster.checkpoints.save(tmp_path, ["x", "array", "data"], beside=beside)
    cluster.checkpoints.finish()
    saved = sum(file.stat().st_size for file in (tmp_path / "000001").iterdir())
    cluster.run("del x, array, data")
    cluster.checkpoints.load(tmp_path)
    check = "int(x.sum()) == total and data == array.tobytes() == x.numpy().tobytes()"
    assert cluster.run(check).results == {0: True, 1: True}
    assert saved < 1.05 * 3 * 2 * size  # 3 variables on 2 ranks


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
            with pytest.raises(RankFailure, match="'model' and 'optimizer' can only be loaded into existing obj"):
                other.checkpoints.load(tmp_path)
            other.run(SHARDED.replace("range(3)", "range(1)"))
            other.checkpoints.load(tmp_path)
            assert other.run("step").results == dict.fromkeys(range(n), 2)
            assert other.run(WHOLE).results == dict.fromkeys(range(n), whole)
            again = other.run(
                "".join(SHARDED.splitlines(keepends=True)[7:]).replace("range(3)", "range(3, 6)") + "loss.item()"
            )
            assert again.results == pytest.approx(dict.fromkeys(range(n), expected[0]), rel=1e-5)


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


def test_background_versions_are_written_in_order_and_all_ranks_load_the_last(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run("big = torch.nn.Linear(500, 500)")
    for step in range(8):
        cluster.run(f"step = {step}")
        cluster.checkpoints.save(tmp_path, ["big", "step"], beside=True)
        cluster.run("step = -1")
        cluster.checkpoints.load(tmp_path, ["step"])
        assert cluster.run("step").results == {0: step, 1: step}
    for _ in range(6):
        cluster.checkpoints.save(tmp_path, ["big"], beside=True)
    cluster.checkpoints.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{number:06}" for number in range(1, 15)]


def test_failed_background_version_is_reported_by_the_next(cluster: Cluster, tmp_path: Path) -> None:
    root = tmp_path / "run"
    cluster.run("value = 1")
    cluster.checkpoints.save(root, ["value"])
    cluster.run(
        "import jupyter_disttrain.features.checkpoints.rank as own\nwhole = own.finish\n"
        "def full(*_): raise OSError(28, 'No space left on device')\nown.finish = full"
    )
    cluster.checkpoints.save(root, ["value"], beside=True)
    with pytest.raises(RankFailure, match="the previous checkpoint was not saved: rank 0: No space left on device: "):
        cluster.checkpoints.load(root)
    with pytest.raises(RankFailure, match="No space left on device: "):
        cluster.checkpoints.save(root, ["value"])
    cluster.run("own.finish = whole")
    cluster.checkpoints.save(root, ["value"])
    assert sorted(path.name for path in root.iterdir()) == ["000001", "000002"]


def test_saving_before_the_first_step_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(MAKE + TRAIN)
    expected = cluster.run("train(3)").results
    cluster.run(MAKE)
    cluster.checkpoints.save(tmp_path, ["model", "optimizer", "scheduler", "step"])
    assert cluster.run("len(optimizer.state)").results == {0: 0, 1: 0}
    assert cluster.run("train(3)").results == expected
    cluster.checkpoints.load(tmp_path)
    assert cluster.run("train(3)").results == expected


def test_optimizer_state_is_restored_beside_its_gradients(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(MAKE + TRAIN + "train(3)")
    cluster.checkpoints.save(tmp_path, ["model", "optimizer", "scheduler", "step"])
    expected = cluster.run("train(2)").results
    cluster.run(MAKE + "model(torch.ones(2, 4)).sum().backward()")
    cluster.checkpoints.load(tmp_path)
    assert cluster.run("model.module[0].weight.grad is not None").results == {0: True, 1: True}
    assert cluster.run("train(2)").results == expected


def test_unusual_values_are_saved_or_named(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(
        "class Config: lr = 0.1\nconfig, twice, step = Config(), lambda x: 2 * x, 7\n"
        "loss_function = torch.nn.MSELoss()\nfirst, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)\n"
        "both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1, momentum=0.9)\n"
        "(first(torch.ones(1)) + second(torch.ones(1))).backward(); both.step()\n"
        "import threading; lock = threading.Lock()"
    )
    names = ["config", "twice", "step", "loss_function", "first", "second", "both"]
    cluster.checkpoints.save(tmp_path, names)
    moments = "[each['momentum_buffer'].tolist() for each in both.state.values()]"
    expected = cluster.run(moments).results
    with pytest.raises(RankFailure, match=r"CheckpointError: lock can't be saved: TypeError: .*pickle"):
        cluster.checkpoints.save(tmp_path, ["step", "lock"])
    cluster.run("del config, twice, step, Config; both.state.clear()")
    cluster.checkpoints.load(tmp_path)
    assert cluster.run("config.lr, twice(3), step").results == {0: (0.1, 6, 7), 1: (0.1, 6, 7)}
    assert cluster.run(moments).results == expected


def test_random_state_is_kept_when_only_some_values_are_loaded(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run("value = 1; torch.manual_seed(rank)")
    cluster.checkpoints.save(tmp_path, ["value"])
    expected = cluster.run("torch.manual_seed(9); torch.rand(2)[1].item()").results
    cluster.run("torch.manual_seed(9); torch.rand(1)")
    cluster.checkpoints.load(tmp_path, ["value"])
    assert cluster.run("torch.rand(1).item()").results == expected
    with Cluster(n=1, launcher="local", name="later") as later:
        later.checkpoints.load(tmp_path)
        assert later.run("value, torch.initial_seed()").results == {0: (1, 0)}


def test_old_versions_are_removed_and_nothing_else(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "000002").mkdir()
    (tmp_path / "000003").write_text("a note of mine")
    (tmp_path / "20240101").mkdir()
    (tmp_path / "20240101" / "samples.csv").write_text("1,2")
    (tmp_path / "\u00b2").mkdir()
    (tmp_path / ".saving-other-1-2.0123abcd").mkdir()  # a version that another session is writing
    old = tmp_path / ".saving-plans"
    old.mkdir()
    os.utime(old, (0, 0))
    own = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(RankFailure, match="there is no checkpoint in"):
        cluster.checkpoints.load(tmp_path)
    for value in range(4):
        cluster.run(f"value = {value}")
        cluster.checkpoints.save(tmp_path, ["value"], keep=2)
    assert {path.name for path in tmp_path.iterdir()} == own | {"000005", "000006"}
    assert (tmp_path / "000003").read_text() == "a note of mine"
    for folder, value in ((tmp_path / "000005", 2), (tmp_path, 3)):
        cluster.checkpoints.load(folder)
        assert cluster.run("value").results == {0: value, 1: value}


def test_half_removed_old_version_is_not_loaded(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run("value = 1")
    cluster.checkpoints.save(tmp_path, ["value"])
    cluster.run(
        "import shutil; whole = shutil.rmtree\ndef cut(path, **options): raise KeyboardInterrupt\nshutil.rmtree = cut",
        0,
    )
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        cluster.checkpoints.save(tmp_path, ["value"], keep=1)
    cluster.run("shutil.rmtree = whole", 0)
    assert [path.name for path in tmp_path.glob("0*")] == ["000002"]
    cluster.checkpoints.save(tmp_path, ["value"], keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000003"]
