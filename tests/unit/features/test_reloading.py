"""``%dist_sync_code``: how modules are reloaded, and how files are written on a node."""

from __future__ import annotations

import hashlib
import os
import pickle
import socket
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jupyter_disttrain.features.reloading.client import Synced
from jupyter_disttrain.features.reloading.rank import LocalModules, note_files

if TYPE_CHECKING:
    from collections.abc import Callable

MODULE = """
import foreign
from dataclasses import dataclass
from enum import Enum
class Slots:
    __slots__ = ("x",)
    def name(self): return "{name}"
@dataclass(slots=True)
class Data:
    x: int = 1
    def name(self): return "{name}"
class Base:
    def name(self): return "{name}"
class Child(Base):
    act = foreign.relu
    def name(self): return super().name()
class Mode(Enum):
    TRAIN = {number}
    EVAL = 2
Alias = Slots
def is_train(mode): return mode is Mode.TRAIN
"""


@pytest.fixture
def edit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that edits the module ``reloadable``."""
    monkeypatch.setattr(SourceFileLoader, "path_stats", SourceFileLoader.path_stats)
    monkeypatch.syspath_prepend(folder)
    for name in ("reloadable", "foreign"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (folder / "foreign.py").write_text("def relu(): return 'relu'\ndef gelu(): return 'gelu'\n")
    note_files()

    def write(name: str, number: int = 1, old: str = "", new: str = "") -> None:
        (folder / "reloadable.py").write_text(MODULE.format(name=name, number=number).replace(old, new))

    return write


def test_variables_and_objects_get_the_new_code(edit: Callable[..., None]) -> None:
    edit("old")
    modules, cells = LocalModules(), dict[str, Any]()
    exec(
        "import reloadable, foreign\nfrom reloadable import *\nkinds = [Slots, Data, Base, Child]\n"
        "things = [kind() for kind in kinds]\nmode, other = Mode.TRAIN, Mode.EVAL",
        cells,
    )
    for number, name in enumerate(("new", "newer"), 2):
        edit(name, number, "foreign.relu", "foreign.gelu")
        assert modules.reload(cells) == {"reloaded": ["reloadable"], "failed": [], "kept": []}
        module = cells["reloadable"]
        assert all(cells[each] is getattr(module, each) for each in ("Slots", "Data", "Base", "Child", "Mode"))
        assert [type(each) for each in cells["things"]] == [module.Slots, module.Data, module.Base, module.Child]
        assert [each.name() for each in cells["things"]] == [name] * 4
        assert pickle.loads(pickle.dumps(cells["Data"]())) == module.Data()
        assert cells["is_train"](cells["mode"])
        assert cells["mode"].value == number
        assert (cells["Child"].act(), cells["foreign"].relu()) == ("gelu", "relu")


def test_super_may_be_added_and_removed(edit: Callable[..., None]) -> None:
    edit("old")
    modules, cells = LocalModules(), dict[str, Any]()
    exec("from reloadable import Child; child = Child()", cells)
    for old, new in (("super().name()", "'own'"), ("", "")):
        edit("base", old=old, new=new)
        assert modules.reload(cells)["failed"] == []
        assert cells["child"].name() == cells["Child"]().name() == (new.strip("'") or "base")


def test_objects_that_keep_the_old_code_are_named(edit: Callable[..., None]) -> None:
    edit("old")
    modules, cells = LocalModules(), dict[str, Any]()
    exec("from reloadable import Slots; slots = Slots()", cells)
    edit("new", old='("x",)', new='("x", "y")')
    (kept,) = modules.reload(cells)["kept"]
    assert kept.startswith("reloadable.Slots (")
    assert "layout differs" in kept
    synced = Synced(reloaded={}, brought={}, kept={kept: (0, 1)}, removed={})
    assert str(synced) == f"objects of {kept} on ranks 0-1 keep the old code; create them again"
    assert cells["Slots"]().name() == "new"


def test_symlinks_of_a_node_are_not_followed_when_writing(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lib = tmp_path_factory.mktemp("lib")
    (lib / "pack").mkdir()
    for name in ("pack/inner.py", "single.py"):
        (lib / name).write_text("theirs")
    (folder / "pack").symlink_to(lib / "pack")
    (folder / "single.py").symlink_to(lib / "single.py")
    (folder / "real").mkdir()
    (folder / "within").symlink_to("real")
    modules = LocalModules()
    hashes = {name: hashlib.sha256(b"theirs").hexdigest() for name in ("pack/inner.py", "single.py")}
    assert modules.compare(str(folder), hashes) == []
    with pytest.raises(ValueError, match=r"pack/inner\.py .* is reached through a link to .*/lib"):
        modules.write(str(folder), ["pack/inner.py"], [b"ours"])
    modules.write(str(folder), ["single.py", "within/new.py"], [b"ours", b"ours"])
    assert (folder / "single.py").read_text() == (folder / "real" / "new.py").read_text() == "ours"
    assert modules.remove(str(folder), {"pack/inner.py": hashes["pack/inner.py"]}) == []
    assert (lib / "pack" / "inner.py").read_text() == (lib / "single.py").read_text() == "theirs"
    for name in ("../single.py", str(lib / "single.py")):
        with pytest.raises(ValueError, match="is outside of"):
            modules.write(str(folder), [name], [b"ours"])


def test_ranks_that_write_one_file_use_different_temporary_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts may share the folder; ``os.getpid`` and the host's name tell their ranks apart."""
    written: list[str] = []
    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: written.append(path.name) or write(path, data))
    for host, pid in (("node1", 7), ("node1", 8), ("node2", 7)):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        LocalModules().write(str(folder), ["own.py"], [b"ours"])
    assert len(set(written)) == 3
    assert [path.name for path in folder.iterdir()] == ["own.py"]


def test_file_that_another_host_removes_at_the_same_time_is_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "own.py").write_text("ours")
    unlink = Path.unlink

    def unlink_second(path: Path, **options: bool) -> None:
        unlink(path, missing_ok=True)
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", unlink_second)
    assert LocalModules().remove(str(folder), {"own.py": hashlib.sha256(b"ours").hexdigest()}) == []


PACKAGE = """
import foreign
class Base:
    @classmethod
    def make(cls): return cls()
class Config(Base):
    optimizer = foreign.{optimizer}
    @classmethod
    def make(cls): return {made}
"""


def test_classes_that_a_module_only_uses_and_its_submodules_stay(
    edit: Callable[..., None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit("any")
    monkeypatch.delitem(sys.modules, "pack", raising=False)
    (folder / "foreign.py").write_text("class SGD:\n    lr = 1\nclass Adam:\n    lr = 2\n")
    (folder / "pack").mkdir()
    (folder / "pack" / "sub.py").touch()
    code = folder / "pack" / "__init__.py"
    code.write_text(PACKAGE.format(optimizer="SGD", made="cls()"))
    modules, cells = LocalModules(), dict[str, Any]()
    exec("import foreign, pack.sub\nfrom pack import Config\nused = foreign.SGD()", cells)
    code.write_text(PACKAGE.format(optimizer="Adam", made="super().make()"))
    assert modules.reload(cells) == {"reloaded": ["pack"], "failed": [], "kept": []}
    foreign, config = cells["foreign"], cells["Config"]
    assert (foreign.SGD.lr, type(cells["used"])) == (1, foreign.SGD)
    assert config.optimizer is foreign.Adam
    assert isinstance(config.make(), config)
    assert cells["pack"].sub is sys.modules["pack.sub"]
