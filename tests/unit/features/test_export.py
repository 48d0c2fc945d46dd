"""``%dist_export``: how one cell is written, which pushed values a script can load, the file that launches it."""

from __future__ import annotations

import sys

import pytest

from jupyter_disttrain.client.cells.history import CellEntry
from jupyter_disttrain.errors import UsageError
from jupyter_disttrain.features.export.cells import read_cell
from jupyter_disttrain.features.export.export import _check_portable
from jupyter_disttrain.features.export.template import LAUNCHES, Frame, launch_file


def exported(code: str, *ranks: int) -> str:
    """Return the lines of a cell in a script of two ranks, below its title."""
    entry = CellEntry(number=1, execution_count=1, code=code, ranks=ranks or (0, 1), cell_id="")
    return read_cell(entry).text(2).partition("\n")[2]


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


def test_value_is_refused_for_its_class_and_not_for_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    _check_portable("source", ["if __name__ == '__main__':", "__main__"])
    monkeypatch.setattr(_Own, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "_Own", _Own, raising=False)
    with pytest.raises(UsageError, match="uses _Own of the notebook"):
        _check_portable("value", ["__main__", _Own()])
