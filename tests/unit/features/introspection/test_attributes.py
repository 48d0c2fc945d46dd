"""Reading objects runs none of their code."""

from __future__ import annotations

import collections
import enum
import functools
import types
from typing import Any

import pytest
import torch
from torch import nn

from jupyter_disttrain.features.introspection import attributes
from jupyter_disttrain.features.introspection.attributes import UNKNOWN, InstanceOf

ran: list[str] = []  # code of the objects below that has run


def trap(name: str) -> Any:
    def method(*_args: Any, **_options: Any) -> Any:
        ran.append(name)
        raise AssertionError(name)

    return method


class Meta(type):
    __getattr__ = trap("metaclass getattr")
    __instancecheck__ = trap("instancecheck")
    __subclasscheck__ = trap("subclasscheck")
    __eq__ = trap("metaclass eq")
    __hash__ = trap("metaclass hash")  # type: ignore[assignment]
    __module__ = property(trap("metaclass module"))  # type: ignore[assignment]


class Descriptor:
    __get__ = trap("descriptor")
    __set__ = trap("descriptor set")


class Base:
    inherited = "of the base"

    def method(self, first: int, second: str = "") -> Base:
        raise AssertionError(first, second)


class Slotted:
    __slots__ = ("slot",)


class Trap(Base, metaclass=Meta):
    plain = 3
    value = property(trap("property"))
    cached = functools.cached_property(trap("cached property"))
    descriptor = Descriptor()

    def __init__(self) -> None:
        self.__dict__["own"] = "own"

    @property
    def annotated(self) -> Base:
        ran.append("annotated property")
        raise AssertionError

    @staticmethod
    def static() -> list:  # type: ignore[type-arg]
        raise AssertionError

    @classmethod
    def of_class(cls) -> None:
        raise AssertionError

    __getattr__ = trap("getattr")
    __getattribute__ = trap("getattribute")
    __dir__ = trap("dir")
    __eq__ = trap("eq")
    __hash__ = trap("hash")  # type: ignore[assignment]
    __bool__ = trap("bool")
    __len__ = trap("len")
    __repr__ = trap("repr")
    __getitem__ = trap("getitem")
    __iter__ = trap("iter")
    __call__ = trap("call")


class KeyTrap:
    """A key whose hash is that of "a"."""

    def __eq__(self, other: object) -> bool:
        ran.append("key eq")
        return False

    def __hash__(self) -> int:
        ran.append("key hash")
        return hash("a")


@pytest.fixture(autouse=True)
def nothing_runs() -> Any:
    ran.clear()
    yield
    assert ran == []


def test_attributes_are_found_without_code_of_the_class() -> None:
    value = object.__new__(Trap)
    attributes.own_dict(value).__setitem__("own", "own")
    assert attributes.attribute(value, "own") == "own"
    assert attributes.attribute(value, "plain") == 3
    assert attributes.attribute(value, "inherited") == "of the base"
    for name in ("value", "cached", "descriptor", "missing"):
        assert attributes.attribute(value, name) is UNKNOWN
    assert attributes.attribute(value, "annotated") == InstanceOf(Base)
    assert attributes.attribute(value, "method").__func__ is Base.method
    assert attributes.attribute(value, "static").__name__ == "static"
    assert attributes.attribute(value, "of_class").__name__ == "of_class"
    assert attributes.attribute(Trap, "missing") is UNKNOWN
    assert {"own", "plain", "value", "method", "inherited", "__eq__"} <= {name for name, _ in attributes.names(value)}
    kinds = dict(reversed(list(attributes.names(value))))
    assert (kinds["value"], kinds["method"], kinds["plain"]) == ("property", "function", "instance")


def test_fields_of_named_tuples_are_read() -> None:
    point = collections.namedtuple("Point", "x y")(1, [2])  # noqa: PYI024
    assert attributes.attribute(point, "y") == [2]
    assert dict(attributes.names(point, "x")) == {"x": "property"}


def test_class_attributes_of_unusual_kinds_are_not_known() -> None:
    class Odd:
        of_class = classmethod(property(lambda _cls: 1))  # type: ignore[arg-type]
        of_another = attributes.in_class(Slotted, "slot")
        custom = Descriptor()

        async def later(self) -> Base:
            raise AssertionError

    for name in ("of_class", "of_another", "custom"):
        assert attributes.attribute(Odd(), name) is UNKNOWN
    assert attributes.attribute(Odd, "custom") is UNKNOWN
    assert attributes.called(Odd().later) is UNKNOWN
    kind = attributes.called(type)
    assert kind == InstanceOf(type)
    assert "mro" in {name for name, _ in attributes.names(kind)}
    assert attributes.attribute(kind, "missing") is UNKNOWN


def test_class_is_that_of_the_interpreter() -> None:
    class Proxy:
        __class__ = property(trap("class"))  # type: ignore[assignment]
        __dict__ = property(trap("dict"))  # type: ignore[assignment]

    value = Proxy()
    assert attributes.class_of(value) is type(value)
    assert not attributes.is_class(value)
    assert attributes.own_dict(value) == {}
    assert attributes.kind_of(value) == "instance"


def test_values_in_c_are_read_where_no_code_is_theirs() -> None:
    class Slots:
        __slots__ = ("empty", "full")

        def __init__(self) -> None:
            self.full = "full"

    value = Slots()
    assert attributes.attribute(value, "full") == "full"
    assert attributes.attribute(value, "empty") is UNKNOWN
    color = enum.Enum("Color", "RED")
    assert attributes.attribute(color, "RED") is color["RED"]
    module = types.ModuleType("lazy")
    module.__getattr__ = trap("module getattr")  # type: ignore[method-assign]
    module.there = 1  # type: ignore[attr-defined]
    assert attributes.attribute(module, "there") == 1
    assert attributes.attribute(module, "missing") is UNKNOWN
    assert attributes.attribute(torch, "nn") is nn


def test_parts_of_models_are_found() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
            self.heads = nn.ModuleDict({"a": nn.Linear(3, 1)})
            self.register_buffer("steps", torch.zeros(1))

    model = Model()
    linear = attributes.item(attributes.attribute(model, "layers"), 0)
    assert linear is model.layers[0]
    assert attributes.item(model.layers, -1) is model.layers[1]
    assert attributes.item(model.layers, 2) is UNKNOWN
    assert attributes.attribute(linear, "weight") is linear.weight
    assert attributes.attribute(model, "steps") is model.steps
    assert attributes.item(model.heads, "a") is model.heads["a"]
    assert attributes.keys(model.heads) == ["a"]
    assert {"layers", "heads", "steps", "forward", "training"} <= {name for name, _ in attributes.names(model)}
    assert attributes.attribute(linear.weight, "grad") == InstanceOf(torch.Tensor)
    assert attributes.attribute(linear.weight, "shape") == InstanceOf(torch.Size)


def test_items_of_containers_are_found() -> None:
    class Default(collections.defaultdict):  # type: ignore[type-arg]
        __missing__ = trap("missing")

    made: list[int] = []
    values = collections.defaultdict(lambda: made.append(1), a=1)
    assert attributes.item(values, "a") == 1
    assert attributes.item(values, "b") is UNKNOWN
    assert made == []
    plain, ordered = {KeyTrap(): 1, "a": 2}, collections.OrderedDict([(KeyTrap(), 1), ("a", 2)])
    ran.clear()  # making them calls the methods of the keys
    assert attributes.item(plain, "a") == attributes.item(ordered, "a") == 2
    assert attributes.keys(plain) == attributes.keys(ordered) == ["a"]
    assert attributes.item(Default(), "b") is UNKNOWN
    assert attributes.item([1, 2], -1) == 2
    assert attributes.item((1, 2), 2) is UNKNOWN
    assert attributes.item({1: "x"}, 1) == "x"
    assert attributes.keys({"a": 1, 2: 3, (4,): 5}) == ["a", 2]


def test_results_of_calls_are_known_by_their_annotations() -> None:
    def local() -> Base:
        raise AssertionError

    def named() -> types.SimpleNamespace:
        raise AssertionError

    assert attributes.called(nn.Linear) == InstanceOf(nn.Linear)
    assert attributes.called(Base().method) == InstanceOf(Base)
    assert attributes.called(local) == InstanceOf(Base)
    assert attributes.called(named) == InstanceOf(types.SimpleNamespace)
    assert attributes.called(len) is UNKNOWN
    assert attributes.called(trap) is UNKNOWN  # Any is no class
