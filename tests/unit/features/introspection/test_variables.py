"""The variables of ranks, and their table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from jupyter_disttrain.features.introspection.summaries import size_of, variables
from jupyter_disttrain.features.introspection.variables import VariableTable

from .test_attributes import Trap, nothing_runs  # noqa: F401  (a fixture)


def listed(**names: Any) -> dict[str, dict[str, Any]]:
    shell = SimpleNamespace(user_ns=names, user_ns_hidden={"hidden": 1}, given=lambda: {"rank": 0, "torch": torch})
    return {each["name"]: each for each in variables(shell)}


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
    by_rank = {rank: list(listed(batch=min(rank, 1), x=torch.zeros(2, 3)).values()) for rank in range(3)}
    by_rank[2] += listed(alone=[1]).values()
    table = VariableTable(by_rank, [3])
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
    assert str(VariableTable({0: [], 1: []})) == "no variables on ranks 0-1"
