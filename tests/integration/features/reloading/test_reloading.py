"""``%dist_sync_code``: edited code runs on every rank, and files are copied to hosts that do not share the folder."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.errors import CodeError, UsageError

from ..staging.test_staging import on_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from jupyter_disttrain import Cluster

    from ....lab import Lab
    from ....support.notebook_driver import Notebook

BASE = """
VALUE = {value}
def value(): return VALUE
class Thing:
    def value(self): return VALUE
"""
USER = """
import base
from base import VALUE
def both(): return VALUE, base.value(), {other}
"""
FULL_DISK = """
from jupyter_disttrain.errors import UsageError
def sync_code(*_, **__): raise UsageError("rank 1 on node2: OSError: no space left")
cluster.reloading.sync = sync_code
"""


@pytest.fixture
def ranks(torchless: Cluster, folder: Path) -> Iterator[Cluster]:
    """Two ranks that find modules in the test's folder, and have none of them imported afterwards."""
    torchless.run(f"import sys; sys.path.insert(0, {str(folder)!r}); sys.dont_write_bytecode = False")
    yield torchless
    names = [path.stem for path in folder.glob("*.py")]
    torchless.run(f"sys.path.remove({str(folder)!r}); [sys.modules.pop(name, None) for name in {names!r}]")


def write(folder: Path, value: int, other: int = 0) -> None:
    (folder / "base.py").write_text(BASE.format(value=value))
    (folder / "user.py").write_text(USER.format(other=other))


def test_objects_held_by_cells_use_the_edited_code(ranks: Cluster, folder: Path) -> None:
    write(folder, 1)
    ranks.run("from base import value, Thing; from user import both; thing = Thing()")
    assert str(ranks.reloading.sync()) == "no module was edited since the ranks imported it"
    write(folder, 2)  # of the same size, within the same second: Python's own cache would not notice it
    assert ranks.reloading.sync().reloaded == {"base": (0, 1), "user": (0, 1)}
    assert ranks.run("value(), thing.value(), both()").results[1] == (2, 2, (2, 2, 0))
    write(folder, 2, other=5)
    assert str(ranks.reloading.sync()) == "reloaded base, user on ranks 0-1"
    assert ranks.run("both()").results == {0: (2, 2, 5), 1: (2, 2, 5)}


def test_only_ranks_that_imported_a_module_reload_it(ranks: Cluster, folder: Path) -> None:
    write(folder, 1)
    ranks.run("import base", ranks=1)
    write(folder, 2)
    assert ranks.reloading.sync().reloaded == {"base": (1,)}
    assert ranks.run("import base; base.value()").results == {0: 2, 1: 2}


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("VALUE = 3\ndef value( return 3", r"base\.py:2: SyntaxError: .*; the module is unchanged on ranks 0-1"),
        (
            "VALUE = 3\n1 / 0",
            r"base\.py:2: ZeroDivisionError: division by zero; the module is unchanged on ranks 0-1",
        ),
    ],
)
def test_module_that_cannot_be_reloaded_is_named_with_its_line_and_kept(
    ranks: Cluster, folder: Path, text: str, output: str
) -> None:
    write(folder, 1)
    ranks.run("import base, user")
    write(folder, 2, other=7)
    (folder / "base.py").write_text(text)
    with pytest.raises(CodeError, match=output) as caught:
        ranks.reloading.sync()
    assert "reloaded user on ranks 0-1" in str(caught.value)
    assert ranks.run("base.value(), user.both()").results[0] == (1, (1, 1, 7))
    write(folder, 2)
    ranks.reloading.sync()
    assert ranks.run("base.value()").results == {0: 2, 1: 2}


def test_named_files_must_be_in_the_notebook_folder(ranks: Cluster, folder: Path) -> None:
    with pytest.raises(UsageError, match="there is no nothing in"):
        ranks.reloading.sync(["nothing"])
    with pytest.raises(UsageError, match="is not below the notebook's folder"):
        ranks.reloading.sync(["/etc/hostname"])
    write(folder, 1)
    assert not ranks.reloading.sync(["user"]).brought  # both use the same folder


def test_symlinked_modules_are_reloaded(ranks: Cluster, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    lib = tmp_path_factory.mktemp("lib")
    (lib / "pack").mkdir()
    for name in ("pack/inner.py", "single.py"):
        (lib / name).write_text("def value(): return 1")
    (folder / "pack").symlink_to(lib / "pack")
    (folder / "single.py").symlink_to(lib / "single.py")
    ranks.run("from pack.inner import value as inner; from single import value as single")
    try:
        assert str(ranks.reloading.sync(["pack", "single"])) == "no module was edited since the ranks imported it"
        for name in ("pack/inner.py", "single.py"):
            (lib / name).write_text("def value(): return 22")
        assert str(ranks.reloading.sync()) == "reloaded pack.inner, single on ranks 0-1"
        assert ranks.run("inner(), single()").results == {0: (22, 22), 1: (22, 22)}
    finally:
        ranks.run("del sys.modules['pack.inner'], sys.modules['pack']")


def test_modules_outside_the_notebook_folder_are_reloaded(
    ranks: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, 1)
    (folder / "notebooks").mkdir()
    monkeypatch.chdir(folder / "notebooks")
    above = str(folder / "notebooks" / "..")  # as sys.path.append("..") sets it
    ranks.run(f"sys.path.insert(0, {above!r}); import base; assert '..' in base.__file__")
    try:
        write(folder, 2)
        assert str(ranks.reloading.sync()) == "reloaded base on ranks 0-1"
        assert ranks.run("base.value()").results == {0: 2, 1: 2}
    finally:
        ranks.run(f"sys.path.remove({above!r})")


def test_hosts_without_the_folder_get_the_imported_modules(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    project = lab.local_disk / "project"  # each host has a separate folder there
    project.mkdir()
    for host in lab.hosts[:2]:
        lab.run(host, f"mkdir {project}")
    monkeypatch.chdir(project)
    write(project, 1)
    try:
        with on_hosts(lab, 2, 1) as cluster:
            synced = cluster.reloading.sync(["user"])
            assert synced.brought == dict.fromkeys(("base.py", "user.py"), ("node1", "node2"))
            cluster.run("import sys; sys.path.insert(0, ''); from user import both")
            write(project, 2, other=4)
            assert str(cluster.reloading.sync()) == (
                "brought base.py, user.py to node1, node2\nreloaded base, user on ranks 0-2"
            )
            assert cluster.run("both()").results == dict.fromkeys(range(3), (2, 2, 4))
            (project / "pack").mkdir()
            (project / "pack" / "__init__.py").touch()
            assert cluster.reloading.sync(["pack"]).brought == {"pack/__init__.py": ("node1", "node2")}
            cluster.run("import pack, sys; sys.modules.pop('pack')")
            shutil.rmtree(project / "pack")
            (project / "user.py").unlink()
            lab.run("node2", f"echo >> {project}/user.py")  # the user has edited it there
            assert str(cluster.reloading.sync()) == (
                "removed pack/__init__.py from node1, node2\nremoved user.py from node1\nreloaded user on rank 2"
            )
            assert str(cluster.reloading.sync()) == "no module was edited since the ranks imported it"
            find = "from importlib.machinery import PathFinder; [bool(PathFinder.find_spec(name)) for name in {}]"
            values = cluster.run(find.format(["pack", "user", "base"])).results
            assert values == {0: [False, False, True], 1: [False, False, True], 2: [False, True, True]}
    finally:
        shutil.rmtree(project)
        for host in lab.hosts[:2]:
            lab.run(host, f"rm -r {project}")


def test_magic_and_automatic_reloading(notebook: Notebook, tmp_path: Path) -> None:
    write(tmp_path, 1)
    notebook.run(f"%%distributed\nimport sys; sys.path.insert(0, {str(tmp_path)!r}); from user import both").check()
    assert notebook.run("%dist_sync_code").check().text == "no module was edited since the ranks imported it"
    write(tmp_path, 2)
    with (tmp_path / "base.py").open("a") as module:
        module.write("print('loaded')")
    shown = notebook.run("%dist_sync_code").check().lines
    assert shown == ["ranks 0-1 │ loaded", "reloaded base, user on ranks 0-1"]
    try:
        assert "before every cell" in notebook.run("%dist_sync_code --auto on").check().text
        write(tmp_path, 3, other=1)
        shown = notebook.run("%%distributed\nprint(both())").check().lines
        assert shown == ["reloaded base, user on ranks 0-1", "ranks 0-1 │ (3, 3, 1)"]
        notebook.run("%%rank 1 --noblock\nimport time\nwhile not getattr(time, 'go', 0): time.sleep(0.01)").check()
        write(tmp_path, 4, other=1)
        shown = notebook.run("%%rank 0\nprint(both())").check().lines
        assert shown == ["reloaded base, user on rank 0", "(4, 4, 1)"]
        notebook.run("cluster.interrupt()").check()
        notebook.run("%dist_wait")
        (tmp_path / "user.py").write_text("x = (")
        shown = notebook.run("%%distributed\nprint(both())").check().lines
        assert (
            f"{tmp_path}/user.py:1: SyntaxError: '(' was never closed; the module is unchanged on ranks 0-1" in shown[0]
        )
        assert shown[1:] == ["rank 0 │ (4, 4, 1)", "rank 1 │ (3, 4, 1)"]
        notebook.run(FULL_DISK).check()
        shown = notebook.run("%%rank 0\nprint(rank)").check().lines
        assert shown == ["rank 1 on node2: OSError: no space left", "0"]
        notebook.run("del cluster.reloading.sync").check()
    finally:
        notebook.run("%dist_sync_code --auto off").check()
        notebook.run(
            f"%%distributed\nsys.path.remove({str(tmp_path)!r}); del both, sys.modules['user'], sys.modules['base']"
        ).check()
