"""Transfer values between ranks and notebook unchanged, and name those that cannot be transferred."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from jupyter_disttrain.errors import RankFailure, UnserializableValueError, UsageError

from ...support.process_tools import wait_until

if TYPE_CHECKING:
    from jupyter_disttrain import Cluster

    from ...support.notebook_driver import Notebook


def test_tensors_of_every_dtype_round_trip(cluster: Cluster) -> None:
    dtypes = "float32 float64 float16 bfloat16 float8_e4m3fn complex64 uint8 int8 int16 int32 int64 bool"
    sent = {name: torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]).to(getattr(torch, name)) for name in dtypes.split()}
    cluster.push({"sent": sent})
    code = "{name: (str(t.dtype), (*t.shape,), t.to(torch.float64).sum().item()) for name, t in sent.items()}"
    expected = {name: (f"torch.{name}", (2, 3), 5.0 if name == "bool" else 15.0) for name in sent}
    assert cluster.run(code).results == {0: expected, 1: expected}
    for got in cluster.pull("sent", ranks="all").values():
        for name, tensor in got["sent"].items():
            assert tensor.dtype == sent[name].dtype
            assert torch.equal(tensor.to(torch.complex128), sent[name].to(torch.complex128)), name


def test_tensors_of_every_shape_round_trip(cluster: Cluster) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    sent = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "turned": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.ones(1).expand(5),
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "sparse": torch.eye(3).to_sparse(),
    }
    cluster.push({"sent": sent})
    got = cluster.pull("sent", ranks=1)[1]["sent"]
    assert list(got) == list(sent)
    for name, tensor in sent.items():
        assert got[name].shape == tensor.shape, name
        assert torch.equal(got[name].to_dense(), tensor.to_dense()), name


def test_requires_grad_and_parameters_are_preserved(cluster: Cluster) -> None:
    values = cluster.run("p = torch.nn.Parameter(torch.ones(2)); (p, p * 2, torch.ones(1, requires_grad=True))").results
    parameter, computed, leaf = values[1]
    assert isinstance(parameter, torch.nn.Parameter)
    assert [tensor.requires_grad for tensor in (parameter, computed, leaf)] == [True, True, True]
    assert [tensor.is_leaf for tensor in (parameter, computed, leaf)] == [True, True, True]
    assert computed.tolist() == [2.0, 2.0]


def test_tensor_with_two_names_stays_one(cluster: Cluster) -> None:
    tied = torch.zeros(3)
    cluster.push({"first": tied, "second": tied})
    assert cluster.run("first[0] = 9; second.tolist()").results == {0: [9.0, 0.0, 0.0], 1: [9.0, 0.0, 0.0]}


def test_received_arrays_and_tensors_are_writable(cluster: Cluster) -> None:
    for size in (3, 1 << 20):
        array, tensor = np.zeros(size), torch.zeros(size)
        cluster.push({"array": array, "tensor": tensor})
        assert cluster.run("array[0] = tensor[0] = rank + 1; float(array[0])").results == {0: 1.0, 1: 2.0}
        got = cluster.pull(["array", "tensor"], ranks=1)[1]
        got["array"][1] = got["tensor"][1] = 5.0
        assert got["array"][:3].tolist() == got["tensor"][:3].tolist() == [2.0, 5.0, 0.0]
        assert array[0] == tensor[0] == 0.0


def test_nested_values_keep_their_structure(cluster: Cluster) -> None:
    sent = {"a": [1, (2.5, None)], "b": {"c": {3}, "d": b"\0x"}, "array": np.arange(3), "f": lambda x: x + 1}
    cluster.push({"sent": sent | {"no rows": np.empty((0, 3))}})
    got = cluster.pull("sent")[0]["sent"]
    assert got["no rows"].shape == (0, 3)
    assert got["f"](1) == 2
    assert got["array"].tolist() == [0, 1, 2]
    assert {name: got[name] for name in ("a", "b")} == {name: sent[name] for name in ("a", "b")}


def test_hundred_megabytes_round_trip(cluster: Cluster) -> None:
    big = torch.arange(25_000_000, dtype=torch.float32)
    cluster.push({"big": big})
    assert cluster.run("big.shape[0], float(big[12_345_678])").results == dict.fromkeys(
        range(2), (25_000_000, 12_345_678.0)
    )
    back = cluster.pull("big", ranks="all")
    assert all(torch.equal(back[rank]["big"], big) for rank in range(2))
    results = cluster.run("big").results
    assert all(torch.equal(results[rank], big) for rank in range(2))
    cluster.run("del big")


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("(x for x in 'ab')", "a generator can't be sent: TypeError: cannot pickle 'generator' object"),
        (
            "__import__('threading').Lock()",
            "a _thread.lock can't be sent: TypeError: cannot pickle '_thread.lock' object",
        ),
        (
            "open('/dev/null', 'w')",
            "a _io.TextIOWrapper can't be sent: PicklingError: Cannot pickle files that are not opened for reading: w",
        ),
    ],
    ids=["generator", "lock", "file"],
)
def test_unserializable_value_is_named_with_its_rank(cluster: Cluster, expression: str, reason: str) -> None:
    run = cluster.run(f"stuck = {expression} if rank == 1 else 7\nstuck")
    with pytest.raises(UnserializableValueError) as caught:
        _ = run.results
    assert str(caught.value) == f"the cell's value can't be sent to the notebook: rank 1: {reason}"
    with pytest.raises(UnserializableValueError) as caught:
        cluster.pull("stuck", ranks="all")
    assert str(caught.value) == f"rank 1: stuck: {reason}"
    assert cluster.pull("stuck", ranks=0) == {0: {"stuck": 7}}


def test_unserializable_value_of_the_notebook_is_named(cluster: Cluster) -> None:
    with pytest.raises(UnserializableValueError) as caught:
        cluster.push({"fine": 1, "stuck": (x for x in "ab")})
    assert str(caught.value) == "stuck: a generator can't be sent: TypeError: cannot pickle 'generator' object"
    with pytest.raises(UsageError, match="ranks 0-1 have no 'fine'; set it in a %%distributed cell first"):
        cluster.pull("fine", ranks="all")


def test_value_that_cannot_be_loaded_here_is_named_with_its_rank(cluster: Cluster) -> None:
    cluster.run("class Odd:\n    def __reduce__(self): return (__import__, ('no_such_module',))\nodd = Odd()")
    with pytest.raises(UnserializableValueError) as caught:
        cluster.pull("odd", ranks=1)
    assert str(caught.value) == (
        "the value of rank 1 can't be read in the notebook: ModuleNotFoundError: No module named 'no_such_module'"
    )


def test_missing_and_invalid_names_are_reported(cluster: Cluster) -> None:
    cluster.run("only = 1", ranks=0)
    with pytest.raises(UsageError) as caught:
        cluster.pull(["only", "nowhere"], ranks="all")
    assert (
        str(caught.value) == "ranks 0-1 have no 'nowhere'; rank 1 has no 'only'; set it in a %%distributed cell first"
    )
    for name in ("1x", "model.weight", "for", ""):
        with pytest.raises(UsageError) as caught:
            cluster.pull(name)
        assert str(caught.value) == f"{name!r} is not a variable's name; use names such as lr or batch_size"
        with pytest.raises(UsageError):
            cluster.push({name: 1})


def test_last_value_is_none_without_an_expression(cluster: Cluster) -> None:
    assert cluster.run("x = 3").results == {0: None, 1: None}
    assert cluster.run("rank * 2").results == {0: 0, 1: 2}
    assert cluster.run("rank", ranks=1).results == {1: 1}


def test_out_push_and_pull_in_a_notebook(notebook: Notebook) -> None:
    notebook.run("%%distributed -o loss\nrank + 0.5").check()
    assert notebook.run("loss").check().text == "{0: 0.5, 1: 1.5}"
    notebook.run(
        "def double(x):\n    return 2 * x\n\nclass Config:\n    lr = 0.1\n\nconfig = Config(); config.n = 4"
    ).check()
    notebook.run("%dist_push double config").check()
    outcome = notebook.run("%%distributed\nprint(double(config.n), type(config).lr)\nseen = double(rank)").check()
    assert outcome.lines == ["ranks 0-1 │ 8 0.1"]
    notebook.run("%dist_pull -r 1 seen").check()
    assert notebook.run("seen").check().text == "2"
    notebook.run("%dist_pull -r all seen").check()
    assert notebook.run("seen").check().text == "{0: 0, 1: 2}"


def test_class_of_a_rank_can_be_used_in_the_notebook(notebook: Notebook) -> None:
    notebook.run(
        "%%distributed\nclass Point:\n    def twice(self): return self.x * 2\np = Point(); p.x = rank + 1"
    ).check()
    notebook.run("%dist_pull -r 1 p").check()
    assert notebook.run("p.twice()").check().text == "4"


def test_unserializable_out_is_reported_in_one_line(notebook: Notebook) -> None:
    outcome = notebook.run("%%distributed -o gen\n(x for x in 'ab')")
    assert outcome.status == "error"
    last = outcome.text.splitlines()[-1]
    assert last == (
        "UnserializableValueError: the cell's value can't be sent to the notebook: "
        "ranks 0-1: a generator can't be sent: TypeError: cannot pickle 'generator' object"
    )


def test_ddp_model_is_refused_with_advice(cluster: Cluster) -> None:
    cluster.run("ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))")
    with pytest.raises(UnserializableValueError, match=r"rank 0: ddp: .* state = model\.module\.state_dict\(\)"):
        cluster.pull("ddp")


def test_optimizer_is_copied_with_its_model_or_not_at_all(cluster: Cluster) -> None:
    cluster.run(
        "net = torch.nn.Linear(2, 1); best = torch.optim.AdamW(net.parameters(), lr=rank + 1.0)\n"
        "slower = torch.optim.lr_scheduler.StepLR(best, 1)"
    )
    for names, named, owner in (
        (["best"], "best", "the model"),
        (["slower", "net"], "slower", "the optimizer"),
        (["best", "slower"], "best", "the model"),
    ):
        with pytest.raises(UnserializableValueError) as caught:
            cluster.copy(names, 1, 0)
        assert str(caught.value) == (
            f"rank 1: {named}: it belongs to {owner} that it was created with; name that too, or copy a variable that "
            f"holds {named}.state_dict()"
        )
    cluster.run("nets = {'one': [net]}")
    cluster.copy(["nets", "best"], 1, 0)
    assert cluster.run("best.param_groups[0]['params'][0] is nets['one'][0].weight").results == {0: True, 1: True}
    cluster.copy(["net", "best", "slower"], 1, 0)
    of_one_piece = "best.param_groups[0]['params'][0] is net.weight and slower.optimizer is best"
    assert cluster.run(f"({of_one_piece}, best.param_groups[0]['lr'])").results == {0: (True, 2.0), 1: (True, 2.0)}


def test_values_arrive_without_a_wait(cluster: Cluster) -> None:
    run = cluster.run("print('said'); import sys; print('so', file=sys.stderr); rank", block=False)
    assert wait_until(lambda: run.done)
    assert run.stdout == {0: "said\n", 1: "said\n"}
    assert run.stderr == {0: "so\n", 1: "so\n"}
    assert run.results == {0: 0, 1: 1}
    assert set(run.durations_s) == {0, 1}
    failed = cluster.run("1 / 0", block=False)
    assert wait_until(lambda: failed.done)
    assert [failure.ename for failure in failed.failures] == ["ZeroDivisionError"]


def test_values_of_a_running_cell_are_incomplete(cluster: Cluster) -> None:
    run = cluster.run("import time\nwhile rank and not globals().get('go'): time.sleep(0.01)\nrank", block=False)
    assert repr(run).endswith(" running>")
    assert run.results in ({}, {0: 0})
    cluster.interrupt([1])
    with pytest.raises(RankFailure):
        run.wait()
    assert run.results == {0: 0, 1: None}
