"""What a script leaves behind, and how it ends: as under Python itself."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.errors import RankFailure

from ....support.process_tools import wait_until
from .test_scripts import SUM, WAYS, lines_of, write

if TYPE_CHECKING:
    from pathlib import Path

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


@pytest.mark.parametrize(
    ("how", "kind"), [(how, kind) for how in WAYS for kind in POOLS if (how, kind) != ("fresh", "compiled")]
)
def test_unclosed_resources_of_a_script_are_closed_at_its_end(
    cluster: Cluster, folder: Path, how: str, kind: str
) -> None:
    script = write(folder, "it.py", "import time\n" + textwrap.dedent(POOLS[kind]))
    for _ in range(2):
        assert lines_of(cluster.scripts.run(script, ranks=0, how=how))[0][-1] == "worked"
    children = "import multiprocessing, gc; gc.collect(); [each.name for each in multiprocessing.active_children()]"
    assert wait_until(lambda: cluster.run(children, 0).results == {0: []})


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("error", ["", "raise RuntimeError('boom')", "raise SystemExit(3)"])
def test_exit_functions_are_called_however_the_script_ends(
    cluster: Cluster, folder: Path, how: str, error: str
) -> None:
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
    run = cluster.scripts.run(script, how=how, block=False)
    if error:
        with pytest.raises(RankFailure, match=r"boom|exited with code [13]"):
            run.wait()
    else:
        run.wait()
    assert lines_of(run)[0] == ["last", "first", "helper"]
    assert "ValueError: in atexit" in run.stderr[0]


@pytest.mark.parametrize("how", WAYS)
def test_failed_fork_is_reported(cluster: Cluster, folder: Path, how: str) -> None:
    code = """
    import os, sys
    for end in ("raise ValueError('in the child')", "sys.exit('said in the child')", "sys.exit(4)"):
        child = os.fork()
        if child == 0:
            exec(end)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    run = cluster.scripts.run(write(folder, "fork.py", code), ranks=0, how=how)
    assert lines_of(run)[0] == ["1", "1", "4"]
    assert "ValueError: in the child" in run.stderr[0]
    assert "said in the child" in run.stderr[0]


MESS = """
import builtins, faulthandler, gc, multiprocessing, random, signal, sys, threading
import numpy as np, torch
print("begins", multiprocessing.get_start_method(allow_none=True), gc.isenabled(), torch.is_autocast_enabled("cpu"))
builtins.print = lambda *args, **options: None
builtins.mess = 1
multiprocessing.set_start_method("spawn")
random.seed(0); np.random.seed(0); torch.manual_seed(0)
gc.disable()
sys.meta_path.insert(0, None); sys.meta_path.pop(0); threading.excepthook = None
torch.set_printoptions(precision=1); np.set_printoptions(precision=1)
torch.autocast("cpu").__enter__()
torch.use_deterministic_algorithms(True, warn_only=True)
torch.backends.cuda.matmul.fp32_precision = "tf32"
signal.signal(signal.SIGALRM, lambda *_: None); signal.alarm(5)
faulthandler.dump_traceback_later(5, exit=True)
"""


MESS_PROBE = (
    "import builtins, gc, multiprocessing, random, threading; import numpy as np\n"
    "(print is builtins.print, hasattr(builtins, 'mess'), multiprocessing.get_start_method(allow_none=True), "
    "random.getstate()[1][:3], np.random.get_state()[1][:3].tolist(), torch.initial_seed(), gc.isenabled(), "
    "threading.excepthook is None, repr(torch.tensor(0.123456)), repr(np.float64(1) / np.ones(1) / 3), "
    "torch.is_autocast_enabled('cpu'), torch.get_deterministic_debug_mode(), "
    "torch.backends.cuda.matmul.fp32_precision).__repr__()"
)
SWITCHES = """
import decimal, faulthandler, multiprocessing, resource, sys, tempfile
import numpy as np, torch
print(torch.get_float32_matmul_precision(), torch.get_autocast_dtype("cpu"), np.geterr()["divide"])
torch.set_float32_matmul_precision("medium"); torch.set_autocast_dtype("cpu", torch.float16)
torch.backends.mkldnn.enabled = False
torch.multiprocessing.set_sharing_strategy("file_system")
np.seterr(all="raise")
tempfile.tempdir = "."; decimal.getcontext().prec = 3; sys.setswitchinterval(0.1); sys.set_int_max_str_digits(700)
faulthandler.disable()
resource.setrlimit(resource.RLIMIT_NOFILE, (700, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
"""
SWITCHES_PROBE = (
    "import decimal, faulthandler, resource, sys, tempfile; import numpy as np\n"
    "repr((torch.get_float32_matmul_precision(), torch.get_autocast_dtype('cpu'), torch.backends.mkldnn.enabled, "
    "torch.backends.mkldnn.matmul.fp32_precision, torch.multiprocessing.get_sharing_strategy(), np.geterr(), "
    "tempfile.tempdir, decimal.getcontext().prec, sys.getswitchinterval(), sys.get_int_max_str_digits(), "
    "faulthandler.is_enabled(), resource.getrlimit(resource.RLIMIT_NOFILE)))"
)


@pytest.mark.parametrize(
    ("code", "probe", "begins", "setting", "default"),
    [
        (MESS, MESS_PROBE, "begins None True False", "torch.backends.cuda.matmul.fp32_precision = 'tf32'", "ieee"),
        (
            SWITCHES,
            SWITCHES_PROBE,
            "highest torch.bfloat16 warn",
            "torch.set_float32_matmul_precision('high')",
            "highest",
        ),
    ],
    ids=["mess", "switches"],
)
def test_process_state_changed_by_a_script_is_restored(
    cluster: Cluster, folder: Path, code: str, probe: str, begins: str, setting: str, default: str
) -> None:
    script = write(folder, "mess.py", code)
    cluster.run("import random; import numpy as np; random.seed(5); np.random.seed(6); torch.manual_seed(7)")
    before = cluster.run(probe).results
    for _ in range(2):
        assert lines_of(cluster.scripts.run(script))[0] == [begins]
        assert cluster.run(probe).results == before
    cluster.run(setting)
    try:
        changed = cluster.run(probe).results
        assert changed != before
        assert lines_of(cluster.scripts.run(script))[0] == [begins]
        assert cluster.run(probe).results == changed
    finally:
        cluster.run(setting.replace("tf32", default).replace("'high'", f"'{default}'"))
    cluster.run(f"import time; time.sleep({5.2 if 'alarm' in code else 0})")  # neither alarm fires
    assert cluster.run("print('heard')").stdout == {0: "heard\n", 1: "heard\n"}


def test_logging_is_reset_and_libraries_keep_their_loggers(cluster: Cluster, folder: Path) -> None:
    code = """
    import logging, sys
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s", force=False)
    logging.getLogger("train").info("heard")
    """
    script = write(folder, "log.py", code)
    cluster.run("import logging; logging.basicConfig(level=logging.ERROR); kept = list(logging.root.handlers)")
    for _ in range(2):
        assert cluster.scripts.run(script).stdout == {0: "heard\n", 1: "heard\n"}
    assert cluster.run("kept == logging.root.handlers, logging.root.level").results == {0: (True, 40), 1: (True, 40)}
    cluster.run("logging.root.handlers.clear()")


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
    run = cluster.scripts.run(write(folder, "hidden.py", "import psutil"), ranks=0)
    assert "the script does not import psutil beside it" in run.stderr[0]


@pytest.mark.parametrize("how", WAYS)
def test_script_starts_without_a_group(cluster: Cluster, folder: Path, how: str) -> None:
    code = """
    import torch, torch.distributed as dist
    print(dist.is_initialized())
    """
    script = write(folder, "looks.py", code)
    assert cluster.scripts.run(script, how=how).stdout == {0: "False\n", 1: "False\n"}
    cluster.run("kept = dist.group.WORLD")
    assert cluster.scripts.run(script, ranks=0, how=how).stdout == {0: "False\n"}
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
    families = cluster.run("import psutil; [each.cmdline() for each in psutil.Process().children()]", 0).results[0]
    assert not [arguments for arguments in families if "forkserver" in " ".join(arguments)]


def test_threads_left_by_a_script_end_silently(cluster: Cluster, folder: Path) -> None:
    code = """
    import threading, time
    def loop():
        while True: time.sleep(0.05); len(thread.name)
    thread = threading.Thread(target=loop, daemon=True, name="loop")
    thread.start()
    """
    run = cluster.scripts.run(write(folder, "thread.py", code))
    ended = "import threading, time\nwhile any('loop' in each.name for each in threading.enumerate()): time.sleep(0.05)"
    assert [each.stderr for each in (run, cluster.run(ended, timeout_s=30))] == [{0: "", 1: ""}, {0: "", 1: ""}]


def test_script_that_handles_eof_handles_missing_input(cluster: Cluster, folder: Path) -> None:
    code = "try: answer = input('go on? ')\nexcept EOFError: answer = 'yes'\nprint(answer)"
    assert lines_of(cluster.scripts.run(write(folder, "ask.py", code))) == {0: ["yes"], 1: ["yes"]}
