"""Checkpoints, rare cases: concurrent versions, optimizers before a step, unusual values."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import RankFailure

if TYPE_CHECKING:
    from pathlib import Path

MAKE = """
torch.manual_seed(0)
net = torch.nn.Linear(4, 4)
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
def train(steps):
    for step in range(steps):
        loss = model(torch.full((2, 4), 1.0 + step)).pow(2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    return loss.item()
"""


def test_all_ranks_load_the_last_written_version(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run("big = torch.nn.Linear(500, 500)")
    for step in range(8):
        cluster.run(f"step = {step}")
        cluster.checkpoints.save(tmp_path, ["big", "step"], beside=True)
        cluster.run("step = -1")
        cluster.checkpoints.load(tmp_path, ["step"])
        assert cluster.run("step").results == {0: step, 1: step}


def test_background_versions_are_written_in_order(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run("big = torch.nn.Linear(500, 500)")
    for _ in range(6):
        cluster.checkpoints.save(tmp_path, ["big"], beside=True)
    cluster.checkpoints.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{number:06}" for number in range(1, 7)]


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


def test_version_of_another_session_is_kept(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / ".saving-other-1-2.abc").mkdir()
    cluster.run("value = 1")
    cluster.checkpoints.save(tmp_path, ["value"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".saving-other-1-2.abc", "000001"]


def test_saving_before_the_first_step_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(MAKE)
    expected = cluster.run("train(3)").results
    cluster.run(MAKE)
    cluster.checkpoints.save(tmp_path, ["model", "optimizer"])
    assert cluster.run("len(optimizer.state)").results == {0: 0, 1: 0}
    assert cluster.run("train(3)").results == expected
    cluster.checkpoints.load(tmp_path)
    assert cluster.run("train(3)").results == expected


def test_optimizer_state_is_restored_beside_its_gradients(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(MAKE + "train(3)")
    cluster.checkpoints.save(tmp_path, ["model", "optimizer"])
    expected = cluster.run("train(2)").results
    cluster.run(MAKE + "model(torch.ones(2, 4)).sum().backward()")
    cluster.checkpoints.load(tmp_path)
    assert cluster.run("net.weight.grad is not None").results == {0: True, 1: True}
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


def test_user_files_beside_the_versions_are_kept(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "000002").mkdir()
    (tmp_path / "000003").write_text("a note of mine")
    (tmp_path / "20240101").mkdir()
    (tmp_path / "20240101" / "samples.csv").write_text("1,2")
    (tmp_path / "\u00b2").mkdir()
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
    cluster.run("value = -1")
    cluster.checkpoints.load(tmp_path)
    assert cluster.run("value").results == {0: 3, 1: 3}


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
