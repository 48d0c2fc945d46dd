"""``%dist_run``: a script in processes of its own behaves as under torchrun, repeatedly."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import RankFailure, UsageError

from ....conftest import LAUNCHERS
from ....support.process_tools import wait_until
from ....support.recovery_tools import HOST, SUM

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_disttrain import CellRun

    from ....support.notebook_driver import Notebook

TRAIN = """
import argparse, os, sys
import torch, torch.distributed as dist
from helper import double

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([double(rank) + 1.0])
    dist.all_reduce(total)
    # In one piece: torchrun's Python writes the end of a line by itself, and another rank's text may come between.
    print(f"rank {rank} of {size} local {os.environ['LOCAL_RANK']} sum {total.item()} lr {args.lr}\\n", end="")
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return name


def lines_of(run: CellRun) -> dict[int, list[str]]:
    return {rank: text.splitlines() for rank, text in run.stdout.items()}


def test_torchrun_script_runs_repeatedly(cluster: Cluster, folder: Path) -> None:
    write(folder, "helper.py", "def double(x): return 2 * x")
    script = write(folder, "train.py", TRAIN)
    expected = {rank: [f"rank {rank} of 2 local {rank} sum 4.0 lr 0.5"] for rank in range(2)}
    cluster.run("kept = rank; helper = 'mine'")
    for _ in range(2):
        assert lines_of(cluster.scripts.run(script, ["--lr", "0.5"])) == expected
        assert cluster.run(SUM).results == {0: [3.0], 1: [3.0]}, "the session's group is there"
    # The edited version is what runs. It has another size: Python compares the size and the seconds of the last change.
    write(folder, "helper.py", "def double(x):\n    return 4 * x")
    assert lines_of(cluster.scripts.run(script)) == {
        rank: [f"rank {rank} of 2 local {rank} sum 6.0 lr 0.1"] for rank in range(2)
    }
    assert cluster.run("kept, helper").results == {0: (0, "mine"), 1: (1, "mine")}


def test_destroyed_group_of_a_script_is_held_until_its_threads_have_ended(cluster: Cluster, folder: Path) -> None:
    # Else scripts hang at times, as they do under torchrun: process_group.destroyed_groups, which the timer is of.
    code = """
        import threading, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.destroy_process_group()
        held = [each for each in threading.enumerate() if each.name == "ended process groups"]
        print(len(held))
        held[0].join()
        """
    run = cluster.scripts.run(write(folder, "ends.py", code))
    assert lines_of(run) == {rank: ["1"] for rank in range(2)}


def test_environment_of_a_script(cluster: Cluster, folder: Path) -> None:
    write(
        folder,
        "inner/show.py",
        """
        import os, sys
        print(__name__, os.path.basename(__file__), sys.argv)
        print(os.getcwd(), sys.path[0])
        print(sys.modules["__main__"].__dict__ is globals(), "rank" in globals(), "get_ipython" in globals())
        names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK ROLE_WORLD_SIZE MASTER_ADDR"
        print([os.environ[name] for name in names.split()], int(os.environ["MASTER_PORT"]) > 0)
        import torch
        print(torch.distributed.is_torchelastic_launched(), torch.distributed.is_initialized())
        print(sorted(name for name in sys.modules if name.startswith(("IPython", "ipykernel", "ipyparallel"))))
        print(os.environ.get("MPLBACKEND"), os.environ.get("PYTHONSAFEPATH"), os.get_inheritable(max(
            number for number in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{number}"))))
        """,
    )
    cluster.run("import os; os.environ['RANK'] = '7'; torch.manual_seed(rank)")
    try:
        run = cluster.scripts.run("inner/show.py", ["--node", "gpu$LOCAL_RANK", "${local_rank}", "$HOME", "a b"])
    finally:
        cluster.run("os.environ['RANK'] = str(rank)")
    for rank in range(2):
        lines = lines_of(run)[rank]
        argv = ["inner/show.py", "--node", f"gpu{rank}", f"{rank}", "$HOME", "a b"]
        assert lines[0] == f"__main__ show.py {argv}"
        assert lines[1] == f"{folder} {folder / 'inner'}"
        assert lines[2] == "True False False"
        assert lines[3] == f"{[str(rank), '2', str(rank), '2', '0', str(rank), '2', '127.0.0.1']} True"
        assert lines[4:] == ["True False", "[]", "None None False"]


def test_script_has_the_names_that_python_sets(cluster: Cluster, folder: Path) -> None:
    write(folder, "show.py", "print(sorted(globals()), globals().get('__cached__'), globals().get('__annotations__'))")
    for arguments in (["show.py"], ["-m", "show"]):
        alone = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=True)
        run = cluster.scripts.run(arguments[-1], is_module=len(arguments) > 1)
        assert run.stdout == dict.fromkeys(range(2), alone.stdout)


def test_module_and_folder_run(cluster: Cluster, folder: Path) -> None:
    write(folder, "tool/__init__.py", "")
    write(folder, "tool/part.py", "word = 'part'")
    write(folder, "tool/__main__.py", "import sys; from .part import word; print(__package__, word, sys.argv[1:])")
    write(folder, "plain/__main__.py", "import sys; print('folder', sys.argv)")
    run = cluster.scripts.run("tool", ["x"], is_module=True)
    assert run.stdout == dict.fromkeys(range(2), "tool part ['x']\n")
    assert cluster.scripts.run("plain").stdout == dict.fromkeys(range(2), "folder ['plain']\n")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import os, sys\nif os.environ['RANK'] == '1': sys.exit(3)",
            r"rank 1 \({host}\): ProgramExit: it.py exited with code 3",
        ),
        ("raise SystemExit(2)", r"ranks 0-1 \({host}\): ProgramExit: it.py exited with code 2"),
        ("import sys\nsys.exit('no data here')", r"ranks 0-1 .*ProgramExit: it\.py exited: no data here"),
        ("import os\nos._exit(5)", r"ranks 0-1 .*ProgramExit: it.py exited with code 5"),
    ],
)
def test_exit_code_is_reported(cluster: Cluster, folder: Path, code: str, message: str) -> None:
    with pytest.raises(RankFailure, match=message.format(host=HOST)):
        cluster.scripts.run(write(folder, "it.py", code))
    for success in ("import sys\nsys.exit(0)", "import sys\nsys.exit()", "import sys\nsys.exit(False)"):
        assert cluster.scripts.run(write(folder, "well.py", success)).stdout == {0: "", 1: ""}


def test_error_names_the_script_line_and_shows_no_internal_frames(cluster: Cluster, folder: Path) -> None:
    script = write(
        folder, "broken.py", "import os\n\ndef main():\n    if os.environ['RANK'] == '1':\n        1 / 0\n\nmain()"
    )
    with pytest.raises(RankFailure) as caught:
        cluster.scripts.run(script)
    (failure,) = caught.value.failures
    assert failure.headline == f"rank 1 ({HOST}), broken.py:5: ZeroDivisionError: division by zero"
    text = "\n".join(failure.traceback)
    assert "scripts.run" not in text
    assert "exec(" not in text
    assert text.count("broken.py") == 2


def test_invalid_script_is_reported_in_one_line(cluster: Cluster, folder: Path) -> None:
    with pytest.raises(RankFailure, match=f"ScriptError: there is no missing.py in {folder}") as caught:
        cluster.scripts.run("missing.py")
    assert len(caught.value.failures[0].traceback) == 1
    with pytest.raises(RankFailure, match="ScriptError: there is no module 'no_such_module' that can be run on"):
        cluster.scripts.run("no_such_module", is_module=True)
    with pytest.raises(UsageError, match="can't run 'sideways'"):
        cluster.scripts.run("missing.py", how="sideways")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_script_is_forked_from_the_process_that_the_rank_is_forked_from(launcher: str, folder: Path) -> None:
    script = write(folder, "it.py", "import os\nprint(os.getppid(), os.getsid(0) == os.getpid())")
    with Cluster(n=2, launcher=launcher) as cluster:
        warm = {entry.info.rank: psutil.Process(entry.nanny_pid).ppid() for entry in cluster.table}
        cluster.run("import os; os.environ['OF_A_CELL'] = '1'")
        for _ in range(2):
            assert cluster.scripts.run(script).stdout == {rank: f"{pid} True\n" for rank, pid in warm.items()}


def test_script_runs_where_there_is_no_warm_process(folder: Path) -> None:
    write(folder, "helper.py", "def double(x): return 2 * x")
    script = write(folder, "train.py", TRAIN)
    with Cluster(n=2, launcher="local", warm=False) as cluster:
        expected = {rank: [f"rank {rank} of 2 local {rank} sum 4.0 lr 0.1"] for rank in range(2)}
        assert lines_of(cluster.scripts.run(script)) == expected
        with pytest.raises(RankFailure, match=r"ranks 0-1 .*, it\.py:1: ZeroDivisionError"):
            cluster.scripts.run(write(folder, "it.py", "1 / 0"))


def test_script_in_the_session_has_the_variables_of_cells(cluster: Cluster, folder: Path) -> None:
    write(folder, "beside.py", "value = 5")
    code = """
    import sys, beside
    import torch.distributed as dist
    made = rank * 10 + beside.value
    total = torch.ones(1); dist.all_reduce(total)
    print(__name__, __file__.endswith("it.py"), sys.argv, kept, int(total))
    """
    script = write(folder, "it.py", code)
    cluster.run("kept = rank + 1")
    run = cluster.scripts.run(script, ["$RANK"], how="session")
    assert lines_of(run) == {rank: [f"__main__ True ['it.py', '{rank}'] {rank + 1} 2"] for rank in range(2)}
    assert cluster.run("made, '__file__' in globals()").results == {0: (5, False), 1: (15, False)}
    with pytest.raises(RankFailure, match=r"ranks 0-1 .*, it\.py:1: ZeroDivisionError"):
        cluster.scripts.run(write(folder, "it.py", "1 / 0"), how="session")
    with pytest.raises(RankFailure, match=r"ScriptExit: it\.py exited with code 3"):
        cluster.scripts.run(write(folder, "it.py", "raise SystemExit(3)"), how="session")


def test_metrics_and_progress_of_a_script_are_its_ranks(folder: Path) -> None:
    code = """
    import os, time, torch
    from jupyter_disttrain import log_metrics
    data = torch.utils.data.DataLoader(torch.arange(80.0), batch_size=2)  # it would take some 10 s
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step, batch in enumerate(data):
        time.sleep(0.3)
        optimizer.zero_grad(); (weight * batch.sum()).backward(); optimizer.step()
        log_metrics(step, loss=float(step))
        if step == 2:
            open(f"half{os.environ['RANK']}", "w").close()
            while not os.path.exists("go"): time.sleep(0.01)
            break
    """
    with Cluster(n=2, launcher="local", sample_s=0.1) as cluster:
        run = cluster.scripts.run(write(folder, "train.py", code), block=False)
        assert wait_until(lambda: len(list(folder.glob("half*"))) == 2)
        ranks = cluster.telemetry.ranks
        vitals = [lambda rank=rank: ranks[rank].vitals for rank in range(2)]
        assert wait_until(lambda: all((each().done, each().total, each().line) == (3, 40, 13) for each in vitals))
        assert len({each().program for each in vitals} - {0}) == 2
        (folder / "go").touch()
        run.wait()
        assert cluster.metrics.gather("loss").values.tolist() == [[0, 0], [1, 1], [2, 2]]


def test_script_may_fork_and_close_descriptors(cluster: Cluster, folder: Path) -> None:
    fork = write(
        folder,
        "fork.py",
        """
        import os, sys
        child = os.fork()
        print("child\\n" if child == 0 else "parent\\n", end="", flush=True)
        if child:
            print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
    )
    lines = lines_of(cluster.scripts.run(fork))
    assert all(sorted(text) == ["child", "ended with 0", "parent"] for text in lines.values())
    close = write(
        folder, "close.py", "import os, sys\nprint('before', flush=True)\nsys.stdout.close()\nos.close(1)\nos.close(2)"
    )
    for _ in range(2):
        assert cluster.scripts.run(close).stdout == {0: "before\n", 1: "before\n"}
    assert cluster.run("print('still', rank)").stdout == {0: "still 0\n", 1: "still 1\n"}


def test_workers_are_spawned_from_a_script(cluster: Cluster, folder: Path) -> None:
    script = write(
        folder,
        "spawn.py",
        """
        import os, sys
        import torch.multiprocessing as mp

        def work(index, queue):
            queue.put((index, __name__))

        if __name__ == "__main__":
            queue = mp.get_context("spawn").SimpleQueue()
            mp.spawn(work, (queue,), nprocs=1)
            print(queue.get())
        """,
    )
    assert cluster.scripts.run(script, ranks=0).stdout == {0: "(0, '__mp_main__')\n"}


def test_script_in_its_own_process_writes_to_no_terminal(cluster: Cluster, folder: Path) -> None:
    script = write(folder, "told.py", "import os, sys; print(os.environ.get('FORCE_COLOR'), sys.stdout.isatty())")
    assert cluster.scripts.run(script).stdout == {0: "None False\n", 1: "None False\n"}


@pytest.mark.parametrize("cluster", ["mpi"], indirect=True)
def test_one_program_per_node_starts_its_own_processes(cluster: Cluster, folder: Path) -> None:
    script = write(
        folder,
        "node.py",
        """
        import os
        import torch, torch.distributed as dist, torch.multiprocessing as mp

        def work(rank, size):
            dist.init_process_group("gloo", rank=rank, world_size=size)
            total = torch.ones(1)
            dist.all_reduce(total)
            print(f"sum {total.item()}\\n", end="")
            dist.destroy_process_group()  # without it torch's threads abort one process in fifty as it ends

        if __name__ == "__main__":
            print("RANK" in os.environ, os.environ["NODE_RANK"], os.environ["NNODES"])
            mp.spawn(work, (2,), nprocs=2)
        """,
    )
    run = cluster.scripts.run(script, how="node")
    assert lines_of(run) == {0: ["False 0 1", "sum 2.0", "sum 2.0"]}
    assert lines_of(cluster.scripts.run(script, ranks=1, how="node")) == {1: ["False 0 1", "sum 2.0", "sum 2.0"]}
    train = write(folder, "train.py", TRAIN.replace("from helper import double", "double = float"))
    launch = ["--standalone", f"--log-dir={folder}", "--nproc-per-node=2", "--nnodes=$NNODES", train]
    run = cluster.scripts.run("torch.distributed.run", launch, is_module=True, how="node")
    assert sorted(lines_of(run)[0]) == [f"rank {rank} of 2 local {rank} sum 3.0 lr 0.1" for rank in range(2)]


def test_magic_parses_its_line(notebook: Notebook, folder: Path) -> None:
    write(folder, "echo.py", "import sys\nprint(sys.argv[1:])")
    notebook.run(f"import os; os.chdir({os.fspath(folder)!r})").check()
    run = notebook.run("%dist_run echo.py -r 5 --lr 0.1 'a b' x#y '#f00' {x} $LOCAL_RANK  # a comment, don't read it")
    assert run.check().lines == [
        f"rank {rank} │ ['-r', '5', '--lr', '0.1', 'a b', 'x#y', '#f00', '{{x}}', '{rank}']" for rank in range(2)
    ]
    assert notebook.run("%dist_run -r 1 -m echo").check().lines == ["[]"]
    assert "there is no gone.py in" in notebook.run("%dist_run gone.py").error
    assert "the following arguments are required: SCRIPT" in notebook.run("%dist_run --in-session").error
