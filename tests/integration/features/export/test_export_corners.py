"""``%dist_export``, rare cases in which a script could behave differently."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import numpy as np
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.client.cells.history import Origin
from jupyter_disttrain.errors import UsageError

from .test_export import clear_history, launched

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two ranks by one launcher: the launcher does not matter here, and many tests need new ranks."""
    with Cluster(n=2, launcher="local", name="exported") as cluster:
        yield cluster


def test_edited_cell_keeps_its_position(cluster: Cluster, tmp_path: Path) -> None:
    clear_history(cluster)
    for number, (cell_id, code) in enumerate((("a", "v = 1"), ("b", "w = v + 1"), ("a", "v = 5")), 1):
        cluster.run(code, origin=Origin(execution_count=number, cell_id=cell_id))
    cluster.run("print(f'rank {rank} {v} {w}\\n', end='', flush=True)")
    exported = cluster.scripts.export(tmp_path / "it.py")
    assert launched(exported.command, tmp_path) == ["rank 0 5 6", "rank 1 5 6"]
    assert exported.notes == (
        "cells [1] ran again later: only the last run is in the script, in the place of the first",
    )


def test_effects_of_magics_are_reported(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.py").write_text("")
    clear_history(cluster)
    cluster.run("value = 1")
    cluster.checkpoints.save("run", ["value"])
    cluster.checkpoints.load("run")
    cluster.scripts.run("other.py")
    exported = cluster.scripts.export(tmp_path / "it.py")
    assert exported.notes == (
        "%dist_load run is not in the script: write it in Python",
        "%dist_run other.py is not in the script: write it in Python",
    )
    assert "# %dist_load run was here" in exported.script.read_text()


def test_pushed_values_are_stored_beside_the_script(cluster: Cluster, tmp_path: Path) -> None:
    clear_history(cluster)
    cluster.push({"table": np.arange(4.0)})
    cluster.run("print(f'rank {rank} {table.sum()}\\n', end='', flush=True)")
    for _ in range(2):
        exported = cluster.scripts.export(tmp_path / "it's.py")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert launched(shlex.quote(str(exported.launch)), elsewhere) == ["rank 0 6.0", "rank 1 6.0"]


def test_names_of_the_script_and_of_cells_do_not_clash(tmp_path: Path) -> None:
    with Cluster(n=2, launcher="local", name="named") as cluster:
        cluster.push({"table": np.arange(4.0)})
        cluster.run("_pushed, _copy, _rank, _dist, pushed, copied = 'abcdef'")
        cluster.run("me, rank, dist = rank, rank + 10, 'far'")
        cluster.push({"late": np.ones(2)}, 1)
        cluster.run("offset = me * 2", 1)
        cluster.copy(["late", "offset", "me"], 1, [0])
        show = (
            "f'rank {rank} {_pushed}{_copy}{_rank}{_dist}{pushed}{copied} {dist} {table.sum()} {late.sum()} {offset}'"
        )
        expected = list(cluster.run(show).results.values())
        cluster.run(f"print({show} + '\\n', end='', flush=True)")
        exported = cluster.scripts.export(tmp_path / "it.py")
    assert expected == ["rank 10 abcdef far 6.0 2.0 2", "rank 11 abcdef far 6.0 2.0 2"]
    assert launched(exported.command, tmp_path) == expected


def test_copy_checks_the_same_in_script_and_session(cluster: Cluster, tmp_path: Path) -> None:
    clear_history(cluster)
    cluster.run("import os\nif any(name.startswith('DISTTRAIN_') for name in os.environ):\n    x = rank\nunused = 1")
    cluster.copy(["x", "unused"], 1, [0])
    cluster.run("print(f'rank {rank} {x}\\n', end='', flush=True)")
    exported = cluster.scripts.export(tmp_path / "it.py")
    assert "unused'" not in exported.script.read_text()
    with pytest.raises(AssertionError, match="NameError: rank 1 has no 'x'"):
        launched(exported.command, tmp_path)
    with pytest.raises(AssertionError, match="ValueError: there is no rank 1 to copy x; start 2 ranks"):
        launched("torchrun --nproc-per-node=1 it.py", tmp_path)


def test_copy_without_torch_uses_mpi(tmp_path: Path) -> None:
    with Cluster(n=2, backend="none", name="plain") as cluster:
        cluster.run("x = rank")
        cluster.copy(["x"], 1, [0])
        cluster.run("print(f'rank {rank} {x}\\n', end='', flush=True)")
        with pytest.raises(UsageError, match="can copy between ranks only with MPI; export with --mpi"):
            cluster.scripts.export(tmp_path / "it.py")
        exported = cluster.scripts.export(tmp_path / "it.py", "mpi")
    assert launched(exported.command, tmp_path) == ["rank 0 1", "rank 1 1"]
