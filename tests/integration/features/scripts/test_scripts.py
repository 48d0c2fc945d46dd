"""``%dist_run``: a script on the ranks behaves as under torchrun, repeatedly."""

from __future__ import annotations

import os
import textwrap
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.errors import RankFailure, UsageError

from ....support.recovery_tools import HOST, SUM

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_disttrain import CellRun, Cluster

    from ....support.notebook_driver import Notebook

WAYS = ["here", "fresh"]
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


@pytest.mark.parametrize("how", WAYS)
def test_torchrun_script_runs_repeatedly(cluster: Cluster, folder: Path, how: str) -> None:
    write(folder, "helper.py", "def double(x): return 2 * x")
    script = write(folder, "train.py", TRAIN)
    expected = {rank: [f"rank {rank} of 2 local {rank} sum 4.0 lr 0.5"] for rank in range(2)}
    cluster.run("kept = rank; helper = 'mine'")
    for _ in range(2):
        assert lines_of(cluster.scripts.run(script, ["--lr", "0.5"], how=how)) == expected
        assert cluster.run(SUM).results == {0: [3.0], 1: [3.0]}, "the session's group is there"
    # The edited version is what runs.
    write(folder, "helper.py", "def double(x): return 4 * x")
    assert lines_of(cluster.scripts.run(script, how=how)) == {
        rank: [f"rank {rank} of 2 local {rank} sum 6.0 lr 0.1"] for rank in range(2)
    }
    assert cluster.run("kept, helper").results == {0: (0, "mine"), 1: (1, "mine")}


HELD = """
before, subgroup = dist.group.WORLD, dist.new_group([0, 2])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
"""
STEP = """
model.zero_grad(); model(torch.full((1, 1), 2.0 * rank + 1.0)).sum().backward()
y = torch.full((1,), 1.5)
if rank != 1: dist.all_reduce(y, group=subgroup)
else: y *= 2
before is dist.group.WORLD, model.module.weight.grad.item(), y.item()
"""


def test_group_left_by_a_script_is_destroyed(three: Cluster, folder: Path) -> None:
    code = """
    import os, sys, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if len(sys.argv) > 1:
        raise SystemExit(sys.argv[1])
    """
    script = write(folder, "leaves.py", code)
    three.run(HELD)
    for _ in range(2):
        three.scripts.run(script)
        assert three.run(SUM).results == {rank: [6.0] for rank in range(3)}
        with pytest.raises(RankFailure, match=r"leaves\.py exited: on purpose"):
            three.scripts.run(script, ["on purpose"])
        assert three.run(SUM).results == {rank: [6.0] for rank in range(3)}
        assert three.run(STEP).results == dict.fromkeys(range(3), (True, 3.0, 3.0))


@pytest.mark.parametrize("how", WAYS)
def test_environment_of_a_script(cluster: Cluster, folder: Path, how: str) -> None:
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
        print(torch.distributed.is_torchelastic_launched(), torch.distributed.is_initialized() or "not yet")
        """,
    )
    cluster.run("import os; os.environ['RANK'] = '7'; torch.manual_seed(rank)")
    try:
        run = cluster.scripts.run(
            "inner/show.py", ["--node", "gpu$LOCAL_RANK", "${local_rank}", "$HOME", "a b"], how=how
        )
    finally:
        cluster.run("os.environ['RANK'] = str(rank)")
    for rank in range(2):
        lines = lines_of(run)[rank]
        argv = ["inner/show.py", "--node", f"gpu{rank}", f"{rank}", "$HOME", "a b"]
        assert lines[0] == f"__main__ show.py {argv}"
        assert lines[1] == f"{folder} {folder / 'inner'}"
        assert lines[2] == "True False False"
        assert lines[3] == f"{[str(rank), '2', str(rank), '2', '0', str(rank), '2', '127.0.0.1']} True"
        assert lines[4].startswith("True")


@pytest.mark.parametrize("how", WAYS)
def test_module_and_folder_run(cluster: Cluster, folder: Path, how: str) -> None:
    write(folder, "tool/__init__.py", "")
    write(folder, "tool/part.py", "word = 'part'")
    write(folder, "tool/__main__.py", "import sys; from .part import word; print(__package__, word, sys.argv[1:])")
    write(folder, "plain/__main__.py", "import sys; print('folder', sys.argv)")
    run = cluster.scripts.run("tool", ["x"], is_module=True, how=how)
    assert run.stdout == dict.fromkeys(range(2), "tool part ['x']\n")
    assert cluster.scripts.run("plain", how=how).stdout == dict.fromkeys(range(2), "folder ['plain']\n")


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import os, sys\nif os.environ['RANK'] == '1': sys.exit(3)",
            r"rank 1 \({host}\): (Script|Program)Exit: it.py exited with code 3",
        ),
        ("raise SystemExit(2)", r"ranks 0-1 \({host}\): (Script|Program)Exit: it.py exited with code 2"),
    ],
)
def test_exit_code_is_reported(cluster: Cluster, folder: Path, how: str, code: str, message: str) -> None:
    with pytest.raises(RankFailure, match=message.format(host=HOST)):
        cluster.scripts.run(write(folder, "it.py", code), how=how)
    assert cluster.scripts.run(write(folder, "well.py", "import sys\nsys.exit(0)"), how=how).stdout == {0: "", 1: ""}


def test_exit_message_is_reported(cluster: Cluster, folder: Path) -> None:
    with pytest.raises(RankFailure, match=r"ScriptExit: it\.py exited: no data here"):
        cluster.scripts.run(write(folder, "it.py", "import sys\nsys.exit('no data here')"))


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


@pytest.mark.parametrize("how", WAYS)
def test_invalid_script_is_reported_in_one_line(cluster: Cluster, folder: Path, how: str) -> None:
    if how == "here":
        with pytest.raises(RankFailure, match=f"ScriptError: there is no missing.py in {folder}") as caught:
            cluster.scripts.run("missing.py")
        assert len(caught.value.failures[0].traceback) == 1
        with pytest.raises(
            RankFailure, match="ScriptError: there is no module 'no_such_module' that can be run on this host"
        ):
            cluster.scripts.run("no_such_module", is_module=True)
    else:
        with pytest.raises(RankFailure, match=r"ranks 0-1 .*ProgramExit: missing.py exited with code 2"):
            cluster.scripts.run("missing.py", how=how)
    with pytest.raises(UsageError, match="can't run 'sideways'"):
        cluster.scripts.run("missing.py", how="sideways")


def test_script_leaves_nothing_behind(cluster: Cluster, folder: Path) -> None:
    script = write(
        folder,
        "messy.py",
        """
        import atexit, logging, os, signal, sys, threading, warnings
        import torch
        os.chdir("/")
        os.environ["MESS"] = "1"
        sys.path.insert(0, "/mess")
        sys.argv.append("mess")
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="log %(message)s")
        logging.getLogger("mess").info("heard once")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        warnings.simplefilter("error")
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        print("random", torch.rand(1).item())
        atexit.register(print, "at the end")
        threading.Thread(target=lambda: print("thread")).start()
        """,
    )
    sample = (
        "import logging, os, signal, sys, warnings\n"
        "(os.getcwd(), 'MESS' in os.environ, '/mess' in sys.path, sys.argv, logging.root.handlers, "
        "signal.getsignal(signal.SIGTERM), torch.get_default_dtype(), torch.is_grad_enabled(), "
        "torch.are_deterministic_algorithms_enabled(), torch.initial_seed(), __name__, "
        "sys.modules['__main__'].__dict__ is globals(), len(warnings.filters)).__repr__()"
    )
    cluster.run("torch.manual_seed(5)")
    before = cluster.run(sample).results
    runs = [cluster.scripts.run(script).stdout[0] for _ in range(2)]
    assert runs[0] == runs[1], "each begins as in a new process"
    assert runs[0].splitlines()[0] == "log heard once"
    assert runs[0].splitlines()[-1] == "at the end"
    assert cluster.run(sample).results == before


@pytest.mark.parametrize("how", WAYS)
def test_script_may_fork_and_close_descriptors(cluster: Cluster, folder: Path, how: str) -> None:
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
    lines = lines_of(cluster.scripts.run(fork, how=how))
    assert all(sorted(text) == ["child", "ended with 0", "parent"] for text in lines.values())
    close = write(
        folder, "close.py", "import os, sys\nprint('before', flush=True)\nsys.stdout.close()\nos.close(1)\nos.close(2)"
    )
    for _ in range(2):
        assert cluster.scripts.run(close, how=how).stdout == {0: "before\n", 1: "before\n"}
    assert cluster.run("print('still', rank)").stdout == {0: "still 0\n", 1: "still 1\n"}


def test_closed_stdout_is_not_reused_for_another_file(cluster: Cluster, folder: Path) -> None:
    code = """
    import os, time
    print("lost", end="")
    os.close(1)
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    time.sleep(0.2)  # the unfinished line is sent by itself, in vain
    print("1" if 1 in others else "0", file=__import__("sys").stderr)
    for each in others: os.close(each)
    try: os.write(1, b"x")
    except OSError as error: assert error.errno == 9
    """
    run = cluster.scripts.run(write(folder, "closed.py", code))
    assert all(text.endswith("0\n") for text in run.stderr.values())
    later = "import subprocess, time; print('half', end=''); time.sleep(0.5); done = subprocess.run(['echo', 'whole'])"
    assert cluster.run(later).stdout == {0: "halfwhole\n", 1: "halfwhole\n"}


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
    assert cluster.scripts.run(script, how="fresh").stdout == {0: "None False\n", 1: "None False\n"}


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
    assert "the following arguments are required: SCRIPT" in notebook.run("%dist_run --fresh").error
