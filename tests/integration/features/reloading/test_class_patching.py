"""After a reload a class is the same object in its module, in names that cells hold, and in their instances."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .test_reloading import ranks

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_disttrain import Cluster

__all__ = ["ranks"]  # the fixture

MODULE = """
from dataclasses import dataclass
from enum import Enum, Flag, IntEnum
from typing import NamedTuple
class Slots:
    __slots__ = ("x",)
    def name(self): return "{name}"
    @classmethod
    def make(cls): return cls()
class Empty:
    __slots__ = ()
    def name(self): return "{name}"
@dataclass(slots=True)
class SlotsData:
    x: int = 1
    def name(self): return "{name}"
@dataclass
class Data:
    x: int = 1
    def name(self): return "{name}"
class Thing:
    class Inner:
        def name(self): return "{name}"
    def __init__(self): self.inner = self.Inner()
    def name(self): return "{name}"
class Child(Thing):
    def name(self): return super().name() + "!"
class Point(NamedTuple):
    x: int = 1
    def name(self): return "{name}"
class Meta(type):
    def name(cls): return "{name}"
class Mode(Enum):
    TRAIN = 1
    EVAL = 2
    def name_of_code(self): return "{name}"
class Level(IntEnum):
    LOW = {number}
class Part(Flag):
    A = 1
    B = 2
    C = 4
def is_train(mode): return mode is Mode.TRAIN
"""
KINDS = ("Slots", "Empty", "SlotsData", "Data", "Thing", "Child", "Point")


def write(folder: Path, name: str, number: int = 1, *, old: str = "", new: str = "") -> None:
    (folder / "m.py").write_text(MODULE.format(name=name, number=number).replace(old, new))


def assert_on_ranks(ranks: Cluster, *statements: str) -> None:
    """Assert that each expression is true on each rank."""
    by_rank = ranks.run(f"[{', '.join(statements)}]").results
    assert {rank: dict(zip(statements, values, strict=True)) for rank, values in by_rank.items()} == dict.fromkeys(
        range(2), dict.fromkeys(statements, True)
    )


def test_objects_and_classes_held_by_cells_are_those_of_the_module(ranks: Cluster, folder: Path) -> None:
    write(folder, "old")
    ranks.run(f"""
import m, pickle, functools
from m import *
Inner = Thing.Inner
kinds = lambda: [{", ".join(KINDS)}]
things = [kind() for kind in kinds()]
calls = [each.name for each in things]
make = Slots.make
class Mine(Thing, metaclass=Meta):
    def name(self): return super().name() + "?"
mine, by_kind, a_list = Mine(), {{Data: "data", 1: "one", Slots: "slots"}}, list[Data]
def of(kind=Data, *, also=Slots): return kind, also
maker = functools.partial(Data, x=3)""")
    for name in ("new", "newest"):
        write(folder, name)
        assert str(ranks.reloading.sync()) == "reloaded m on ranks 0-1"
        ranks.run("import gc; gc.collect()")  # the old classes are freed then
        names = [f"{name}!" if kind == "Child" else name for kind in KINDS]
        assert_on_ranks(
            ranks,
            "all(each is getattr(m, each.__name__) for each in kinds())",
            "all(type(each) is kind and isinstance(each, kind) for each, kind in zip(things, kinds()))",
            f"[each.name() for each in things] == {names}",
            f"[kind().name() for kind in kinds()] == {names}",
            f"[call() for call in calls] == {names}",
            "Data() == m.Data() == things[3] == pickle.loads(pickle.dumps(Data()))",
            f"Inner is m.Thing.Inner is type(things[4].inner) and things[4].inner.name() == {name!r}",
            "type(make()) is m.Slots and of() == (m.Data, m.Slots) and maker() == m.Data(3)",
            f"isinstance(mine, m.Thing) and mine.name() == {name + '?'!r}",
            f"type(Mine) is m.Meta and m.Meta.name(Mine) == {name!r}",
            "by_kind == {m.Data: 'data', 1: 'one', m.Slots: 'slots'}",
            "list(by_kind.values()) == ['data', 'one', 'slots']",
            "a_list == list[m.Data]",
        )


def test_enum_members_held_by_cells_are_those_of_the_module(ranks: Cluster, folder: Path) -> None:
    write(folder, "old")
    ranks.run("""
import m
from m import Mode, Level, Part, is_train
mode, low, parts, none = Mode.TRAIN, Level.LOW, Part.A | Part.B, Part(0)
loaders = {Mode.TRAIN: "a", Mode.EVAL: "b", (Mode.TRAIN, 1): "c"}
def run(mode=Mode.TRAIN): return mode
class Settings: mode = Mode.EVAL""")
    write(folder, "new", number=7)
    assert str(ranks.reloading.sync()) == "reloaded m on ranks 0-1"
    assert_on_ranks(
        ranks,
        "is_train(mode) and m.is_train(Mode.TRAIN) and is_train(run())",
        "Mode is m.Mode and Settings.mode is m.Mode.EVAL",
        "mode.name_of_code() == 'new'",
        "low == 7 and low is m.Level.LOW",
        "parts == m.Part.A | m.Part.B and m.Part.A in parts and none is m.Part(0)",
        "loaders == {m.Mode.TRAIN: 'a', m.Mode.EVAL: 'b', (mode, 1): 'c'}",
    )


def test_object_that_cannot_change_its_class_is_named_and_unchanged(ranks: Cluster, folder: Path) -> None:
    write(folder, "old")
    ranks.run("""
from m import Slots, Mode, Thing, Level
slots, evaluates, train = Slots(), Mode.EVAL, Mode.TRAIN
slots.x = 5
class Mine(Slots): pass""")
    write(folder, "new", old='("x",)', new='("x", "y")')
    lines = str(ranks.reloading.sync()).splitlines()
    assert lines[0] == "reloaded m on ranks 0-1"
    assert [line.partition(" (")[0] for line in lines[1:]] == ["objects of m.Slots", "objects of __main__.Mine"]
    end = "on ranks 0-1 keep the old code; create them again"
    assert all("layout differs" in line and line.endswith(end) for line in lines[1:])
    assert_on_ranks(ranks, "slots.x == 5 and slots.name() == 'old'", "Slots().name() == 'new' and hasattr(Slots, 'y')")
    ranks.run("slots = Slots(); slots.y = 1; del Mine")
    write(folder, "newest", old="    EVAL = 2\n", new="")
    ranks.run("import gc; gc.collect();")
    assert str(ranks.reloading.sync()).splitlines()[-1] == f"objects of m.Mode (EVAL was removed) {end}"
    assert_on_ranks(ranks, "train is Mode.TRAIN and evaluates.name_of_code() == 'new'")


def test_functions_and_classes_of_other_modules_are_not_patched(ranks: Cluster, folder: Path) -> None:
    (folder / "foreign.py").write_text("def relu(): return 'relu'\ndef gelu(): return 'gelu'\n")
    module = "import foreign\nclass A: n = 'A'\nclass B: n = 'B'\nAlias = A\n"
    module += "class Net:\n    kind = A\n    act = foreign.relu\n"
    (folder / "m.py").write_text(module)
    ranks.run("import foreign\nfrom m import A, B, Net")
    (folder / "m.py").write_text(module.replace("relu", "gelu").replace("= A", "= B"))
    assert str(ranks.reloading.sync()) == "reloaded m on ranks 0-1"
    assert ranks.run("foreign.relu(), Net.act(), A.n, B.n, Net.kind is B").results[1] == (
        "relu",
        "gelu",
        "A",
        "B",
        True,
    )
