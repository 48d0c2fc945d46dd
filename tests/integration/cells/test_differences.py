"""``%dist_diff``: compare values that should be equal on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.errors import UsageError

if TYPE_CHECKING:
    from jupyter_disttrain import Cluster

    from ...support.notebook_driver import Notebook

MODEL = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
"""


def test_equal_model(three: Cluster) -> None:
    three.run(MODEL)
    found = three.diff("model")
    assert not found
    assert str(found) == "model is the same on ranks 0-2 (9 parts)"


def test_first_differing_parameter_is_named_with_figures(three: Cluster) -> None:
    three.run(MODEL + "if rank == 2:\n    with torch.no_grad(): model[0].bias[1] += 0.5; model[2].weight.zero_()")
    found = three.diff("model")
    assert found
    lines = str(found).splitlines()
    assert lines[0] == "model differs on ranks 0-2 in 2 of 9 parts; the first is 0.bias:"
    assert lines[1:3] == ["  ranks 0-1: 3 float32", "  rank 2: 3 float32"]
    assert lines[3] == "  rank 2 from ranks 0-1: up to 0.5, 0.1667 on average, in 1 of 3 numbers"
    assert lines[4] == "  others that differ: 2.weight"
    assert not three.diff("model", "0-1")


def test_diverged_values_are_counted_separately(three: Cluster) -> None:
    three.run(
        "inf, nan = float('inf'), float('nan')\n"
        "values = [1.0, 3.0, inf, nan, nan, inf] if rank == 2 else [1.0, 1.0, inf, nan, 1.0, 1.0]\n"
        "off = torch.tensor(values)"
    )
    text = str(three.diff("off")).splitlines()[3]
    assert text == "  rank 2 from ranks 0-1: up to inf, inf on average, in 3 of 6 numbers, NaN on one side in 1"
    three.run("off = torch.ones(4) if rank == 0 else torch.tensor([1.0, nan, 1.0, 1.0])")
    assert str(three.diff("off")).endswith("  rank 0 from ranks 1-2: in 1 of 4 numbers, NaN on one side in 1")


def test_ddp_model_and_its_optimizer(three: Cluster) -> None:
    three.run(
        MODEL + "ddp = torch.nn.parallel.DistributedDataParallel(model)\n"
        "optimizer = torch.optim.Adam(ddp.parameters())\n"
        "torch.manual_seed(rank); ddp(torch.randn(8, 4)).sum().backward(); optimizer.step()"
    )
    found = str(three.diff("ddp"))
    assert "running_mean" in found  # of the batches, which differ
    assert ".weight:" not in found
    assert not three.diff("optimizer")


def test_differing_shapes_and_missing_parts(three: Cluster) -> None:
    three.run("shaped = torch.ones(3 + (rank == 1)); listed = {'a': 1, 'b': [2.5] * (1 + (rank == 0))}")
    assert str(three.diff("shaped")).splitlines()[1:] == ["  ranks 0,2: 3 float32", "  rank 1: 4 float32"]
    assert str(three.diff("listed")).splitlines() == [
        "listed differs on ranks 0-2 in 1 of 3 parts; the first is b[1]:",
        "  ranks 1-2: missing",
        "  rank 0: float 2.5",
    ]


def test_nan_differs_only_from_numbers(three: Cluster) -> None:
    three.run("nan = torch.tensor([1.0, float('nan')])")
    assert not three.diff("nan")


def test_tensors_of_every_dtype(three: Cluster) -> None:
    for dtype in ("bfloat16", "float16", "int64", "bool", "complex64"):
        three.run(f"typed = torch.tensor([0, 1, int(rank == 1)]).to(torch.{dtype})")
        assert f"rank 1: 3 {dtype}" in str(three.diff("typed"))
        assert not three.diff("typed", "0,2"), dtype


def test_sharded_parameters_are_left_out(three: Cluster) -> None:
    three.run(
        "from torch.distributed.fsdp import fully_shard\n"
        + MODEL.replace("BatchNorm1d(3)", "ReLU()")
        + "fully_shard(model)"
    )
    found = three.diff("model")
    assert not found
    assert "4 are sharded over ranks and were left out" in str(found)


def test_other_values_are_compared_by_content(three: Cluster) -> None:
    three.run("plain = {'lr': 0.1, 'names': ('a', rank // 2)}; number = rank")
    assert "plain differs on ranks 0-2 in 1 of 3 parts; the first is names[1]:" in str(three.diff("plain"))
    assert "number differs on ranks 0-2 in 1 of 1 part; the first is number:" in str(three.diff("number"))
    assert "  rank 2: int 2" in str(three.diff("number")).splitlines()


@pytest.mark.parametrize(
    "value",
    [
        "{1: rank, '1': 3}",
        "{'a.b': rank, 'a': {'b': 3}}",
        "[] if rank else {}",
        "{} if rank else {'x': {}}",
        "torch.tensor([2**62 + rank])",
    ],
)
def test_different_values_are_never_reported_as_equal(three: Cluster, value: str) -> None:
    three.run(f"sly = {value}")
    assert three.diff("sly")
    assert "in 0 of" not in str(three.diff("sly"))


def test_equal_values_are_never_reported_as_different(three: Cluster) -> None:
    three.run("import threading; same = [set('abcdefgh'), torch.empty(2, device='meta'), threading.Lock()]")
    three.run("same.append(same)")
    found = three.diff("same")
    assert not found
    assert "can't be compared" in str(found)


def test_missing_name_is_reported(three: Cluster) -> None:
    three.run("only = 1", 0)
    with pytest.raises(UsageError, match="ranks 1-2 have no 'only'; set it in a %%distributed cell first"):
        three.diff("only")
    with pytest.raises(UsageError, match="'a b' is not a variable's name"):
        three.diff("a b")


def test_single_rank_is_refused(three: Cluster) -> None:
    three.run("x = 1")
    with pytest.raises(UsageError, match="rank 1 can't be compared with itself; name at least two ranks with -r"):
        three.diff("x", 1)


def test_magic_prints_the_comparison(notebook: Notebook) -> None:
    notebook.run("%%distributed\nsame, other = 1, rank").check()
    assert notebook.run("%dist_diff same other").check().lines == [
        "same is the same on ranks 0-1 (1 part)",
        "other differs on ranks 0-1 in 1 of 1 part; the first is other:",
        "  rank 0: int 0",
        "  rank 1: int 1",
    ]
