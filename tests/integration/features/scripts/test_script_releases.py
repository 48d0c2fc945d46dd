"""What an interrupt, a failure and a death of one rank end: the scripts that they concern, and nothing else."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import RankFailure
from jupyter_disttrain.process_table import WARM_PROCESS

from ....support.process_tools import wait_until
from ....support.recovery_tools import HOST, SUM, is_intact, stop, waits
from .test_scripts import write

if TYPE_CHECKING:
    from pathlib import Path


def test_interrupted_script_may_save_while_others_wait_for_it(
    three: Cluster, folder: Path, pids: dict[int, int]
) -> None:
    code = """
    import os, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    open("begun" + os.environ["RANK"], "w").close()
    if dist.get_rank() > 0:
        dist.all_reduce(torch.ones(1))
    try:
        time.sleep(1000)
    except KeyboardInterrupt:
        time.sleep(1.5)
        open("saved", "w").close()
        raise
    """
    run = three.scripts.run(write(folder, "saves.py", code), block=False)
    assert wait_until(lambda: len(list(folder.glob("begun*"))) == 3)
    assert wait_until(waits(run, {1, 2}))
    error = stop(three, run)
    assert {failure.ename for failure in error.failures} == {"KeyboardInterrupt"}
    assert (folder / "saved").exists()
    assert is_intact(three, pids)


def test_cell_of_other_ranks_does_not_end_a_script(three: Cluster, folder: Path, pids: dict[int, int]) -> None:
    script = write(
        folder, "waits.py", "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('whole')"
    )
    run = three.scripts.run(script, ranks=[0], block=False)
    hanging = three.run("dist.barrier()", ranks=[1, 2], block=False)
    assert wait_until(waits(hanging, {1, 2}))
    three.interrupt([1, 2])
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        hanging.wait()
    (folder / "go").touch()
    assert run.wait().stdout == {0: "whole\n"}
    assert is_intact(three, pids)


def test_killed_script_takes_its_detached_processes_with_it(three: Cluster, folder: Path, pids: dict[int, int]) -> None:
    code = """
    import os, signal, subprocess, sys, time
    for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    with open("new" + os.environ["RANK"], "w") as file: file.write(str(worker.pid))
    os.rename("new" + os.environ["RANK"], "worker" + os.environ["RANK"])
    time.sleep(1000)
    """
    run = three.scripts.run(write(folder, "ignores.py", code), block=False)
    assert wait_until(lambda: len(list(folder.glob("worker*"))) == 3)
    workers = [psutil.Process(int(path.read_text())) for path in folder.glob("worker*")]
    three.interrupt()
    assert wait_until(lambda: all(entry.state == "running" for entry in three.table))
    three.interrupt()  # which kills it without further delay
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        run.wait()
    assert wait_until(lambda: not any(each.is_running() and each.status() != "zombie" for each in workers))
    assert is_intact(three, pids)


def test_failed_script_leaves_the_session_s_groups_and_the_cells_of_others_alone(three: Cluster, folder: Path) -> None:
    three.run("pair = dist.new_group([1, 2])")
    before = three._session.launch.state.generation
    code = f"""
import os
os.chdir({str(folder)!r})
ends = torch.zeros(1)
while not ends:
    ends.fill_(os.path.exists("go"))
    dist.all_reduce(ends, group=pair)
print("whole")"""
    training = three.run(code, ranks=[1, 2], block=False)
    with pytest.raises(RankFailure, match="the cause"):
        three.scripts.run(write(folder, "fails.py", "raise ValueError('the cause')"), ranks=[0])
    assert not training.done
    (folder / "go").touch()
    assert set(training.wait().stdout.values()) == {"whole\n"}
    assert three._session.launch.state.generation == before
    assert three.run(SUM).results == {rank: [6.0] for rank in range(3)}


def test_script_is_followed_after_its_warm_process_was_killed(folder: Path) -> None:
    code = """
    import os, signal, time
    for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
    open("begun" + os.environ["RANK"], "w").close()
    time.sleep(1000)
    """
    with Cluster(n=2, launcher="local", preload=("this",)) as cluster:  # its own warm process
        run = cluster.scripts.run(write(folder, "stays.py", code), block=False)
        assert wait_until(lambda: len(list(folder.glob("begun*"))) == 2)
        warm = psutil.Process(cluster.table[0].nanny_pid).parent()
        assert warm is not None
        warm.kill()
        assert wait_until(lambda: "stays.py:5" in str(cluster.where()))
        assert stop(cluster, run).failures[0].ename == "KeyboardInterrupt"
        assert cluster.run("rank").results == {0: 0, 1: 1}


def test_detached_processes_of_a_script_end_with_its_rank(three: Cluster, folder: Path) -> None:
    code = """
    import os, subprocess, sys, time
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    with open("new" + os.environ["RANK"], "w") as file: file.write(str(worker.pid))
    os.rename("new" + os.environ["RANK"], "worker" + os.environ["RANK"])
    time.sleep(1000)
    """
    run = three.scripts.run(write(folder, "starts.py", code), block=False)
    assert wait_until(lambda: len(list(folder.glob("worker*"))) == 3)
    workers = [psutil.Process(int(path.read_text())) for path in folder.glob("worker*")]
    psutil.Process(three.table[1].info.pid).kill()
    with pytest.raises(RankFailure, match="RankDied"):
        run.wait()
    assert wait_until(lambda: not any(each.is_running() and each.status() != "zombie" for each in workers))
    assert three.run(SUM).results == {rank: [6.0] for rank in range(3)}


@pytest.mark.parametrize("warm", [True, False])
def test_script_that_runs_another_program_in_its_place_is_not_signalled(folder: Path, *, warm: bool) -> None:
    write(folder, "second.py", "import os, sys, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nsys.exit(3)")
    code = """
    import os, sys
    open("begun" + os.environ["RANK"], "w").close()
    os.execv(sys.executable, [sys.executable, "second.py"])
    """
    with Cluster(n=2, launcher="local", warm=warm) as cluster:
        run = cluster.scripts.run(write(folder, "first.py", code), block=False)
        assert wait_until(lambda: len(list(folder.glob("begun*"))) == 2)
        for _ in range(4):
            assert wait_until(lambda: "waits for its program first.py" in cluster.where()[0])
        (folder / "go").touch()
        with pytest.raises(RankFailure, match=rf"ranks 0-1 \({HOST}\): ProgramExit: first\.py exited with code 3"):
            run.wait()
        assert cluster.run("rank").results == {0: 0, 1: 1}


def test_crash_of_a_forked_child_is_not_taken_for_the_script_s(cluster: Cluster, folder: Path) -> None:
    code = """
    import ctypes, os, sys
    child = os.fork()
    if child == 0: ctypes.string_at(0)
    os.waitpid(child, 0)
    sys.exit(3)
    """
    with pytest.raises(RankFailure) as caught:
        cluster.scripts.run(write(folder, "forks.py", code))
    (failure,) = caught.value.failures
    assert failure.headline.startswith(f"ranks 0-1 ({HOST}): ProgramExit: forks.py exited with code 3; ")
    assert "Segmentation fault" not in "\n".join(failure.traceback)


def test_warm_process_that_a_rank_has_started_outlives_it(folder: Path) -> None:
    script = write(folder, "it.py", "import os\nprint(os.getppid())")
    with Cluster(n=2, launcher="local") as cluster:
        cluster.run("import os; os.environ['TORCH_SHOW_CPP_STACKTRACES'] = '1'")  # read when torch is imported
        (pid,) = set(cluster.scripts.run(script).stdout.values())
        warm = psutil.Process(int(pid))
        assert WARM_PROCESS in warm.cmdline()
        starter = next(entry.info for entry in cluster.table if entry.info.pid in {each.pid for each in warm.parents()})
        os.kill(starter.pid, 9)
        assert wait_until(lambda: cluster.table[starter.rank].info.pid != starter.pid)
        assert cluster.run("rank").results == {0: 0, 1: 1}
        assert warm.is_running()
        assert cluster.scripts.run(script, ranks=[1 - starter.rank]).stdout == {1 - starter.rank: pid}


def test_relative_paths_of_modules_are_those_of_the_notebook(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, "src/of_src.py", "where = 'src'")
    monkeypatch.setenv("PYTHONPATH", "src")
    with Cluster(n=2, launcher="local") as cluster:
        assert cluster.run("import of_src; of_src.where").results == {0: "src", 1: "src"}
        run = cluster.scripts.run(write(folder, "part/it.py", "import of_src\nprint(of_src.where)"))
        assert run.stdout == {0: "src\n", 1: "src\n"}
