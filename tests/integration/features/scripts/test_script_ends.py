"""How a script ends, and that each run starts as the first: as under Python itself."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain.errors import RankFailure

from ....support.process_tools import wait_until
from .test_scripts import SUM, TRAIN, lines_of, write

if TYPE_CHECKING:
    from jupyter_disttrain import Cluster


POOLS = {
    "threads": """
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(2)
        pool.submit(lambda: (time.sleep(0.2), print("worked", flush=True)))
        """,
    "cancelled": """
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(1)
        pool.submit(lambda: (time.sleep(0.2), print("worked", flush=True)))
        pool.submit(print, "cancelled")
        pool.shutdown(wait=False, cancel_futures=True)
        """,
    "processes": """
        from concurrent.futures import ProcessPoolExecutor
        pool = ProcessPoolExecutor(1)
        print(pool.submit(max, 1, 2).result())
        print("worked")
        """,
    "multiprocessing": """
        import multiprocessing
        pool = multiprocessing.Pool(1)
        print(pool.map(abs, [-1]))
        print("worked")
        """,
    "a thread": """
        import threading
        threading.Thread(target=lambda: (time.sleep(0.2), print("worked", flush=True))).start()
        """,
    "a process": """
        import multiprocessing
        multiprocessing.Process(target=lambda: (time.sleep(0.2), print("worked", flush=True))).start()
        """,
    "a daemon": """
        import multiprocessing
        multiprocessing.Process(target=time.sleep, args=(1000,), daemon=True).start()
        print("worked")
        """,
    "compiled": """
        import torch
        print(torch.compile(lambda x: x + 1)(torch.ones(2)).sum().item())
        print("worked")
        """,
}


@pytest.mark.parametrize("kind", POOLS)
def test_unclosed_resources_of_a_script_are_closed_at_its_end(cluster: Cluster, folder: Path, kind: str) -> None:
    script = write(folder, "it.py", "import time\n" + textwrap.dedent(POOLS[kind]))
    for _ in range(2):
        assert lines_of(cluster.scripts.run(script, ranks=0))[0][-1] == "worked"


ENDS = """
import atexit, ctypes, io, json, logging, os, shutil, signal, sys, tempfile, threading, time, weakref
sys.path.append("elsewhere")
import beside, library
class Noisy:
    def __init__(self, name): self.name = name
    def __del__(self): print("deleted", self.name, flush=True)
class Failing:
    def __del__(self): raise ValueError("in __del__")
class Cache:
    def __init__(self): self.path = tempfile.mkdtemp(dir=".")
    def __del__(self): shutil.rmtree(self.path); print(json.dumps(["removed", os.path.exists(self.path)]), flush=True)
cache = Cache()
def late(): time.sleep(0.2); print("thread", flush=True)
cycle = Noisy("cycle"); cycle.itself = cycle
private, _private = Noisy("global"), Noisy("underscore")
beside.kept = Noisy("of a module")
failing = Failing()
folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
open("folder", "w").write(folder.name)
weakref.finalize(private, print, "finalized", flush=True)
atexit.register(print, "exit function", flush=True)
unflushed = open("file", "w"); unflushed.write("written")
threading.Thread(target=late).start()
print("printed by Python", end="")
sys.stdout.flush()
ctypes.CDLL(None).printf(b"\\nprinted by C\\n")
ctypes.CDLL(None).printf(b"without a line's end")
"""


USED = {  # what stays refers to the script's variables
    "a signal handler": "signal.signal(signal.SIGTERM, lambda *_: cache)",
    "a stream": "class Tee(io.TextIOBase):\n    def write(self, text): return sys.__stdout__.write(json.dumps(text))\n"
    "    def flush(self): json.dumps(beside.kept.name)\nsys.stdout = Tee()",
    "a library": "class Handler(logging.Handler): pass\nlogging.getLogger().addHandler(Handler())",
}


@pytest.mark.parametrize("code", ["", "sys.exit(3)", "sys.exit('text')", "sys.exit(-1)", "1 / 0", *USED])
def test_script_ends_as_under_python(either: Cluster, folder: Path, code: str) -> None:
    (folder / "beside.py").write_text("")
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere/library.py").write_text("log = open('log', 'w')\nlog.write('of a library')\n")
    write(folder, "ends.py", ENDS + USED.get(code, code))
    alone = subprocess.run([sys.executable, "ends.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert "deleted of a module" in alone.stdout
    written = (folder / "file").read_text()
    run = either.scripts.run("ends.py", ranks=[0], block=False)
    if code not in ("", *USED):
        with pytest.raises(RankFailure) as caught:
            run.wait()
        how = {"1 / 0": "ZeroDivisionError", "sys.exit('text')": "exited: text"}
        assert how.get(code, f"exited with code {alone.returncode}") in str(caught.value)
    else:
        run.wait()
    assert sorted(run.stdout[0].splitlines()) == sorted(alone.stdout.splitlines())
    text = "ValueError: in __del__"
    assert (text in run.stderr.get(0, "")) == (text in alone.stderr)
    assert "Exception in thread" not in run.stderr.get(0, "")
    assert (folder / "file").read_text() == written
    assert (folder / "log").read_text() == "of a library"
    assert not Path((folder / "folder").read_text()).exists()


@pytest.mark.parametrize("error", ["", "raise RuntimeError('boom')", "raise SystemExit(3)"])
def test_exit_functions_are_called_however_the_script_ends(cluster: Cluster, folder: Path, error: str) -> None:
    write(folder, "helper.py", "import atexit\natexit.register(print, 'helper')")
    code = f"""
    import atexit, helper
    def bad(): raise ValueError("in atexit")
    atexit.register(print, "first")
    atexit.register(bad)
    atexit.register(print, "last")
    {error}
    """
    script = write(folder, "it.py", code)
    run = cluster.scripts.run(script, block=False)
    if error:
        with pytest.raises(RankFailure, match=r"boom|exited with code [13]"):
            run.wait()
    else:
        run.wait()
    assert lines_of(run)[0] == ["last", "first", "helper"]
    assert "ValueError: in atexit" in run.stderr[0]


def test_ps_shows_a_script_to_its_end(cluster: Cluster, folder: Path) -> None:
    """Also while functions of C libraries run after Python's end, as MPI's, which may wait."""
    code = """
        import ctypes, os, signal
        libc = ctypes.CDLL(None)
        libc.__cxa_atexit(libc["raise"], signal.SIGSTOP, None)
        with open("pid", "w") as file: file.write(str(os.getpid()))
        """
    run = cluster.scripts.run(write(folder, "late.py", code), ["argument"], ranks=0, block=False)
    assert wait_until(lambda: (folder / "pid").exists() and (folder / "pid").read_text())
    process = psutil.Process(int((folder / "pid").read_text()))
    assert wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
    assert process.cmdline()[-2:] == ["late.py", "argument"]
    process.kill()
    with pytest.raises(RankFailure, match=r"late\.py was killed by SIGKILL"):
        run.wait()


def test_failed_fork_is_reported(cluster: Cluster, folder: Path) -> None:
    code = """
    import os, sys
    for end in ("raise ValueError('in the child')", "sys.exit('said in the child')", "sys.exit(4)"):
        child = os.fork()
        if child == 0:
            exec(end)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    run = cluster.scripts.run(write(folder, "fork.py", code), ranks=0)
    assert lines_of(run)[0] == ["1", "1", "4"]
    assert "ValueError: in the child" in run.stderr[0]
    assert "said in the child" in run.stderr[0]


EVERY_RUN = {
    "operators": (
        {"mine_ops.py": "import torch\ntorch.library.define('mine::twice', '(Tensor x) -> Tensor')"},
        "import mine_ops, torch\nprint(torch.ops.mine.twice is not None)",
        "True",
    ),
    "finder": (
        {},
        """
        import sys, torch
        class Finder:
            def find_spec(self, name, path=None, target=None):
                sys.meta_path.remove(self)
                torch.library.define("mine::once", "(Tensor x) -> Tensor")
        sys.meta_path.insert(0, Finder())
        import colorsys
        print("registered")
        """,
        "registered",
    ),
    "asyncio": ({}, "import asyncio\nasync def main(): print('in a loop')\nasyncio.run(main())", "in a loop"),
    "logging": (
        {},
        """
        import logging, sys
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
        logging.info("Finished")
        """,
        "Finished",
    ),
    "threads": (
        {},
        "import torch\ntorch.set_num_interop_threads(3)\nprint(torch.get_num_interop_threads())",
        "3",
    ),
    "start method": ({}, "import multiprocessing as mp\nmp.set_start_method('spawn')\nprint('set')", "set"),
    "switches": (
        {},
        """
        import torch
        print(torch.get_default_dtype(), torch.initial_seed() == 1)
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(1)
        """,
        "torch.float32 False",
    ),
}


@pytest.mark.parametrize("kind", EVERY_RUN)
def test_every_run_is_as_the_first(cluster: Cluster, folder: Path, kind: str) -> None:
    files, code, expected = EVERY_RUN[kind]
    for name, text in files.items():
        write(folder, name, text)
    script = write(folder, "it.py", code)
    for _ in range(2):
        assert cluster.scripts.run(script).stdout == dict.fromkeys(range(2), f"{expected}\n")


def test_package_of_a_module_is_imported_once(cluster: Cluster, folder: Path) -> None:
    write(folder, "pack/__init__.py", "print('imported')")
    write(folder, "pack/other.py", "")
    write(folder, "pack/train.py", "from . import other\nprint('ran')")
    assert lines_of(cluster.scripts.run("pack.train", is_module=True)) == {
        rank: ["imported", "ran"] for rank in range(2)
    }


def test_scripts_leave_no_descriptor_and_no_thread_in_their_rank(cluster: Cluster, folder: Path) -> None:
    write(folder, "helper.py", "def double(x): return 2 * x")
    script = write(folder, "train.py", TRAIN)
    count = "import os; len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task'))"
    cluster.scripts.run(script)
    before = cluster.run(count).results
    for _ in range(5):
        cluster.scripts.run(script)
    assert cluster.run(count).results == before


def test_text_of_rich_displays_is_printed(cluster: Cluster, folder: Path) -> None:
    rich = pytest.importorskip("rich")
    assert rich
    code = """
    from rich.console import Console
    from rich.table import Table
    table = Table("name", "value")
    table.add_row("loss", "0.5")
    Console(width=40).print(table)
    """
    run = cluster.scripts.run(write(folder, "table.py", code), ranks=0)
    assert "loss" in run.stdout[0]
    assert "0.5" in run.stdout[0]


def test_user_modules_are_imported_again_wherever_they_are(cluster: Cluster, folder: Path) -> None:
    code = "import sys, os; sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))\n"
    code += "from ours.model import V; print(V)"
    for project in ("a", "b"):
        write(folder, f"{project}/scripts/train.py", code)
        write(folder, f"{project}/ours/model.py", f"V = '{project}'")
        assert cluster.scripts.run(f"{project}/scripts/train.py", ranks=0).stdout == {0: f"{project}\n"}
    write(folder, "b/ours/model.py", "V = 'edited'")
    assert cluster.scripts.run("b/scripts/train.py", ranks=0).stdout == {0: "edited\n"}
    write(folder, "psutil.py", "V = 1")
    run = cluster.scripts.run(write(folder, "hides.py", "import psutil; print(psutil.V)"), ranks=0)
    assert run.stdout == {0: "1\n"}, "as the first folder of sys.path is the script's"


def test_script_starts_without_a_group(cluster: Cluster, folder: Path) -> None:
    code = """
    import torch, torch.distributed as dist
    print(dist.is_initialized())
    """
    script = write(folder, "looks.py", code)
    assert cluster.scripts.run(script).stdout == {0: "False\n", 1: "False\n"}
    cluster.run("kept = dist.group.WORLD")
    assert cluster.scripts.run(script, ranks=0).stdout == {0: "False\n"}
    assert cluster.run("kept is dist.group.WORLD").results == {0: True, 1: True}
    assert cluster.run(SUM).results == {0: [3.0], 1: [3.0]}


def test_fork_server_serves_one_run(cluster: Cluster, folder: Path) -> None:
    code = """
    import multiprocessing as mp, os, sys
    def told(_): return os.environ.get("FOO")
    if __name__ == "__main__":
        os.environ["FOO"] = sys.argv[1]
        mp.set_start_method("forkserver")
        with mp.Pool(1) as pool: print(pool.map(told, [0]))
    """
    script = write(folder, "server.py", code)
    for name in "AB":
        assert lines_of(cluster.scripts.run(script, [name], ranks=0))[0] == [f"['{name}']"]


def test_script_that_handles_eof_handles_missing_input(cluster: Cluster, folder: Path) -> None:
    code = "try: answer = input('go on? ')\nexcept EOFError: answer = 'yes'\nprint(answer)"
    assert lines_of(cluster.scripts.run(write(folder, "ask.py", code))) == {0: ["go on? yes"], 1: ["go on? yes"]}
