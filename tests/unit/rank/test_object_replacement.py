"""References to an old process group are replaced by the new one, wherever they are; nothing keeps the old one."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections import deque, namedtuple
from typing import TYPE_CHECKING, Any

import pytest
from torch._C._distributed_c10d import HashStore

from jupyter_disttrain.rank.process_group.object_replacement import (
    Protected,
    _Replacing,
    freeze,
    replace_everywhere,
    unfreeze,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Pair = namedtuple("Pair", "left right")  # noqa: PYI024  (as an untyped script has it)


class Thing:
    """An object tracked by Python's garbage collector."""


class Slots:
    __slots__ = ("thing",)


def in_default(thing: Any) -> tuple[Any, Callable[[], Any]]:
    def function(_first: int = 1, group: Any = thing) -> Any:
        return group

    return function, function


def in_keyword_default(thing: Any) -> tuple[Any, Callable[[], Any]]:
    def function(*, group: Any = thing) -> Any:
        return group

    return function, function


def in_closure(thing: Any) -> tuple[Any, Callable[[], Any]]:
    def function() -> Any:
        return thing

    return function, function


def in_class(thing: Any) -> tuple[Any, Callable[[], Any]]:
    class Holder:
        group = thing

    assert Holder().group is thing, "fills Python's attribute cache"
    return Holder, lambda: Holder().group


def in_slot(thing: Any) -> tuple[Any, Callable[[], Any]]:
    holder = Slots()
    holder.thing = thing  # type: ignore[attr-defined]
    return holder, lambda: holder.thing  # type: ignore[attr-defined]


HOLDERS: dict[str, Callable[[Any], tuple[Any, Callable[[], Any]]]] = {
    "default": in_default,
    "keyword default": in_keyword_default,
    "closure": in_closure,
    "class": in_class,
    "slot": in_slot,
    "partial": lambda thing: ((holder := functools.partial(print, end=thing)), lambda: holder.keywords["end"]),
    "arguments of a partial": lambda thing: (
        (holder := functools.partial(max, thing, key=id)),
        lambda: holder.args[0],
    ),
    "set": lambda thing: ((holder := {thing}), lambda: next(iter(holder))),
    "frozenset": lambda thing: ((holder := [frozenset([thing])]), lambda: next(iter(holder[0]))),
    "dict": lambda thing: ((holder := {"a": thing}), lambda: holder["a"]),
    "list": lambda thing: ((holder := [1, thing]), lambda: holder[1]),
    "deque": lambda thing: ((holder := deque([thing])), lambda: holder[0]),
    "tuple": lambda thing: ((holder := [(1, (thing, "plain"))]), lambda: holder[0][1][0]),
    "named tuple": lambda thing: ((holder := {"a": Pair(1, thing)}), lambda: holder["a"].right),
    "bound method": lambda thing: (
        (holder := [types.MethodType(lambda self: self, thing)]),
        lambda: holder[0].__self__,
    ),
    "plain dict in a tuple": lambda thing: ((holder := [({"a": thing},)]), lambda: holder[0][0]["a"]),
}


@pytest.fixture
def small_heap() -> Iterator[None]:
    """Have the collector skip all objects from before the test: pytest's process holds a million."""
    freeze()
    yield
    unfreeze()


def test_group_untracked_by_the_collector_is_found() -> None:
    old, new = Thing(), Thing()
    holder = [old]
    gc.freeze()
    try:
        assert replace_everywhere([(old, new)]) == []
        assert holder[0] is new
    finally:
        gc.unfreeze()


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("make", [HashStore, Thing], ids=["unknown to the collector", "known"])
@pytest.mark.parametrize("kind", HOLDERS)
def test_references_to_the_old_group_refer_to_the_new_one(kind: str, make: Callable[[], Any]) -> None:
    # The collector tracks neither torch's groups and stores nor tuples and dicts that hold nothing else.
    old, new = make(), make()
    _holder, read = HOLDERS[kind](old)
    for _ in range(3):  # after it the collector no longer tracks plain objects, nor what holds nothing else
        gc.collect()
    gone = weakref.ref(old)
    pairs = [(old, new)]
    del old
    assert replace_everywhere(pairs) == []
    assert read() is new
    if kind == "closure":
        del _holder, read  # the argument of the function that created it belongs to another cell
    gc.collect()
    assert gone() is None, gc.get_referrers(gone())


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("held_by_users", [0, 1])
def test_untracked_holders_are_searched_for_only_if_there_are_more_than_those_of_c_code(
    held_by_users: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[Any] = []
    untracked = _Replacing.untracked
    monkeypatch.setattr(_Replacing, "untracked", lambda self: searches.append(self) or untracked(self))
    old, new = HashStore(), HashStore()
    of_c = (old, "C code")
    of_users = [(old, number) for number in range(held_by_users)]
    for _ in range(3):  # after it the collector no longer tracks the tuples
        gc.collect()
    pairs = [(old, new)]
    del old
    held = {"of users": of_users}
    assert replace_everywhere(pairs, held_in_c=1) == []
    assert bool(searches) == bool(held_by_users)
    assert all(each[0] is new for each in held["of users"])
    assert len(of_c) == 2


def test_excluded_references_are_kept() -> None:
    old, new = Thing(), Thing()
    protected = Protected(old)
    replace_everywhere([(old, new)])
    assert protected.held is old


def test_object_that_refuses_replacement_is_named_and_others_are_replaced() -> None:
    class Refuses(dict):  # type: ignore[type-arg]
        def __setitem__(self, key: Any, value: Any) -> None:
            raise TypeError("read only")

    old, new = Thing(), Thing()
    refuses, willing = Refuses(a=old), [old]
    (failure,) = replace_everywhere([(old, new)])
    assert failure == "what an object of Refuses holds (TypeError: read only)"
    assert refuses["a"] is old
    assert willing == [new]


def test_holder_that_was_hidden_before_the_fork_is_found() -> None:
    old, new = Thing(), Thing()
    module = types.ModuleType("frozen")
    module.group = old  # type: ignore[attr-defined]
    freeze()
    try:
        pairs = [(old, new)]
        del old
        assert replace_everywhere(pairs) == []
        assert module.group is new  # type: ignore[attr-defined]
    finally:
        unfreeze()
