"""The variables of ranks, and their table."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from jupyter_disttrain.errors import ClusterClosedError
from jupyter_disttrain.features.introspection.client import VariableRequests
from jupyter_disttrain.features.introspection.summaries import size_of, variables
from jupyter_disttrain.features.introspection.variables import VariableTable
from jupyter_disttrain.protocol.requests import ListVariables

from ...records import rank_info
from .test_attributes import Trap, nothing_runs  # noqa: F401  (a fixture)


def reply(**names: Any) -> dict[str, Any]:
    """What a rank with these names replies."""
    shell = SimpleNamespace(user_ns=names, user_ns_hidden={"hidden": 1}, given=lambda: {"rank": 0, "torch": torch})
    return variables(shell) | {"status": "ok"}


def listed(**names: Any) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in reply(**names)["variables"]}


def test_variables_are_those_of_the_user() -> None:
    names = {"x": 1, "_private": 1, "hidden": 1, "torch": torch, "rank": 7, "f": listed, "C": Trap}
    assert listed(**names).keys() == {"x", "rank"}, "a name that every rank has counts once the user has changed it"


def test_sizes_count_each_tensor_once() -> None:
    x = torch.zeros(10)
    assert size_of(x) == 40
    assert size_of([x, x, {"a": (x, torch.zeros(5))}]) == 60
    assert size_of(x[:5]) == 20
    assert size_of(np.zeros(3)) == 24
    assert size_of("text") is None
    assert size_of(object.__new__(Trap)) is None
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    expected = sum(each.numel() * each.element_size() for each in model.state_dict().values())
    assert size_of(model) == expected
    optimizer = torch.optim.Adam(model.parameters())
    assert size_of(optimizer) is None
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    state = [each for one in optimizer.state.values() for each in one.values()]
    assert size_of(optimizer) == sum(each.numel() * each.element_size() for each in state)
    within: list[Any] = [x]
    within.append(within)
    assert size_of(within) == 40


def test_table_merges_ranks() -> None:
    replies = {rank: reply(batch=min(rank, 1), x=torch.zeros(2, 3)) for rank in range(3)}
    replies[2]["variables"] += reply(alone=[1])["variables"]
    table = VariableTable(replies, [3])
    assert str(table).splitlines() == [
        "name   type    value               size  ranks",
        "alone  list    length 1                  rank 2",
        "batch  int     0                         rank 0",
        "batch  int     1                         ranks 1-2",
        "x      Tensor  (2, 3) float32 cpu  24 B",
        "rank 3 does not reply; %dist_where shows what they are doing",
    ]
    assert [each.name for each in table.select([], by_size=True).variables] == ["x", "alone", "batch", "batch"]
    assert {each.name for each in table.select(["b*", "x"]).variables} == {"batch", "x"}
    assert str(VariableTable({0: reply(), 1: reply()})) == "no variables on ranks 0-1"


def test_table_as_json_counts_tensors_of_several_variables_once() -> None:
    x = torch.zeros(2, 3)
    replies = {rank: reply(x=x, same=[x], text="a" * 100, batch=min(rank, 1)) for rank in range(3)}
    replies[2] = reply(x=torch.zeros(2, 3), more=torch.zeros(5))
    content = VariableTable(replies, [3, 5]).to_content()
    assert (content["ranks"], content["silent"]) == ("0-2", "3,5")
    assert (content["least_tensor_bytes"], content["most_tensor_bytes"]) == (24, 44)
    found = {(each["name"], each["ranks"]): each for each in content["variables"]}
    shown = {"type": "Tensor", "value": "(2, 3) float32 cpu", "size_bytes": 24, "differs": False}
    assert found["x", "0-2"] == {"name": "x", "ranks": "0-2", **shown}
    differing = found["batch", "1"]
    assert (differing["value"], differing["size_bytes"], differing["differs"]) == ("1", None, True)
    assert found["same", "0-1"]["differs"], "rank 2 lacks it"
    assert found["text", "0-1"]["value"] == repr("a" * 100), "the front end shortens it"
    empty = VariableTable({}, [0]).to_content()
    assert (empty["variables"], empty["silent"], empty["most_tensor_bytes"]) == ([], "0", 0)


def test_a_tensor_on_the_gpu_of_each_rank_does_not_differ() -> None:
    def on(device: str, title: str = "Device") -> dict[str, Any]:
        properties = {"Type": "torch.Tensor", "Shape": "(2,)", "Dtype": "float32", title: device}
        return {"variables": [{"name": "x", "properties": properties, "size_bytes": 8}], "tensor_bytes": 8}

    devices = {0: "cuda:0", 1: "cuda:1"}

    def shown(*replies: dict[str, Any]) -> list[tuple[str, str]]:
        content = VariableTable(dict(enumerate(replies)), (), devices).to_content()
        return [(each["value"], each["ranks"]) for each in content["variables"]]

    assert shown(on("cuda:0"), on("cuda:1")) == [("(2,) float32 cuda", "0-1")]
    assert shown(on("cuda:0"), on("cuda:0")) == [("(2,) float32 cuda", "0"), ("(2,) float32 cuda:0", "1")]
    assert shown(on("cuda:0", "Local device")) == [("(2,) float32 cuda", "0")]


class FakeLink:
    """A link whose ranks reply when the test does."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Future[Any]]] = []

    def request(self, target: str, request: ListVariables) -> Future[Any]:
        assert isinstance(request, ListVariables)
        future: Future[Any] = Future()
        self.sent.append((target, future))
        return future


def test_rank_that_has_not_replied_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jupyter_disttrain.features.introspection.client.VARIABLES_SECONDS", 0.0)
    link: Any = FakeLink()
    entries: Any = [SimpleNamespace(engine=f"engine{rank}", info=rank_info(rank, 3)) for rank in range(3)]
    requests = VariableRequests()

    def ask() -> VariableTable:
        return requests.ask(link, entries, lambda entry: entry.info.rank != 2)

    assert (ask().ranks, ask().silent) == ((), (0, 1, 2))
    assert [target for target, _ in link.sent] == ["engine0", "engine1"]
    link.sent[0][1].set_result({"content": reply(x=1)})
    ask()
    assert [target for target, _ in link.sent] == ["engine0", "engine1", "engine0"]
    link.sent[1][1].set_result({"content": {"status": "error"}})
    assert ask().silent == (0, 1, 2)
    assert [target for target, _ in link.sent[3:]] == ["engine1"]


def test_late_reply_is_that_to_the_next_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jupyter_disttrain.features.introspection.client.VARIABLES_SECONDS", 0.0)
    link: Any = FakeLink()
    entries: Any = [SimpleNamespace(engine="engine0", info=rank_info(0, 1))]
    requests = VariableRequests()
    assert requests.ask(link, entries, lambda _: True).silent == (0,)

    def reply_meanwhile(futures: Any, _timeout_s: float) -> None:
        (future,) = futures
        future.set_result({"content": reply(x=1)})

    monkeypatch.setattr("jupyter_disttrain.features.introspection.client.wait", reply_meanwhile)
    table = requests.ask(link, entries, lambda _: True)
    assert ([each.name for each in table.variables], table.silent) == (["x"], ())
    assert len(link.sent) == 1

    def fail_meanwhile(futures: Any, _timeout_s: float) -> None:
        (future,) = futures
        future.set_exception(ClusterClosedError("it has ended"))

    monkeypatch.setattr("jupyter_disttrain.features.introspection.client.wait", fail_meanwhile)
    with pytest.raises(ClusterClosedError):
        requests.ask(link, entries, lambda _: True)
