"""``%dist_export``: what is written and what is refused, without running it."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from jupyter_disttrain.client.cells.history import CellEntry, Journal
from jupyter_disttrain.errors import UsageError
from jupyter_disttrain.features.export.cells import read_cell
from jupyter_disttrain.features.export.export import export
from jupyter_disttrain.features.export.template import LAUNCHES, Frame, launch_file
from jupyter_disttrain.protocol.serialization import dump_values

if TYPE_CHECKING:
    from pathlib import Path

FRAME = Frame(world_size=2, nodes=1, backend="gloo", on_gpus=False, threads="1", timeout_s=1.0)


def cell_of(code: str, *ranks: int) -> CellEntry:
    return CellEntry(number=1, execution_count=1, code=code, ranks=ranks or (0, 1), cell_id="")


def exported(code: str, *ranks: int) -> str:
    """Return the lines of a cell in a script of two ranks, below its title."""
    return read_cell(cell_of(code, *ranks)).text(2).partition("\n")[2]


def script_of(path: Path, code: str, launch: str = "torchrun", **pushed: Any) -> str:
    """Export a push and a cell, and return the script."""
    journal = Journal(began_late=False)
    journal.pushed(pushed, (0, 1), *dump_values(pushed))
    journal.add(cell_of(code))
    return export(path, journal.entries()[0], FRAME, launch).script.read_text()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("names = get_ipython().user_ns", r"In \[1\], line 1: get_ipython\(\) is not available in a script"),
        ("get_ipython().system()", r"line 1: ! means nothing in a script"),
        ("import asyncio\nawait asyncio.sleep(0)", r"In \[1\] awaits outside a function at line 2"),
        ("x = 1\n%who", r"In \[1\], line 2: %who means nothing in a script; write it in Python or leave it"),
        ("%time x = 1\n%cd .", r"line 2: %cd means"),
        ("%timeit x", r"line 1: %timeit means"),
        ("%time !echo x", r"line 1: %time means"),
        ("if 1:\n    x = !echo {x}", r"In \[1\], line 2: !echo {x} means"),
        ("%%html\n<b>", r"line 1: %%html means"),
        ("%%time\nx = 1\n%who", r"In \[1\], line 1, line 2: %who means"),
        ("x = (", r"In \[1\] is no Python at line 1"),
    ],
)
def test_code_that_needs_ipython_is_refused_with_its_line(code: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        exported(code)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("%matplotlib inline\nif 1:\n    %time a = -5", "None  # %matplotlib inline\nif 1:\n    a = -5"),
        ("kinds = %matplotlib --list", "kinds = None  # %matplotlib --list"),
        ("%%time\nif 1:\n    %time a = '%who'\nb = '''\n %who'''", "if 1:\n    a = '%who'\nb = '''\n %who'''"),
        ("import os; os.system('%who')", "import os; os.system('%who')"),
        ("from __future__ import annotations; y = 3", "pass; y = 3"),
        ("import os\nfrom __future__ import annotations", "import os\npass"),  # IPython runs it
        ("# a remark", "# a remark\npass"),
    ],
)
def test_other_cells_are_written_as_they_ran(code: str, text: str) -> None:
    assert exported(code) == text


def test_cell_of_one_rank_keeps_its_strings() -> None:
    text = exported("x = '''one\n two'''\ny = 1", 1)
    assert text == "if _disttrain_rank in {1}:\n    x = '''one\n two'''\n    y = 1"


@pytest.mark.parametrize("launch", LAUNCHES)
def test_launch_file_names_script_and_ranks(launch: str) -> None:
    frame = Frame(world_size=4, nodes=2, backend="gloo", on_gpus=False, threads="3", timeout_s=1.0)
    name, text = launch_file("it.py", frame, launch)
    assert name == ("it.sbatch" if launch == "slurm" else "it.sh")
    assert text.startswith("#!/usr/bin/env bash\n# Starts it.py; written by %dist_export.")
    assert "export OMP_NUM_THREADS=3\n" in text
    per_node = {"torchrun": "--nproc-per-node=2", "slurm": "--cpus-per-task=6", "mpi": "-n 4", "horovodrun": "-np 4"}
    assert per_node[launch] in text
    assert launch != "slurm" or r"sed -n 's/ *Command=\(.*\)\/.*/\1/p')" in text


class _Own:
    pass


def test_value_is_refused_for_its_class_and_not_for_its_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def write(value: object) -> None:
        script_of(tmp_path / "it.py", "value", value=[value] * 100)

    write("if __name__ == '__main__':")
    write(threading.Event)
    with pytest.raises(UsageError, match="value was pushed and can't be saved"):
        write(lambda: 1)
    monkeypatch.setattr(_Own, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "_Own", _Own, raising=False)
    with pytest.raises(UsageError, match="value was pushed and uses _Own of the notebook"):
        write(_Own)


def test_large_value_is_refused_by_name_if_a_cell_uses_it(tmp_path: Path) -> None:
    table = np.zeros(3 << 20)
    script_of(tmp_path / "it.py", "x = 1", table=table)
    with pytest.raises(UsageError, match="table: 24 MiB were pushed, which is too large for the export"):
        script_of(tmp_path / "it.py", "y = table.sum()", table=table)


@pytest.mark.parametrize(
    ("code", "needs"), [("import horovod.torch as hvd", False), ("def f(): return hvd.rank()", True)]
)
def test_horovod_needs_mpi(tmp_path: Path, code: str, needs: bool) -> None:
    with pytest.raises(UsageError, match=r"uses Horovod, which finds no other rank under torchrun; export with --mpi"):
        script_of(tmp_path / "it.py", code)
    head = script_of(tmp_path / "it.py", code, "mpi").partition("# In [")[0]
    assert ("import horovod.torch as hvd\n" in head, "\nhvd.init()\n" in head) == (needs, needs)


def test_user_files_are_not_overwritten(tmp_path: Path) -> None:
    for _ in range(2):
        script_of(tmp_path / "it.py", "x = 1")
    (tmp_path / "mine.sh").write_text("echo mine")
    (tmp_path / "folder.sh").mkdir()
    (tmp_path / "it_values.pkl").write_text("mine")
    for name, message in (
        ("mine.py", r"mine\.sh exists and was not written by %dist_export"),
        ("folder.py", r"folder\.sh exists"),
        ("it.py", r"it_values\.pkl exists and was not written by %dist_export"),
        ("same.sh", r"is the name of the file that launches the script; choose e\.g\. same\.py"),
    ):
        with pytest.raises(UsageError, match=message):
            script_of(tmp_path / name, "x", x=np.ones(1))


def test_cells_that_are_not_valid_together_are_refused(tmp_path: Path) -> None:
    cells = [cell_of("x = 1"), replace(cell_of("global x; x = 2"), number=2)]
    with pytest.raises(UsageError, match=r"the cells together are not valid Python: name 'x' is .* global"):
        export(tmp_path / "it.py", cells, FRAME, "torchrun")
