"""A rank at its exit: like the exit of a program, within a time limit."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil
import pytest

from jupyter_disttrain import Cluster, rank_sessions
from jupyter_disttrain.errors import RankFailure
from jupyter_disttrain.process_table import runs
from jupyter_disttrain.rank_sessions import FOLDER, end_abandoned

from ...support.process_tools import wait_until

LEFT = """
import atexit, csv, gzip, io, logging.handlers, os, tempfile, threading, time, zipfile
from concurrent.futures import ThreadPoolExecutor
os.chdir({folder!r})
def says(name): open(f"{{name}}-{{rank}}", "w").write("done")
order = []
atexit.register(lambda: open(f"order-{{rank}}", "w").write(" ".join(order)))
atexit.register(order.append, "first")
atexit.register(order.append, "second")
def fails(): raise ValueError("at the end")
atexit.register(fails)
plain = open(f"plain-{{rank}}", "w"); plain.write("buffered")
def hidden(): local = open(f"local-{{rank}}", "wb"); local.write(b"buffered"); yield local
suspended = hidden(); next(suspended)
zipped = gzip.open(f"zipped-{{rank}}.gz", "wt"); zipped.write("buffered")
packed = io.BufferedWriter(gzip.open(f"packed-{{rank}}.gz", "wb")); packed.write(b"buffered")
archive = zipfile.ZipFile(f"archive-{{rank}}.zip", "w"); archive.writestr("name", "buffered")
rows = csv.writer(open(f"rows-{{rank}}", "w", newline="")); rows.writerow([1, 2])
handler = logging.handlers.MemoryHandler(100, target=logging.FileHandler(f"log-{{rank}}"))
logging.getLogger("own").addHandler(handler); logging.getLogger("own").warning("logged")
threading.Thread(target=lambda: (time.sleep(0.2), says("thread"))).start()
pool = ThreadPoolExecutor(1); pool.submit(lambda: (time.sleep(0.2), says("pool")))
scratch = tempfile.NamedTemporaryFile(dir="."); folder = tempfile.TemporaryDirectory(dir=".")
atexit.register(dist.destroy_process_group) if {torch} else None
"""
FOUND = {
    "plain": b"buffered",
    "local": b"buffered",
    "rows": b"1,2\r\n",
    "order": b"second first",
    "thread": b"done",
    "pool": b"done",
    "log": b"logged\n",
}
REPLACED = """
import atexit, os, threading
from concurrent.futures import ThreadPoolExecutor
if rank == 1:
    atexit.register(lambda: open("replaced", "w").write("done"))
    late = open("late", "w"); late.write("buffered")
    threading.Thread(target=threading.Event().wait, name="waits").start()
    pool = ThreadPoolExecutor(1, "pooled"); pool.submit(threading.Event().wait)
"""
SENDS = """
import atexit, os, signal, sys, threading, time
from IPython.display import display
if rank == 1:
    def end():
        main = threading.main_thread().ident
        while sys._current_frames()[main].f_code.co_name != "_wait_for": time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
    atexit.register(lambda: open({path!r}, "w").write("done"))
    atexit.register(display, "at the end")
    atexit.register(os.kill, os.getppid(), signal.SIGCONT)
    threading.Thread(target=end).start()
    os.kill(os.getppid(), signal.SIGSTOP)
    display("for which the nanny does not answer")
"""


@pytest.mark.parametrize("launcher", ["mpi", "local"])
def test_exit_functions_run_and_files_are_closed(launcher: str, folder: Path) -> None:
    with Cluster(n=2, launcher=launcher, backend="gloo" if launcher == "local" else "none", name="exits") as cluster:
        cluster.run(LEFT.format(folder=str(folder), torch=launcher == "local"))
        assert cluster.reset() == []
        for rank in (0, 1):
            found = {name: (folder / f"{name}-{rank}").read_bytes() for name in FOUND}
            assert found == FOUND
            for name in ("zipped", "packed"):
                assert gzip.decompress((folder / f"{name}-{rank}.gz").read_bytes()) == b"buffered"
            assert zipfile.ZipFile(folder / f"archive-{rank}.zip").read("name") == b"buffered"
        assert not [path for path in folder.iterdir() if path.name.startswith("tmp")]
        cluster.run(REPLACED)
        cluster.replace([1])
        assert (folder / "replaced").read_text() == "done"
        log = cluster._session.launch.folders.rank_log(1).read_text()
        assert "ended by the rank's exit before they finished: pooled_0, waits" in log
        assert (folder / "late").read_text() == "buffered"
        # Also within a cell; endless waits are ended by the limit, and the others are not.
        code = "import atexit, time\natexit.register(time.sleep, 1000 * rank)\n"
        code += f"kept = open(f'{folder}/kept-{{rank}}', 'w'); kept.write('buffered')\n"
        code += "import gc; gc.freeze()\n"  # as some training loops do
        code += f"atexit.register(lambda: open(f'{folder}/midst-{{rank}}', 'w').write('done'))\n"
        code += f"open(f'{folder}/began-{{rank}}', 'w').close()\ntime.sleep(1000)"
        cluster.run(code, block=False)
        for rank in (0, 1):
            assert wait_until(lambda rank=rank: (folder / f"began-{rank}").exists())  # type: ignore[misc]
        killed = cluster.shutdown()
        assert [(folder / f"midst-{rank}").read_text() for rank in (0, 1)] == ["done", "done"]
        assert [(folder / f"kept-{rank}").read_text() for rank in (0, 1)] == ["buffered", "buffered"]
        assert len(killed) == 1
        assert killed[0].startswith("rank 1 on ")
        assert "took longer than 2 s" in killed[0]
        assert "this rank was killed: its atexit functions" in cluster._session.launch.folders.rank_log(1).read_text()


def test_rank_that_ends_while_sending_can_still_send(torchless: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "exited"
    with pytest.raises(RankFailure, match="SIGTERM"):
        torchless.run(SENDS.format(path=str(path)))
    assert path.read_text() == "done"


SHARED = """
import multiprocessing, os, torch
from glob import glob
from multiprocessing.shared_memory import SharedMemory
torch.multiprocessing.set_sharing_strategy("file_system")
lock, shared, tensor = multiprocessing.get_context("spawn").Lock(), SharedMemory(create=True, size=8), torch.ones(1)
tensor.share_memory_()
[f"/dev/shm/sem.{lock._semlock.name[1:]}", f"/dev/shm/{shared.name}", *glob(f"/dev/shm/torch_{os.getpid()}_*")]
"""


def test_shared_memory_of_a_killed_rank_is_removed(torchless: Cluster) -> None:
    paths = [Path(path) for path in torchless.run(SHARED, 1).results[1]]
    assert [path.exists() for path in paths] == [True] * 3
    killed = torchless.table[1]
    os.kill(killed.info.pid, signal.SIGKILL)
    assert wait_until(lambda: not any(path.exists() for path in paths)), paths
    assert killed.pid_gone.wait(60), "a cell sent earlier fails because of the death"
    run = torchless.run("rank")
    assert run.results == {0: 0, 1: 1}
    assert [note for note in run.notes if note.startswith("rank 1 was replaced")]


STARTS = """
import multiprocessing, os, subprocess, time
left = [multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,)) for _ in range(2)]
[process.start() for process in left]
program = subprocess.Popen(["sleep", "1000"])
[os.getppid(), *(process.pid for process in left), program.pid]
"""


def test_child_processes_end_when_the_nanny_is_killed(torchless: Cluster) -> None:
    nanny, *left = torchless.run(STARTS, 1).results[1]
    os.kill(nanny, signal.SIGKILL)
    assert wait_until(lambda: torchless.table[1].state == "dead")
    assert torchless.run("rank").results == {0: 0, 1: 1}
    assert wait_until(lambda: not any(map(runs, left))), left


STORM = """
import os, subprocess, sys
storm = "import subprocess, time\\nfor _ in range(3000): subprocess.Popen(['sleep', sys.argv[1]])\\ntime.sleep(1000)"
subprocess.Popen([sys.executable, "-c", "import sys\\n" + storm, {mark!r}])
while len(marked({mark!r})) < 50: pass
os.getpid()
"""


@pytest.mark.parametrize("killed", ["rank", "nanny"])
def test_child_processes_that_are_being_started_end_with_the_rank(torchless: Cluster, killed: str) -> None:
    mark = f"1000.{os.getpid()}{len(killed)}"
    torchless.push({"marked": marked}, 1)
    pid = torchless.run(STORM.format(mark=mark), 1).results[1]
    entry = torchless.table[1]
    os.kill(pid if killed == "rank" else entry.nanny_pid, signal.SIGKILL)
    assert entry.pid_gone.wait(60)
    assert torchless.run("rank").results == {0: 0, 1: 1}
    assert wait_until(lambda: not marked(mark)), marked(mark)


def marked(mark: str) -> list[int]:
    """Return the processes with an argument."""
    import psutil  # noqa: PLC0415  (also called on ranks)

    return [each.pid for each in psutil.process_iter(["cmdline"]) if mark in (each.info["cmdline"] or [])]


def test_child_processes_end_with_the_cluster_when_all_nannies_are_killed() -> None:
    with Cluster(n=2, launcher="local", backend="none", name="left") as cluster:
        found = cluster.run(STARTS).results
        for nanny, *_ in found.values():
            os.kill(nanny, signal.SIGKILL)
        assert wait_until(lambda: all(entry.state == "dead" for entry in cluster.table))
    left = [pid for _, *pids in found.values() for pid in pids]
    assert wait_until(lambda: not any(map(runs, left))), left


KILLED = """
import os, sys, time
from pathlib import Path
from jupyter_disttrain.rank_sessions import HeldSession
rank = os.fork()
if rank == 0:
    os.setsid()
    time.sleep(1000)
if os.fork() == 0:
    while os.getsid(rank) != rank:
        time.sleep(0.01)
    held = HeldSession(Path(sys.argv[1]), rank)
    print(rank, flush=True)
    os._exit(1)
time.sleep(1000)  # and reap neither
"""


def test_start_does_not_wait_for_a_parent_that_reaps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_sessions, "RANK_SESSIONS_END_SECONDS", 1000.0)  # longer than a test may take
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        rank = int(parent.stdout.readline())
        (nanny,) = set(psutil.Process(parent.pid).children()) - {psutil.Process(rank)}
        is_gone = wait_until(lambda: not runs(nanny.pid))
        end_abandoned(tmp_path)
        is_zombie = psutil.pid_exists(rank) and not runs(rank)
        parent.kill()
    assert is_gone
    assert is_zombie


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a namespace of process IDs")
def test_leftovers_of_another_container_are_kept(tmp_path: Path) -> None:
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", KILLED]
    with subprocess.Popen([*command, str(tmp_path)], stdout=subprocess.PIPE) as container:
        assert container.stdout is not None
        container.stdout.readline()
        container.kill()
    (claim,) = (tmp_path / FOLDER).iterdir()
    end_abandoned(tmp_path)
    assert claim.exists()
