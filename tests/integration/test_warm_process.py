"""Ranks that are forked from a warm process: which one, in which state, and what happens when it can't serve."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import UsageError
from jupyter_disttrain.protocol.time_limits import WARM_IDLE_SECONDS

from ..support.leftovers import our_processes
from ..support.notebook_driver import Notebook
from ..support.process_tools import as_root, processes_of_cluster, wait_until

PROCESS = "jupyter_disttrain.rank.warm"


def warm_process(cluster: Cluster, rank: int = 0) -> psutil.Process:
    """Return the parent of a rank's nanny, which is a warm process."""
    process = psutil.Process(cluster.table[rank].nanny_pid).parent()
    assert process is not None
    assert PROCESS in process.cmdline()
    return process


def warm_processes() -> set[psutil.Process]:
    """Return the warm processes that tests have started here; those of earlier tests may still run."""
    found = set()
    for process in our_processes():
        with suppress(psutil.NoSuchProcess):
            found |= {process} if PROCESS in process.cmdline() else set()
    return found


def kill_rank(cluster: Cluster, rank: int) -> None:
    """Kill a rank and wait until another process has its place, in the process group too."""
    killed = cluster.table[rank].info.pid
    os.kill(killed, signal.SIGKILL)
    assert wait_until(lambda: cluster.table[rank].info.pid != killed)
    assert cluster.run("t = torch.ones(1); dist.all_reduce(t); int(t)").results == {0: 2, 1: 2}


def connections(process: psutil.Process) -> list[str]:
    """Return the connections to a warm process's socket, accepted or not."""
    name = next(each for each in process.cmdline() if each.startswith("disttrain-warm-"))
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if line.endswith(f"@{name}")]


@pytest.fixture
def own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this test's starts use a warm process of their own."""
    monkeypatch.setenv("TORCH_OF_ONE_TEST", request.node.name)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules that ranks can import."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_ranks_and_replacements_share_one_process_that_has_imported_torch(cluster: Cluster) -> None:
    process = warm_process(cluster)
    assert warm_process(cluster, 1) == process
    kill_rank(cluster, 1)
    assert warm_process(cluster, 1) == process
    assert cluster.start_report.notes == ()


def test_ranks_are_shown_with_their_own_command_and_environment(cluster: Cluster) -> None:
    process = psutil.Process(cluster.table[0].info.pid)
    assert process.cmdline()[:3] == [sys.executable, "-m", "jupyter_disttrain.rank"]
    assert process.environ()["DISTTRAIN_CLIENT"] == cluster.cluster_id
    assert "DISTTRAIN_CLIENT" not in warm_process(cluster).environ()


def test_random_numbers_and_keys_differ_between_ranks(cluster: Cluster) -> None:
    run = cluster.run(
        "import random, numpy, multiprocessing\n"
        "random.random(), numpy.random.random(), float(torch.rand(1)), torch.initial_seed(), "
        "bytes(multiprocessing.current_process().authkey)"
    )
    of_0, of_1 = run.results.values()
    assert all(first != second for first, second in zip(of_0, of_1, strict=True))


@pytest.mark.usefixtures("own")
def test_session_outlives_its_warm_process(cluster: Cluster) -> None:
    """The cluster of all tests has another warm process; this one is killed twice: idle, and while a rank starts."""
    with Cluster(n=2, launcher="local") as there:
        there.run("kept = rank + 5")
        first = warm_process(there)
        first.kill()
        assert there.run("kept").results == {0: 5, 1: 6}
        kill_rank(there, 1)
        second = warm_process(there, 1)
        assert second.pid != first.pid
        assert there.run("kept", ranks=[0]).results == {0: 5}
        second.suspend()  # a start can connect, and gets no reply
        starts = len(connections(second))
        killed = there.table[1].info.pid
        os.kill(killed, signal.SIGKILL)
        assert wait_until(lambda: len(connections(second)) > starts)
        second.kill()  # SIGKILL ends a stopped process, too
        assert wait_until(lambda: there.table[1].info.pid != killed)
        assert there.run("t = torch.ones(1); dist.all_reduce(t); int(t)").results == {0: 2, 1: 2}
    assert cluster.run("rank").results == {0: 0, 1: 1}


@pytest.mark.usefixtures("own")
def test_warm_process_ends_after_its_last_cluster_and_serves_a_reset() -> None:
    with Cluster(n=1, launcher="local", backend="none") as there:
        process = warm_process(there)
        there.reset()
        assert warm_process(there) == process
    assert process.is_running()
    assert wait_until(lambda: not process.is_running(), WARM_IDLE_SECONDS + 10)


@pytest.mark.usefixtures("own")
def test_start_whose_warm_process_can_not_import_torch_names_the_cause(modules: Path) -> None:
    (modules / "torch.py").write_text("raise ImportError('no such library')\n")
    with pytest.raises(Exception, match="torch can't be imported: ImportError: no such library"):
        Cluster(n=1, launcher="local")


@pytest.mark.usefixtures("own")
def test_warm_process_that_ends_while_it_starts_is_not_awaited(modules: Path) -> None:
    (modules / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if 'jupyter_disttrain.rank.warm' in sys.orig_argv: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with Cluster(n=1, launcher="local", backend="none") as there:
        (note,) = there.start_report.notes
        assert "the warm process was killed by SIGKILL while it started" in note


def test_ranks_import_torch_themselves_where_that_is_wanted() -> None:
    with Cluster(n=2, launcher="local", warm=False, backend="none") as there:
        launcher = psutil.Process(there.table[0].nanny_pid).parent()
        assert launcher is not None
        assert PROCESS not in launcher.cmdline()
        assert there.start_report.notes == ()


@pytest.mark.parametrize("warm", [True, False])
def test_ranks_and_scripts_keep_freed_memory(warm: bool, tmp_path: Path) -> None:
    """Else each step of a training loop may return the memory of its tensors and fetch it again, page by page."""
    code = (
        "import resource, torch\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    for _ in range(50):\n"
        "        [torch.ones(5000) for _ in range(2900)]\n"  # 58 MB
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "_ = faults()\n"
        "print(faults())"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    most = 58_000_000 / resource.getpagesize()  # the pages of one of 50 iterations
    with Cluster(n=1, launcher="local", warm=warm) as there:
        assert int(there.run(code).stdout[0]) < most
        assert int(there.scripts.run(script, []).stdout[0]) < most


def test_modules_are_preloaded(modules: Path) -> None:
    (modules / "mine.py").write_text("import os\nmade_by = os.getpid()\n")
    with Cluster(n=2, launcher="local", backend="none", preload=("mine",)) as there:
        process = warm_process(there)
        assert there.run("import mine; mine.made_by").results == {0: process.pid, 1: process.pid}
        assert there.run("import gc; gc.isenabled()").results == {0: True, 1: True}
        assert there.start_report.notes == ()
    (modules / "mine.py").write_text("import gc\ngc.disable()\nmade_by = 'an edited file'\n")
    with Cluster(n=2, launcher="local", backend="none", preload=("mine",)) as there:
        assert warm_process(there) != process
        assert there.run("import mine; mine.made_by").results == dict.fromkeys(range(2), "an edited file")
        assert there.run("import gc; gc.isenabled()").results == {0: False, 1: False}, "as the module left it"


COMPILES = """
import sys
there = "torch._dynamo" in sys.modules
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1).to(device))
torch.compile(model, backend="aot_eager")(torch.ones(2, 4)).sum().backward()
there
"""


def test_compiler_of_torch_is_preloaded(tmp_path: Path) -> None:
    script = tmp_path / "compiles.py"
    script.write_text(f"import torch\ndevice = 'cpu'\ntorch.distributed.init_process_group()\n{COMPILES}assert there\n")
    with Cluster(n=2, launcher="local", preload=("torch._dynamo",)) as there:
        assert there.start_report.notes == ()
        assert there.run(COMPILES).results == {0: True, 1: True}
        there.scripts.run(script)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "thread"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
    ids=["thread", "error"],
)
def test_module_that_can_not_be_preloaded_is_reported_once(modules: Path, code: str, reason: str) -> None:
    (modules / "odd.py").write_text(code)
    with Cluster(n=2, launcher="mpi", backend="none", preload=("odd",)) as there:
        (note,) = there.start_report.notes
        assert note.startswith("ranks 0-1 have imported torch, which a warm process saves: odd can't be preloaded")
        assert reason in note
        assert there.run("rank").results == {0: 0, 1: 1}


def test_name_that_is_no_module_is_refused() -> None:
    with pytest.raises(UsageError, match="can't be a module 'my-module' to preload"):
        Cluster(n=1, preload=("my-module",))


@pytest.mark.parametrize("cluster", ["mpi"], indirect=True)
def test_killing_the_process_that_mpiexec_has_started_means_its_rank(cluster: Cluster) -> None:
    before = {entry.info.pid for entry in cluster.table}
    started = [each for each in processes_of_cluster(cluster.cluster_id) if is_for_a_rank(each)]
    started[0].kill()
    assert wait_until(lambda: {entry.info.pid for entry in cluster.table} != before)
    assert cluster.run("t = torch.ones(1); dist.all_reduce(t); int(t)").results == {0: 2, 1: 2}


def is_for_a_rank(process: psutil.Process) -> bool:
    """Whether mpiexec has started the process."""
    parent = process.parent()
    return parent is not None and "prterun" in parent.name() and process.cmdline()[2:] == ["jupyter_disttrain.rank"]


STATE = """
import fcntl, json, os, resource, signal, sys
from jupyter_disttrain.rank.warm import start
from jupyter_disttrain.rank.warm.warm_process import WarmProcess


def tell(named):
    state = {
        "folder": os.getcwd(), "umask": os.umask(0), "limit": resource.getrlimit(resource.RLIMIT_CORE),
        "affinity": sorted(os.sched_getaffinity(0)), "variables": dict(os.environ),
        "c": __import__("ctypes").CDLL(None).getenv(b"ONLY_HERE") != 0,
        "ignored": [int(each) for each in signal.valid_signals() if signal.getsignal(each) == signal.SIG_IGN],
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "session": os.getsid(0) == os.getpid(), "open": sorted(map(int, os.listdir("/proc/self/fd"))),
        "lifeline": named["lifeline"],
    }
    os.write(9, json.dumps(state).encode())
    sys.exit(7)


address = "disttrain-warm-test-" + str(os.getpid())
process = WarmProcess(address)
if os.fork() == 0:
    os.chdir("/")
    os.close(int(sys.argv[2]))
    process.serve({start.NANNY: tell})
    os._exit(0)
start.channel.address_of = lambda label: "\\0" + address
os.chdir(sys.argv[1])
os.umask(0o027)
for number in (9, *range(15, 60)):  # more than the warm process receives before it looks at their numbers
    os.dup2(int(sys.argv[2]), number)
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.environ["ONLY_HERE"] = "1"
del os.environ["HOME"]
nannies = start.fork_nannies(1)
(pid,) = nannies.pids
assert nannies.wait() == (pid, 7 << 8), "the exit code"
assert nannies.pids == []
"""


def test_forked_process_has_the_state_of_the_process_it_is_forked_for(tmp_path: Path) -> None:
    read, write = os.pipe()
    command = [sys.executable, "-c", STATE, str(tmp_path), str(write)]
    subprocess.run(command, check=True, timeout=60, pass_fds=[write])
    os.close(write)
    with os.fdopen(read) as file:
        state = json.loads(file.read())
    assert state["folder"] == str(tmp_path)
    assert state["umask"] == 0o027
    assert state["limit"][0] == 0
    assert state["affinity"] == [min(os.sched_getaffinity(0))]
    assert state["variables"]["ONLY_HERE"] == "1"
    assert state["c"], "C code sees the variable"
    assert "HOME" not in state["variables"]
    assert {signal.SIGUSR1, signal.SIGINT} <= set(state["ignored"])
    assert state["session"]
    # 0 to 2, the inherited ones, the pipe given to this program, the lifeline, and that of the folder being listed
    assert set(state["open"]) - {write, state["lifeline"]} <= {0, 1, 2, 9, *range(15, 60), *state["open"][-1:], 3}


@as_root
@pytest.mark.usefixtures("own")
def test_socket_of_another_user_is_not_used() -> None:
    squat = (
        "import os, socket, sys\nos.setuid(65534)\ns = socket.socket(socket.AF_UNIX)\n"
        "s.bind('\\0' + sys.argv[1])\ns.listen()\nprint('ready', flush=True)\nsys.stdin.read()"
    )
    with Cluster(n=1, launcher="local", backend="none") as there:  # its label is that of the next start
        name = next(each for each in warm_process(there).cmdline() if each.startswith("disttrain-warm-"))
        process = warm_process(there)
    process.kill()
    process.wait(10)
    command = [sys.executable, "-c", squat, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        with Cluster(n=1, launcher="local", backend="none") as there:
            (note,) = there.start_report.notes
            assert "another user's process has the name of its socket" in note
        other.communicate("")


@pytest.mark.usefixtures("own")
def test_warm_process_that_is_started_before_the_ranks_is_theirs_and_ends_with_the_notebook() -> None:
    before = warm_processes()
    with Notebook() as notebook:
        notebook.run("%config DistributedMagics.prewarm = True").check()
        assert wait_until(lambda: bool(warm_processes() - before))
        (process,) = warm_processes() - before
        notebook.run("%dist_init -n 2 --launcher local").check()
        parent = notebook.run("import psutil\nprint(psutil.Process(cluster.table[0].nanny_pid).ppid())").check()
        assert parent.text.strip() == str(process.pid)
        notebook.run("%dist_shutdown").check()
        holders = [each for each in our_processes() if "jupyter_disttrain.rank.warm.keep_alive" in each.cmdline()]
        assert len(holders) == 1
    assert wait_until(lambda: not holders[0].is_running())
    assert wait_until(lambda: not process.is_running(), WARM_IDLE_SECONDS + 10)


def test_large_modules_do_not_delay_the_process_that_starts_ranks() -> None:
    """Every start, reset and replacement waits for it; these would double the time until it asks for a fork."""
    code = (
        "import sys; before = set(sys.modules); import jupyter_disttrain.rank.__main__\n"
        "from jupyter_disttrain.rank.startup import startup_args; from jupyter_disttrain.rank.warm import start\n"
        "startup_args.enter(startup_args.read_arguments([]))\n"
        "large = {'argparse', 'dataclasses', 'psutil', 'numpy', 'torch', 'uuid'}\n"
        "print(large & (set(sys.modules) - before))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
