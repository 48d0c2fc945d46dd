"""Completion and inspection on a rank, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from jupyter_disttrain.features.introspection import file_access
from jupyter_disttrain.features.introspection.completion import complete
from jupyter_disttrain.features.introspection.inspection import inspect_at

from .test_attributes import Trap, nothing_runs  # noqa: F401  (a fixture)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_access, "COMPLETION_FILES_SECONDS", 60.0)


def train(model: nn.Module, lr: float = 0.1, *, steps: int, callback: Any = print) -> dict[str, float]:
    """Train a model."""
    raise AssertionError(model, lr, steps, callback)


def shell(**names: Any) -> Any:
    magics = SimpleNamespace(magics={"line": {"time": None, "timeit": None}, "cell": {"time": None}})
    return SimpleNamespace(user_ns=names, user_ns_hidden={}, magics_manager=magics, find_magic=lambda *_: None)


def matches(code: str, cursor: int | None = None, **names: Any) -> list[str]:
    found = complete(shell(**names), code, len(code) if cursor is None else cursor)
    return [text for text, _ in found["matches"]]


def test_names() -> None:
    names = {"loss": 1.0, "loader": [], "_private": 1}
    assert matches("lo", **names) == ["loader", "locals", "loss"]
    assert matches("LOSS", **names) == ["loss"]
    assert matches("_pri", **names) == ["_private"]
    assert matches("x = 1\nx", xs=2) == ["x", "xs"]
    assert "while" in matches("wh")
    found = complete(shell(**names), "lo", 2)
    assert (found["start"], found["end"], found["names"]) == (0, 2, ["loss", "loader"])
    assert dict(found["matches"])["loss"] == "instance"


def test_arguments_come_first() -> None:
    assert matches("train(mo", train=train, model=1)[:2] == ["model=", "model"]
    assert matches("train(model, ", train=train)[:4] == ["callback=", "lr=", "model=", "steps="]
    assert matches("nn.Linear(", nn=nn)[0] == "bias="
    assert "self=" not in matches("nn.Linear(", nn=nn)
    assert "input=" in matches("model(", model=nn.Linear(2, 2))
    assert "lr=" not in matches("train(x + ", train=train)


def test_attributes() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    assert matches("model[0].we", model=model) == ["weight"]
    assert "Linear" in matches("torch.nn.Lin", torch=torch)
    assert "item" in matches("model[0].weight.grad.it", model=model)
    assert matches("x.appe\n", 6, x=[]) == ["append"]
    assert matches("'a'.joi") == ["join"]
    assert "in_features" in matches("layer = nn.Linear(2, 3)\nlayer.in_f", nn=nn, layer=nn.Linear(1, 1))
    assert "forward" in matches("layer = nn.Linear(2, 3)\nlayer.for", nn=nn)
    assert matches("unknown.x") == []
    assert matches("trap.val", trap=object.__new__(Trap)) == ["value"]


def test_attributes_of_self_in_a_class_of_the_cell() -> None:
    code = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.first = nn.Linear(2, 3)\n"
        "    def forward(self, x):\n        return self.|\n"
    )
    cursor = code.index("|")
    code = code.replace("|", "")
    found = matches(code, cursor, nn=nn)
    assert {"first", "forward", "parameters"} <= set(found)
    code = code.replace("return self.", "return self.first.")
    assert "in_features" not in matches(code, cursor + 6, nn=nn)  # only an instance has it
    assert "extra_repr" in matches(code, cursor + 6, nn=nn)


def test_keys() -> None:
    values = {"loss": 1, "lr": 2, 3: 4}
    assert matches('values["l', values=values) == ["loss", "lr"]
    assert matches("values[", values=values)[:3] == ["'loss'", "'lr'", "3"]
    assert "values" in matches("values[", values=values)
    assert matches("values['", values={"it's": 1, "its": 2}) == ["its"]
    assert matches('values["a"]["', values={"a": {"b": 1}}) == ["b"]


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data.csv").touch()
    (tmp_path / ".hidden").touch()
    monkeypatch.chdir(tmp_path)
    assert matches("open('da") == ["data.csv", "data/"]
    assert matches(f"open('{tmp_path}/") == ["data.csv", "data/"]
    assert matches("%cd da") == ["data.csv", "data/"]
    assert matches("open('.h") == [".hidden"]
    assert matches("open('no/such/") == []


def test_imports_and_magics() -> None:
    assert "torch" in matches("import tor")
    assert "functional" in matches("import torch.nn.func")
    assert {"functional", "Linear"} <= set(matches("from torch.nn import "))
    assert matches("%ti") == ["%time", "%timeit"]
    assert matches("%%ti") == ["%%time"]


def test_cell_comes_before_the_namespace() -> None:
    assert "in_features" not in matches("x = []\nx.", x=nn.Linear(1, 1))
    assert "append" in matches("x = []\nx.", x=nn.Linear(1, 1))
    assert "in_features" in matches("x = nn.Linear(1, 1)\nx.", x=nn.Linear(1, 1), nn=nn)


def test_listing_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    assert matches("open('") == ["loop"]

    def fail() -> list[str]:
        raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        file_access.within_time(fail)


def sections(code: str, **names: Any) -> dict[str, str]:
    return dict(inspect_at(shell(**names), code, len(code), with_source=False)["sections"])


def test_functions_are_documented() -> None:
    found = sections("train(", train=train)
    assert found["Signature"].startswith("train(")
    assert "lr: float = 0.1" in found["Signature"]
    assert "*,\n    steps: int,\n    callback: Any = <builtin_function_or_method>" in found["Signature"]
    assert found["Docstring"] == "Train a model."
    assert found["File"] == __file__
    source = dict(inspect_at(shell(train=train), "train", 5, with_source=True)["sections"])
    assert source["Source"].startswith("def train(")
    assert "Init signature" not in sections("nn.Linear", nn=nn)
    assert sections("nn.Linear", nn=nn)["Signature"].startswith("nn.Linear(")
    assert "linear transformation" in sections("nn.Linear", nn=nn)["Docstring"]


def test_values_are_summarized() -> None:
    tensor = sections("x", x=torch.zeros(2, 3, requires_grad=True))
    assert (tensor["Type"], tensor["Shape"], tensor["Size"]) == ("torch.Tensor", "(2, 3)", "24 B")
    assert tensor["Requires grad"] == "True"
    assert sections("x", x=3) == {"Type": "int", "Value": "3"}
    assert sections("x", x="a" * 1000)["Value"].endswith("'...")
    assert sections("x", x=10**100000) == {"Type": "int"}
    assert sections("x", x=[1, 2])["Length"] == "2"
    model = sections("x", x=nn.Linear(2, 3))
    assert (model["Parameters"], model["Size"]) == ("9", "36 B")
    assert sections("trap", trap=object.__new__(Trap))["Type"].endswith("test_attributes.Trap")
    assert sections("nothing") == {}
