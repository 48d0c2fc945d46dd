"""Faults while a script runs: failures, interrupts, hangs, deaths."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import RankFailure, UsageError

from ....support.listeners import IgnoringListener
from ....support.process_tools import wait_until
from ....support.recovery_tools import HOLD_GIL, HOST, SUM, is_intact, stop
from .test_scripts import TRAIN, write

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_disttrain.errors import CellFailure


def test_ranks_waiting_for_a_failed_script_are_released(three: Cluster, folder: Path, pids: dict[int, int]) -> None:
    code = TRAIN.replace("from helper import double", "double = float").replace(
        "    dist.init", "    if os.environ['RANK'] == '1': raise ValueError('the cause')\n    dist.init"
    )
    with pytest.raises(RankFailure) as caught:
        three.scripts.run(write(folder, "train.py", code))
    (failure,) = caught.value.failures
    assert failure.ranks == (1,)
    assert failure.headline == f"rank 1 ({HOST}), train.py:10: ValueError: the cause"
    assert set(caught.value.waited) == {0, 2}
    assert is_intact(three, pids)


def test_interrupt_ends_the_script_and_its_child_processes(three: Cluster, folder: Path, pids: dict[int, int]) -> None:
    script = write(
        folder,
        "long.py",
        """
        import os, subprocess, sys, time
        import torch, torch.distributed as dist
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        dist.init_process_group("gloo")
        print("begun", flush=True)
        if dist.get_rank() == 0:
            while True: time.sleep(0.01)
        dist.barrier()
        """,
    )
    run = three.scripts.run(script, block=False)
    run.listener = IgnoringListener()
    assert wait_until(lambda: three.table[0].state == "running" and len(three.where()) > 0)
    assert wait_until(lambda: any("barrier" in line or "long.py" in line for line in three.where()))
    three.interrupt()
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        run.wait()
    assert is_intact(three, pids)
    assert wait_until(lambda: not programs()), programs()


def test_script_that_closes_all_inherited_descriptors_runs_to_its_end(three: Cluster, folder: Path) -> None:
    close = """
    import os, sys
    from jupyter_disttrain import log_metrics
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    files = [open(f"own{os.environ['RANK']}-{number}", "wb") for number in range(20)]  # with the numbers of those
    log_metrics(loss=1.0)
    print("alive")
    sys.exit(int(sys.argv[1]))
    """
    script = write(folder, "closes.py", close)
    run = three.scripts.run(script, ["0"])
    assert run.stdout == dict.fromkeys(range(3), "alive\n")
    with pytest.raises(RankFailure, match=r"closes\.py exited with code 3"):
        three.scripts.run(script, ["3"])
    assert {path.stat().st_size for path in folder.glob("own*")} == {0}


def test_interrupt_before_the_first_line_of_a_script_shows_the_users_lines_only(three: Cluster, folder: Path) -> None:
    package = folder / "early"
    package.mkdir()
    write(
        package, "__init__.py", "import os, time\nopen('begun' + os.environ['RANK'], 'w').close()\ntime.sleep(1000)\n"
    )
    write(package, "main.py", "pass\n")
    run = three.scripts.run("early.main", is_module=True, block=False)
    assert wait_until(lambda: len(list(folder.glob("begun*"))) >= 3)
    three.interrupt()
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        run.wait()
    shown = str(run.stderr) + str([failure.traceback for failure in run.state.failures.values()])
    assert "early/__init__.py" in shown
    assert "jupyter_disttrain" not in shown


def test_child_process_that_ignores_interrupts_ends_with_the_script(three: Cluster, folder: Path) -> None:
    code = """
    import os, signal, subprocess, time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    subprocess.Popen(["sleep", "1000"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    open(f"begun{os.environ['RANK']}", "w").close()
    time.sleep(1000)
    """
    run = three.scripts.run(write(folder, "long.py", code), block=False)
    assert wait_until(lambda: len(list(folder.glob("begun*"))) >= 3)
    three.interrupt()
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        run.wait()
    assert wait_until(lambda: not programs()), programs()


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


def test_program_that_ends_at_once_leaves_its_rank(three: Cluster, folder: Path, pids: dict[int, int]) -> None:
    script = write(
        folder,
        "dies.py",
        "import os, torch.distributed as dist\n"
        "if os.environ['RANK'] == '1': os._exit(3)\ndist.init_process_group()\ndist.barrier()",
    )
    with pytest.raises(RankFailure, match=r"rank 1 .*ProgramExit: dies\.py exited with code 3"):
        three.scripts.run(script)
    assert is_intact(three, pids)


def test_programs_end_with_their_rank(three: Cluster, folder: Path) -> None:
    code = """
    import os, subprocess, sys, time
    if os.environ["RANK"] == "1":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        if os.fork() == 0: os.setpgid(0, 0)
    open(f"begun{os.environ['RANK']}", "w").close()
    time.sleep(1000)
    """
    run = three.scripts.run(write(folder, "long.py", code), block=False)
    assert wait_until(lambda: len(list(folder.glob("begun*"))) >= 3)
    assert len(programs()) >= 5
    psutil.Process(three.table[1].info.pid).kill()
    with pytest.raises(RankFailure, match=r"rank 1 .*RankDied"):
        run.wait()
    assert wait_until(lambda: not programs()), programs()
    assert three.run(SUM).results == {rank: [6.0] for rank in range(3)}


def test_code_of_a_program_is_known_also_when_its_warm_process_is_killed(folder: Path) -> None:
    code = """
    import os, sys, time
    open(f"begun{os.environ['RANK']}", "w").close()
    while not os.path.exists("go"): time.sleep(0.01)
    sys.exit(int(os.environ["RANK"]) * 3)
    """
    script = write(folder, "it.py", code)
    with Cluster(n=2, launcher="local", preload=("this",)) as cluster:  # its own warm process
        run = cluster.scripts.run(script, block=False)
        assert wait_until(lambda: len(list(folder.glob("begun*"))) == 2)
        warm = psutil.Process(cluster.table[0].nanny_pid).parent()
        assert warm is not None
        warm.kill()
        assert wait_until(lambda: warm.status() == psutil.STATUS_ZOMBIE)  # what has started it waits for its nannies
        (folder / "go").touch()
        with pytest.raises(RankFailure, match=r"rank 1 .*ProgramExit: it\.py exited with code 3"):
            run.wait()
        assert cluster.run("rank").results == {0: 0, 1: 1}


def programs() -> list[psutil.Process]:
    """Return the programs of ranks, and what they have started: these have torchrun's variables, and not ours."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            variables = process.environ()
            is_ours = variables.get("JUPYTER_RUNTIME_DIR") == os.environ["JUPYTER_RUNTIME_DIR"]
            if is_ours and "TORCHELASTIC_RUN_ID" in variables and "DISTTRAIN_CLIENT" not in variables:
                found.append(process)
    return found


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
    with pytest.raises(RankFailure, match=r"ProgramExit: exits\.py exited with code 3"):
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


def test_crash_is_reported_with_the_script_line(three: Cluster, folder: Path, pids: dict[int, int]) -> None:
    script = write(folder, "crash.py", "import os\ndef end():\n    os.abort()\nif os.environ['RANK'] == '1': end()")
    with pytest.raises(RankFailure) as caught:
        three.scripts.run(script)
    (failure,) = caught.value.failures
    assert failure.headline == f"rank 1 ({HOST}), crash.py:4: ProgramExit: crash.py was killed by SIGABRT"
    assert "crash.py" in "\n".join(failure.traceback)
    assert not [line for line in failure.traceback if "jupyter_disttrain" in line]
    assert is_intact(three, pids)


def test_program_that_holds_the_gil_is_explained(three: Cluster, folder: Path) -> None:
    waits = "import os, time\nif os.environ['RANK'] != '1': time.sleep(1000)\n"
    script = write(folder, "holds.py", waits + HOLD_GIL)
    run = three.scripts.run(script, block=False)
    assert wait_until(lambda: any("holds the GIL at holds.py:5" in line for line in three.where()))
    assert wait_until(lambda: any("holds the GIL at holds.py:5" in line for line in run.hang)), "below its cell"
    three.interrupt()
    with pytest.raises(RankFailure):
        run.wait()


def test_error_repeated_by_python_is_reported_once(three: Cluster, folder: Path) -> None:
    with pytest.raises(RankFailure) as caught:
        three.scripts.run(write(folder, "deep.py", "def f(): f()\nf()"))
    assert [failure.ranks for failure in caught.value.failures] == [(0, 1, 2)]


def test_program_that_failed_first_is_named_first(three: Cluster, folder: Path) -> None:
    code = """
    import os, sys, time
    if os.environ["RANK"] == "1": sys.exit(3)
    while not os.path.exists("go"): time.sleep(0.01)
    sys.exit(1)
    """
    run = three.scripts.run(write(folder, "codes.py", code), block=False)
    assert wait_until(lambda: bool(run.failures))
    (folder / "go").touch()
    with pytest.raises(RankFailure) as caught:
        run.wait()
    assert "codes.py exited with code 3; rank 1's was the first" in str(caught.value)
