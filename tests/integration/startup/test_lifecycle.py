"""What a cluster starts, and what remains when it ends, resets or runs beside others."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from jupyter_core.paths import jupyter_runtime_dir

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import ClusterClosedError
from jupyter_disttrain.launchers import folders
from jupyter_disttrain.launchers.folders import Folders
from jupyter_disttrain.notebook.views.status_text import status_text
from jupyter_disttrain.process_table import runs
from jupyter_disttrain.protocol.shared_memory import NANNIES

from ...conftest import LAUNCHERS
from ...support.notebook_driver import Notebook
from ...support.process_tools import (
    FAST,
    are_gone,
    controllers_of,
    nothing_is_left_of,
    processes_of_cluster,
    start,
    wait_until,
)
from ...support.recovery_tools import HOST, SUM, send_signal

SHARED = "import multiprocessing; manager = multiprocessing.Manager(); shared = manager.dict(); shared['a'] = 1"


def test_reset_gives_fresh_ranks_and_shutdown_leaves_nothing(plain: Cluster) -> None:
    temporary = set(Path(tempfile.gettempdir()).iterdir())
    plain.run(SHARED)
    cluster_id, before = plain.cluster_id, set(processes_of_cluster(plain.cluster_id))
    controllers = set(controllers_of(cluster_id))
    assert len(before) >= 5
    assert controllers
    plain.reset()
    assert plain.run("'shared' in globals(), world_size").results == {0: (False, 2), 1: (False, 2)}
    assert plain.cluster_id == f"{cluster_id}.2"
    assert {each for each in before if each.is_running()} == controllers
    plain.run(SHARED)
    plain.shutdown()
    assert nothing_is_left_of(cluster_id)
    assert set(Path(tempfile.gettempdir()).iterdir()) <= temporary
    plain.shutdown()
    with pytest.raises(ClusterClosedError, match="the cluster 'plain' was shut down; start one with %dist_init"):
        plain.run("1")


def test_resources_of_multiprocessing_and_mpi_are_removed_although_all_was_killed(plain: Cluster) -> None:
    temporary = set(Path(tempfile.gettempdir()).iterdir())
    plain.run(SHARED)
    for process in processes_of_cluster(plain.cluster_id):
        process.kill()
    plain.shutdown()
    assert set(Path(tempfile.gettempdir()).iterdir()) <= temporary


def test_only_the_store_listens_beyond_loopback(cluster: Cluster) -> None:
    cluster.run("dist.barrier()")
    ports = set()
    for process in processes_of_cluster(cluster.cluster_id):
        if "prterun" in process.cmdline()[0]:
            continue  # its own channel, which Open MPI 5 refuses to bind to loopback
        for connection in process.net_connections():
            if connection.status == psutil.CONN_LISTEN:
                is_local = connection.laddr.ip in ("127.0.0.1", "::1")
                assert is_local or not is_reachable_beyond_loopback(connection.laddr.port), process.cmdline()
                ports.add(connection.laddr.port)
    assert int(cluster.run("import os; os.environ['MASTER_PORT']").results[0]) in ports
    assert cluster._session.launch.folders.local.stat().st_mode & 0o777 == 0o700


def is_reachable_beyond_loopback(port: int) -> bool:
    """Return whether a port can be reached from another address than loopback's; every one of this host is tried."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                try:
                    socket.create_connection((each.address, port), timeout=0.3).close()
                except OSError:
                    continue
                return True
    return False


@pytest.mark.parametrize("plain", ["mpi"], indirect=True)
def test_ranks_that_outlive_mpiexec_end_at_shutdown(plain: Cluster) -> None:
    plain.run("import atexit, time; atexit.register(time.sleep, 1)")
    nannies = [entry.nanny_pid for entry in plain.table]
    processes = plain._session.launch.state.processes
    assert processes is not None
    (mpiexec,) = processes.births["launcher"]
    os.kill(int(mpiexec), signal.SIGKILL)
    assert wait_until(lambda: "mpiexec" in processes.mpiexec_end())
    assert plain.run("rank").results == {0: 0, 1: 1}
    assert plain.shutdown() == []
    assert not any(map(runs, nannies))


def test_more_ranks_than_cores() -> None:
    n = len(psutil.Process().cpu_affinity()) + 3
    with Cluster(n=n, backend="none", name="many") as cluster:
        assert cluster.run("comm.allreduce(rank)").results == dict.fromkeys(range(n), n * (n - 1) // 2)


ORPHANS = (
    "import subprocess\n"
    "children = [subprocess.Popen(['sleep', '1000'], start_new_session=new) for new in (False, True)]\n"
    "grandchild = subprocess.check_output(['sh', '-c', 'sleep 1000 >/dev/null 2>&1 & echo $!'])\n"
    "[*(child.pid for child in children), int(grandchild)]"
)


@pytest.mark.parametrize("plain", ["local"], indirect=True)
def test_child_processes_end_with_their_rank(plain: Cluster) -> None:
    started = plain.run(ORPHANS).results
    send_signal(plain, 0, signal.SIGKILL)
    assert wait_until(lambda: plain.table[0].state == "dead")
    assert wait_until(lambda: are_gone(started[0]))
    assert not are_gone(started[1][:1])
    plain.shutdown()
    assert wait_until(lambda: are_gone(started[1]))


def test_death_of_the_controller_ends_the_cell_with_advice(plain: Cluster) -> None:
    run = plain.run("import time; time.sleep(1000)", block=False)
    for process in controllers_of(plain.cluster_id):
        with suppress(psutil.NoSuchProcess):  # it ends with the one before
            process.kill()
    text = (
        rf"the controller of cluster 'plain' on {HOST} was killed by SIGKILL: kill -9, or .*out-of-memory killer; "
        "no rank can be reached without it, so all ranks end; %dist_reset starts them again$"
    )
    with pytest.raises(ClusterClosedError, match=text):
        run.wait()
    for later in (lambda: plain.run("1"), lambda: plain.push({"one": 1}), lambda: plain.replace([0])):
        with pytest.raises(ClusterClosedError, match=text):
            later()
    assert re.search(text.rstrip("$"), status_text(plain))
    plain.reset()
    assert plain.run("rank").results == {0: 0, 1: 1}


def test_several_clusters_side_by_side(bare_notebook: Notebook) -> None:
    first = start(bare_notebook, f"-n 2 {FAST} --launcher local")
    second = start(bare_notebook, f"-n 1 {FAST} --launcher local --name other")
    assert bare_notebook.run("%%distributed --name other\nprint(world_size)").check().text == "1"
    assert bare_notebook.run("%%distributed --name default\nprint(world_size)").check().lines == ["ranks 0-1 │ 2"]
    assert bare_notebook.run("%dist_shutdown --name other").check().text == "other: rank 0 ended"
    assert nothing_is_left_of(second)
    assert bare_notebook.run("%%distributed\nprint('here')").check().lines == ["ranks 0-1 │ here"]
    assert bare_notebook.run("%dist_shutdown").check().text == "ranks 0-1 ended"
    assert nothing_is_left_of(first)


def test_persistent_ranks_outlive_the_kernel() -> None:
    with Notebook() as notebook:
        cluster_id = start(notebook, f"-n 2 {FAST} --keep")
        pids = notebook.run("%%distributed -o pids\nimport os; os.getpid()").check()
        pids = notebook.run("print(*pids.values())").text.split()
        notebook._manager.shutdown_kernel(now=False)
    left = processes_of_cluster(cluster_id)
    assert {int(pid) for pid in pids} <= {process.pid for process in left}
    for process in controllers_of(cluster_id):
        with suppress(psutil.NoSuchProcess):  # it ends with the one before
            process.terminate()
    assert wait_until(lambda: nothing_is_left_of(cluster_id)), processes_of_cluster(cluster_id)


def test_kernel_keeps_no_thread_and_no_file_of_ended_clusters(bare_notebook: Notebook) -> None:
    def held() -> tuple[int, int]:
        bare_notebook.run("import os, threading").check()
        output = bare_notebook.run("print(threading.active_count(), len(os.listdir('/proc/self/fd')))").text
        threads, files = map(int, output.split())
        return threads, files

    start(bare_notebook)
    bare_notebook.run("%dist_shutdown").check()  # the first time imports what is needed
    threads, files = held()
    for _ in range(2):
        start(bare_notebook)
        bare_notebook.run("%dist_shutdown").check()
    assert held()[0] == threads
    assert held()[1] <= files + 1  # ipykernel's own come and go


def test_unloading_the_extension_ends_everything(bare_notebook: Notebook) -> None:
    cluster_id = start(bare_notebook, f"-n 2 {FAST} --launcher local")
    bare_notebook.run("%unload_ext jupyter_disttrain").check()
    assert nothing_is_left_of(cluster_id)
    assert "UsageError: Line magic function `%dist_init` not found." in bare_notebook.run("%dist_init").text
    bare_notebook.run("%load_ext jupyter_disttrain").check()
    start(bare_notebook, f"-n 1 {FAST} --launcher local")


def test_leftovers_of_a_killed_cluster_are_removed_by_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(cluster_id: str, age_s: float) -> Path:
        folder = Path("/dev/shm") / f"disttrain-{cluster_id}"
        folder.mkdir(mode=0o700)
        (folder / "large value").write_bytes(b"x")
        written = time.time() - age_s
        os.utime(folder, (written, written))
        return folder

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stale = make(f"stale-{ended.pid}-abcdef", age_s=3600)
    young = make(f"young-{ended.pid}-abcdef", age_s=-3600)
    reused = make(f"reused-{os.getpid()}-abcdef", age_s=10**6)  # of a process that had the pid of this one
    ours = make(f"ours-{os.getpid()}-abcdef", age_s=1)
    monkeypatch.setattr(folders, "FOLDERS_STALE_SECONDS", 0.0)
    persistent = make(f"kept-{ended.pid}-abcdef", age_s=3600)
    try:
        with socket.socket(socket.AF_UNIX) as controller:
            controller.bind(str(persistent / "s-1"))
            controller.listen()
            os.utime(persistent, (0, 0))
            Cluster(n=1, launcher="local", backend="none", name="next").shutdown()
            left = [folder.exists() for folder in (stale, young, reused, ours, persistent)]
            assert left == [False, True, False, True, True]
    finally:
        for folder in (stale, young, reused, ours, persistent):
            shutil.rmtree(folder, ignore_errors=True)


def test_clusters_of_another_user_on_this_host_are_ignored(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("needs root, to be another user")
    theirs = Path("/dev/shm/disttrain-theirs-1-abcdef")
    link = Path("/dev/shm/disttrain-link")
    theirs.mkdir(mode=0o700)
    link.symlink_to("/root")
    try:
        os.chown(theirs, 65533, -1)  # else clusters that other tests start meanwhile would remove it
        os.utime(theirs, (0, 0))
        code = (
            "import os, pathlib, sys; from jupyter_disttrain.launchers.folders import _sweep; os.setuid(65534); "
            "_sweep(pathlib.Path(sys.argv[1]))"
        )
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
        assert theirs.is_dir()
        assert link.is_symlink()
    finally:
        theirs.rmdir()
        link.unlink()


def test_files_of_a_cluster_of_another_host_are_kept() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    cluster_id = f"elsewhere-{ended.pid}-abcdef"
    local = Path("/dev/shm") / f"disttrain-{cluster_id}"
    profile = Path(jupyter_runtime_dir()) / "disttrain" / cluster_id  # on a file system that the hosts share
    ours = None
    try:
        profile.mkdir(parents=True)
        local.mkdir(mode=0o700)
        (local / NANNIES).touch()
        os.utime(local, (0, 0))
        with (local / NANNIES).open() as nanny:
            fcntl.flock(nanny, fcntl.LOCK_SH)
            ours = Folders.make("here")
            assert local.exists()
            assert profile.exists()
    finally:
        for folder in (local, profile):
            shutil.rmtree(folder, ignore_errors=True)
        if ours is not None:
            ours.remove()


def test_notebook_folder_may_contain_modules_of_any_name(bare_notebook: Notebook, tmp_path: Path) -> None:
    for name in ("comm", "queue", "traitlets", "zmq"):
        (tmp_path / f"{name}.py").write_text("raise SystemError('imported by what should not')")
    bare_notebook.run(f"import os; os.chdir({str(tmp_path)!r})").check()
    bare_notebook.run("%dist_init -n 2 --launcher local --backend none").check()
    assert bare_notebook.run("%%distributed\nprint(rank)").check().lines == ["rank 0 │ 0", "rank 1 │ 1"]
    bare_notebook.run("%dist_shutdown").check()


LEFT = "import os\nopen(os.environ['DISTTRAIN_LOCAL_DIR'] + '/left', 'w').close()"


def test_comm_is_restored_after_a_death_that_follows_a_reset() -> None:
    with Cluster(n=2, launcher="mpi", name="again") as cluster:
        cluster.reset()
        pid = cluster.table[1].info.pid
        psutil.Process(pid).kill()
        assert wait_until(lambda: cluster.table[1].info.pid != pid)
        run = cluster.run("comm.allreduce(rank + 1)")
        assert run.results == {0: 3, 1: 3}
        assert not any("comm is lost" in note for note in run.notes)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_reset_starts_another_controller_if_the_old_one_does_not_respond(launcher: str) -> None:
    with Cluster(n=2, launcher=launcher, name="hung") as cluster:
        stopped = controllers_of(cluster.cluster_id)
        for process in stopped:
            process.suspend()
        cluster.reset()
        assert cluster.run(SUM).results == {0: [3.0], 1: [3.0]}
        assert wait_until(lambda: not any(process.is_running() for process in stopped))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_reset_right_after_a_death(launcher: str) -> None:
    with Cluster(n=2, launcher=launcher, name="dying") as cluster:
        for rank in (0, 1, 0, 1):
            psutil.Process(cluster.table[rank].info.pid).kill()
            cluster.reset()
            assert cluster.run(SUM).results == {0: [3.0], 1: [3.0]}


def test_resets_leave_nothing_behind() -> None:
    with Cluster(n=2, launcher="local", name="often") as cluster:
        cluster.reset()
        controllers, this_process = controllers_of(cluster.cluster_id), psutil.Process()
        local = cluster._session.launch.folders.local
        before = threading.active_count(), this_process.num_fds(), {path.name for path in local.iterdir()}
        for _ in range(10):
            cluster.run(LEFT, 0)
            cluster.reset()
        after = threading.active_count(), this_process.num_fds(), {path.name for path in local.iterdir()}
        assert after == before
        assert controllers_of(cluster.cluster_id) == controllers
        assert cluster.run("import os; os.environ['DISTTRAIN_CLIENT']", 0).results == {0: cluster.cluster_id}
        runs = Path(cluster._session.launch.folders.run).parent
        assert (
            len(list(runs.glob(f"*{cluster.cluster_id.partition('.')[0]}*"))) <= 1
        )  # empty folders of logs are removed
