"""Faults while a script runs: failures, interrupts, hangs, deaths."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain.errors import RankFailure, UsageError

from ....support.listeners import IgnoringListener
from ....support.process_tools import wait_until
from ....support.recovery_tools import HOST, SUM, is_intact, stop
from .test_scripts import TRAIN, WAYS, write

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_disttrain import Cluster
    from jupyter_disttrain.errors import CellFailure


@pytest.mark.parametrize("how", WAYS)
def test_ranks_waiting_for_a_failed_script_are_released(
    three: Cluster, folder: Path, how: str, pids: dict[int, int]
) -> None:
    code = TRAIN.replace("from helper import double", "double = float").replace(
        "    dist.init", "    if os.environ['RANK'] == '1': raise ValueError('the cause')\n    dist.init"
    )
    with pytest.raises(RankFailure) as caught:
        three.scripts.run(write(folder, "train.py", code), how=how)
    (failure,) = caught.value.failures
    assert failure.ranks == (1,)
    if how == "here":
        assert failure.headline == f"rank 1 ({HOST}), train.py:10: ValueError: the cause"
    else:
        assert "exited with code 1" in failure.evalue
    assert set(caught.value.waited) == {0, 2}
    assert is_intact(three, pids)


@pytest.mark.parametrize("how", WAYS)
def test_interrupt_ends_the_script_and_its_child_processes(
    three: Cluster, folder: Path, how: str, pids: dict[int, int]
) -> None:
    script = write(
        folder,
        "long.py",
        """
        import os, subprocess, sys, time
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        print("begun", flush=True)
        if dist.get_rank() == 0:
            while True: time.sleep(0.01)
        dist.barrier()
        """,
    )
    run = three.scripts.run(script, how=how, block=False)
    run.listener = IgnoringListener()
    assert wait_until(lambda: three.table[0].state == "running" and len(three.where()) > 0)
    assert wait_until(lambda: any("barrier" in line or "long.py" in line for line in three.where()))
    three.interrupt()
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        run.wait()
    assert is_intact(three, pids)
    left = [each for pid in pids.values() for each in psutil.Process(pid).children(recursive=True)]
    assert not left


def test_group_left_half_destroyed_by_an_interrupt_is_formed_again(three: Cluster, pids: dict[int, int]) -> None:
    half = "from torch.distributed import distributed_c10d as c10d\nif rank == 1: c10d._update_default_pg(None)\n"
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        three.run(f"{half}raise KeyboardInterrupt")
    assert is_intact(three, pids)


def test_hang_in_a_script_names_its_lines(three: Cluster, folder: Path) -> None:
    script = write(
        folder,
        "stuck.py",
        """\
        import time
        import torch, torch.distributed as dist
        dist.init_process_group()
        if dist.get_rank() == 0:
            while True: time.sleep(0.01)
        dist.barrier()
        """,
    )
    run = three.scripts.run(script, block=False)
    rank_0 = "rank 0: in Python code at stuck.py:5: while True: time.sleep(0.01)"  # or about to get there
    assert wait_until(lambda: rank_0 in run.hang)
    assert wait_until(lambda: any("at stuck.py:6: dist.barrier()" in line for line in run.hang))
    three.interrupt()
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        run.wait()


def test_rank_that_dies_in_a_script_is_replaced(three: Cluster, folder: Path) -> None:
    script = write(
        folder,
        "dies.py",
        "import os, torch.distributed as dist\nif os.environ['RANK'] == '1': os._exit(3)\ndist.barrier()",
    )
    with pytest.raises(RankFailure, match=r"rank 1 .*RankDied: process .* exited with code 3"):
        three.scripts.run(script)
    assert three.run(SUM).results == {rank: [6.0] for rank in range(3)}


EXITS = {
    "in the except block": "try: wait()\nexcept KeyboardInterrupt: sys.exit(130)",
    "in a handler of its own": "signal.signal(signal.SIGINT, lambda *_: sys.exit(130))\nwait()",
    "later": "try: wait()\nexcept KeyboardInterrupt: pass\nsys.exit('130 or so')",
}
WAITS = """import os, signal, sys, time
def wait():
    open(f"begun{os.environ['RANK']}", "w").close()
    while True: time.sleep(0.01)
"""


def _in(folder: Path, code: str) -> str:
    return code.replace("begun", f"{folder}/begun")


@pytest.mark.parametrize("as_script", [True, False])
@pytest.mark.parametrize("kind", EXITS)
def test_exit_after_an_interrupt_is_reported_as_an_interrupt(
    three: Cluster, folder: Path, kind: str, pids: dict[int, int], *, as_script: bool
) -> None:
    code = WAITS + EXITS[kind]
    script = write(folder, "train.py", code)
    run = three.scripts.run(script, block=False) if as_script else three.run(_in(folder, code), block=False)
    assert wait_until(lambda: len(list(folder.glob("begun*"))) == 3)
    error = stop(three, run)
    assert {failure.ename for failure in error.failures} == {"KeyboardInterrupt"}
    assert "130" not in "\n".join(failure.headline for failure in error.failures)
    if as_script and kind == "in the except block":
        assert error.failures[0].headline == f"ranks 0-2 ({HOST}), train.py:4: KeyboardInterrupt"
        assert "train.py:4" in "\n".join(error.failures[0].traceback)
    assert is_intact(three, pids)
    with pytest.raises(RankFailure, match="SystemExit: 3"):
        three.run("raise SystemExit(3)")  # the next cell is not affected
    with pytest.raises(RankFailure, match=r"ScriptExit: exits\.py exited with code 3"):
        three.scripts.run(write(folder, "exits.py", "raise SystemExit(3)"))


def test_script_that_succeeds_after_an_interrupt_has_succeeded(three: Cluster, folder: Path) -> None:
    code = WAITS + "try: wait()\nexcept KeyboardInterrupt: sys.exit(0)"
    run = three.scripts.run(write(folder, "train.py", code), block=False)
    assert wait_until(lambda: len(list(folder.glob("begun*"))) == 3)
    three.interrupt()
    run.wait()


def test_exceptions_raised_by_the_script_are_reported_as_its_own(cluster: Cluster, folder: Path) -> None:
    write(folder, "pack/__init__.py", "import nothing_there")
    write(folder, "pack/tool.py", "print('never')")
    write(folder, "opens.py", "import os\nopen(os.getcwd())")
    write(folder, "named.py", "raise ModuleNotFoundError('mine', name='named')")

    def failure(target: str, **options: bool) -> CellFailure:
        with pytest.raises(RankFailure) as caught:
            cluster.scripts.run(target, ranks=0, **options)
        return caught.value.failures[0]

    # For the folder that is entered, and for the module that is imported.
    assert failure("opens.py").headline.startswith(f"rank 0 ({HOST}), opens.py:2: IsADirectoryError: ")
    assert "opens.py:2" in "".join(failure("opens.py").traceback)
    for is_module in (False, True):
        target = "named" if is_module else "named.py"
        assert (
            failure(target, is_module=is_module).headline == f"rank 0 ({HOST}), named.py:1: ModuleNotFoundError: mine"
        )
    of_package = failure("pack.tool", is_module=True)
    assert of_package.headline == f"rank 0 ({HOST}): ModuleNotFoundError: No module named 'nothing_there'"
    text = "\n".join(of_package.traceback)
    assert "pack/__init__.py" in text
    assert "scripts.run" not in text
    missing = failure("nowhere.tool", is_module=True).evalue
    assert missing == "there is no module 'nowhere', which contains nowhere.tool, on this host"
    assert failure("long" * 100).evalue.endswith("can't be read: File name too long")


REMOVES = """
import logging, os, shutil, sys
import torch, mine
class Full(logging.Handler):
    def flush(self): raise OSError("no space")
logging.root.addHandler(Full())
logging.getLogger("mine").addHandler(Full())
os.environ["MESS"] = "1"
torch.set_default_dtype(torch.float64)
shutil.rmtree("sub", ignore_errors=True)
print(mine.value)
"""
STATE = (
    "import logging; (mine.value, sys.modules['mine'] is mine, 'MESS' in os.environ, logging.root.handlers, "
    "logging.getLogger('mine').handlers, torch.get_default_dtype(), os.getcwd()).__repr__()"
)


def test_missing_working_directory_is_reported_without_further_effect(cluster: Cluster, folder: Path) -> None:
    write(folder, "mine.py", "value = 1")
    script = write(folder, "removes.py", REMOVES)
    (folder / "sub").mkdir()
    cluster.run(
        f"import os, sys\nhome = os.getcwd()\nsys.path.insert(0, {os.fspath(folder)!r})\nimport mine; mine.value = 2"
    )
    try:
        expected = cluster.run(f"os.chdir({os.fspath(folder)!r})\n{STATE}").results
        for is_gone_before in (False, True):
            (folder / "sub").mkdir(exist_ok=True)
            cluster.run("os.chdir('sub')")
            if is_gone_before:
                (folder / "sub").rmdir()
            run = cluster.scripts.run(script)
            assert run.stdout == {0: "1\n", 1: "1\n"}
            why = "can't be entered any more (No such file or directory)"
            output = f"the working directory {folder / 'sub'} {why}; changed to {folder}\n"
            assert all(text.count(output) == 1 for text in run.stderr.values())
            assert all(text.count("Full.flush() failed: OSError: no space") == 2 for text in run.stderr.values())
            assert cluster.run(STATE).results == expected
    finally:
        cluster.run("os.chdir(home); sys.path.pop(0); del sys.modules['mine'], mine")


def test_missing_notebook_folder_is_reported(cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = os.fspath(folder / write(folder, "it.py", "print('ran')"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "getcwd", lambda: "/no/such/folder")
        with pytest.raises(
            RankFailure,
            match=r"ScriptError: the notebook's folder /no/such/folder can't be entered on this host: No such",
        ):
            cluster.scripts.run(script)
    (folder / "sub").mkdir()
    monkeypatch.chdir(folder / "sub")
    (folder / "sub").rmdir()
    with pytest.raises(
        UsageError, match=r"the notebook's folder does not exist any more; os\.chdir\(\) to one that exists"
    ):
        cluster.scripts.run(script)
    monkeypatch.chdir(folder)
    assert cluster.scripts.run(script).stdout == {0: "ran\n", 1: "ran\n"}


def test_state_that_torch_sets_once_can_be_set_in_each_run(cluster: Cluster, folder: Path) -> None:
    code = """
    import sys, torch
    torch.set_num_interop_threads(torch.get_num_interop_threads() + int(sys.argv[1]))
    torch.set_num_interop_threads(torch.get_num_interop_threads())
    print("went on")
    """
    script = write(folder, "threads.py", code)
    for _ in range(2):
        run = cluster.scripts.run(script, ["0"])
        assert (run.stdout, run.stderr) == ({0: "went on\n", 1: "went on\n"}, {0: "", 1: ""})
    (found,) = set(cluster.run("torch.get_num_interop_threads()").results.values())
    output = f"torch.set_num_interop_threads({found + 1}) has no effect: torch accepts this once per process, "
    for text in cluster.scripts.run(script, ["1"]).stderr.values():
        assert text.startswith(output)
        assert text.count("\n") == 1
    with pytest.raises(RankFailure, match=r"RuntimeError: .*interop threads"):
        cluster.run(f"torch.set_num_interop_threads({found})")  # a cell gets torch's own error


def test_crash_is_reported_with_the_script_line(three: Cluster, folder: Path, pids: dict[int, int]) -> None:
    script = write(folder, "crash.py", "import os\ndef end():\n    os.abort()\nif os.environ['RANK'] == '1': end()")
    with pytest.raises(RankFailure) as caught:
        three.scripts.run(script)
    (failure,) = caught.value.failures
    assert failure.headline.startswith(
        f"rank 1 ({HOST}), crash.py:4: RankDied: process {pids[1]} was killed by SIGABRT"
    )
    assert not [line for line in failure.traceback if "jupyter_disttrain" in line]
    three.run("kept = rank * 11", 1)


def test_error_repeated_by_python_is_reported_once(three: Cluster, folder: Path) -> None:
    with pytest.raises(RankFailure) as caught:
        three.scripts.run(write(folder, "deep.py", "def f(): f()\nf()"))
    assert [failure.ranks for failure in caught.value.failures] == [(0, 1, 2)]


def test_program_that_failed_first_is_named_first(three: Cluster, folder: Path) -> None:
    code = """
    import os, sys, time
    if os.environ["RANK"] == "1": sys.exit(3)
    time.sleep(0.3); sys.exit(1)
    """
    with pytest.raises(RankFailure) as caught:
        three.scripts.run(write(folder, "codes.py", code), how="fresh")
    assert "codes.py exited with code 3; rank 1's was the first" in str(caught.value)
