"""Child processes of a cell: forked, or with their code in a module."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.errors import RankFailure

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_disttrain import Cluster

DEFINED = """
import functools, math, multiprocessing as mp, torch.multiprocessing as tmp
from concurrent.futures import ProcessPoolExecutor
from torch.utils.data import DataLoader
import of_module
def f(x): return x + 1
class Squares:
    def __len__(self): return 4
    def __getitem__(self, i): return i * i
spawn, server, fork = (mp.get_context(each) for each in ("spawn", "forkserver", "fork"))
def pooled(context, fn, values, **options):
    with context.Pool(1, **options) as pool: return pool.map(fn, values)
def executed(context, fn, values):
    with ProcessPoolExecutor(1, context) as pool: return list(pool.map(fn, values))
def started(context, *args):
    process = context.Process(target=args[0], args=args[1:]); process.start(); process.join(); return process.exitcode
def by_default(method, call):
    before = mp.get_start_method(); mp.set_start_method(method, force=True)
    try: return call()
    finally: mp.set_start_method(before, force=True)
"""
REFUSED = {
    "pooled(spawn, f, [1])": "f",
    "pooled(server, f, [1])": "f",
    "pooled(tmp.get_context('spawn'), f, [1])": "f",
    "pooled(spawn, len, [Squares()])": "Squares",
    "pooled(spawn, math.sqrt, [1], initializer=f, initargs=(1,))": "f",
    "spawn.Pool(1).apply_async(f, (1,)).get()": "f",
    "list(spawn.Pool(1).imap(functools.partial(f, 1), [()]))": "f",
    "executed(spawn, f, [1])": "f",
    "executed(server, f, [1])": "f",
    "ProcessPoolExecutor(1, spawn).submit(len, [Squares()]).result()": "Squares",
    "started(spawn, f, 1)": "f",
    "started(server, Squares().__len__)": "Squares",
    "list(DataLoader(Squares(), num_workers=1, multiprocessing_context='spawn'))": "Squares",
    "list(DataLoader([1, 2], num_workers=1, multiprocessing_context='forkserver', collate_fn=f))": "f",
    "tmp.spawn(functools.partial(f), nprocs=1)": "f",
    "by_default('forkserver', lambda: mp.Pool(1).map(f, [1]))": "f",
    "by_default('forkserver', lambda: list(DataLoader(Squares(), num_workers=1)))": "Squares",
}
WORKS = {
    "pooled(spawn, math.sqrt, [4])": [2.0],
    "pooled(server, of_module.double, [4])": [8],
    "pooled(fork, f, [1])": [2],
    "executed(spawn, of_module.double, [4])": [8],
    "executed(fork, f, [1])": [2],
    "started(spawn, of_module.double, 4)": 0,
    "started(fork, Squares().__len__)": 0,
    "[int(each) for each in DataLoader(Squares(), num_workers=1, multiprocessing_context='fork')]": [0, 1, 4, 9],
    "__import__('joblib').Parallel(2)(__import__('joblib').delayed(f)(i) for i in range(3))": [1, 2, 3],
}


def test_child_processes_that_would_import_a_cell_are_refused(cluster: Cluster, folder: Path) -> None:
    (folder / "of_module.py").write_text("def double(x): return 2 * x\n")
    cluster.run(f"import sys; sys.path.insert(0, {str(folder)!r})\n{DEFINED}", ranks=0)
    for code, name in REFUSED.items():
        with pytest.raises(RankFailure) as failure:
            cluster.run(f"{code}", ranks=0, timeout_s=60)
        assert f"line 1: SpawnInCellError: {name} is defined in a cell" in str(failure.value), code
        shown = "\n".join(failure.value.failures[0].traceback)
        assert "get_context('fork')" in shown
        assert not re.search(r"jupyter_disttrain/engine|Exception ignored|_RemoteTraceback", shown), (code, shown)
    for code, value in WORKS.items():
        run = cluster.run(code, ranks=0, timeout_s=60)
        assert (code, run.results[0], run.stderr.get(0, "")) == (code, value, "")
    # Neither would a lambda in a module work, which is Python's own error.
    with pytest.raises(RankFailure, match="lambda"):
        cluster.run("started(spawn, lambda: 1)", ranks=0, timeout_s=60)
    cluster.run("sys.path.pop(0)", ranks=0)
