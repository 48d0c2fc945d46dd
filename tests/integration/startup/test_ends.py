"""Exit of the process that started a cluster, at any moment, and interrupted starts: nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import StartInterruptedError
from jupyter_disttrain.protocol.environment import LOCAL_DIR, PROFILE_DIR
from jupyter_disttrain.protocol.shared_memory import NANNIES

from ...support.notebook_driver import Notebook
from ...support.process_tools import (
    FAST,
    folders,
    interrupt_start,
    nothing_is_left_of,
    processes_of_cluster,
    shelves,
    start,
    wait_until,
)


@pytest.mark.parametrize(
    ("how", "launcher"), [("exit", "local"), ("restart now", "mpi"), ("SIGTERM", "local"), ("SIGKILL", "mpi")]
)
def test_everything_ends_with_the_kernel(how: str, launcher: str) -> None:
    with Notebook() as notebook:
        cluster_id = start(notebook, f"-n 2 {FAST} --launcher {launcher}")
        notebook.run("%%distributed --noblock\nimport time; time.sleep(1000)").check()
        if how == "exit":
            notebook._manager.shutdown_kernel(now=False)
        elif how == "restart now":
            notebook._manager.shutdown_kernel(now=True)  # SIGKILL to the kernel's process group
        else:
            os.kill(notebook.pid, getattr(signal, how))
        assert wait_until(lambda: nothing_is_left_of(cluster_id))


@pytest.mark.parametrize("after", ["folder", "controller", "ranks"])
def test_kernel_is_killed_while_ranks_start(after: str) -> None:
    with Notebook() as notebook:
        before = folders()
        notebook.client.execute("%dist_init -n 2")
        assert wait_until(lambda: bool(folders() - before))
        (cluster_id,) = folders() - before
        count = {"folder": 1, "controller": 2, "ranks": 4}[after]
        assert wait_until(lambda: len(processes_of_cluster(cluster_id)) >= count)
        os.kill(notebook.pid, signal.SIGKILL)
        assert wait_until(lambda: nothing_is_left_of(cluster_id)), processes_of_cluster(cluster_id)


def test_interrupt_between_placement_and_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before, shelves_before = folders(), shelves()
    interrupt_start(monkeypatch)
    with pytest.raises(StartInterruptedError, match="all processes that it had started have ended"):
        Cluster(n=2, launcher="local", backend="none", name="interrupted")
    assert (folders(), shelves()) == (before, shelves_before)


# Stays with a host's nannies, which are killed, and prints which pids it still knows when one is free for reuse, and
# whether the nannies' folder is there.
STAY = """
import fcntl, os, signal
from pathlib import Path
from jupyter_disttrain.rank import __main__ as main
from jupyter_disttrain.rank.cold_nannies import OwnNannies
folder, reap = Path(os.environ[main.LOCAL_DIR]), os.waitpid
def end(lifeline):
    lock = (folder / main.NANNIES).open()
    fcntl.flock(lock, fcntl.LOCK_SH)
    os.kill(os.getpid(), signal.SIGKILL)
def waitpid(pid, options):
    print(pid in nannies.pids, len(nannies.pids), folder.exists(), flush=True)
    return reap(pid, options)
other = os.fork()  # of a login shell that became this process
if other == 0:
    end(None)
os.waitid(os.P_PID, other, os.WEXITED | os.WNOWAIT)
nannies = OwnNannies(2, end)
os.waitpid = waitpid
main._stay_with(nannies)
"""


def test_killed_nanny_is_forgotten_before_its_pid_can_be_reused_and_the_last_ones_folder_is_removed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "disttrain-test"
    folder.mkdir()
    (folder / NANNIES).touch()
    environment = os.environ | {LOCAL_DIR: str(folder), PROFILE_DIR: str(tmp_path)}
    stay = [sys.executable, "-c", STAY]
    done = subprocess.run(stay, capture_output=True, text=True, check=True, timeout=60, env=environment)
    lines = done.stdout.split("\n")[:-1]
    assert [line for line in lines if line.startswith("True")] == []
    assert lines[-1] == "False 0 True"
    assert not folder.exists()
    (trouble,) = tmp_path.glob("trouble-*.txt")
    assert re.match(r"a rank's parent process \(process \d+\) on .* was killed by SIGKILL", trouble.read_text())


def test_processes_of_another_user_do_not_prevent_ending_the_others() -> None:
    code = "import os, psutil, subprocess\nfrom jupyter_disttrain.rank_sessions import kill\n"
    code += "if os.geteuid() == 0: os.setuid(65534)\n"
    code += (
        "own = subprocess.Popen(['sleep', '1000'])\n"
        "kill(lambda: [psutil.Process(1), psutil.Process(own.pid)])\nown.wait(10)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_folder_with_a_colon_in_its_name_is_removed_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "results").touch()
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "exp:1" / "rt"))
    with Cluster(n=1, launcher="local", backend="none") as cluster:
        controller = cluster._session.launch.state.processes._cluster.controller  # type: ignore[union-attr]
        profile = cluster._session.launch.folders.profile
        os.kill(controller.process.pid, signal.SIGTERM)  # so that only the cleanup removes them
        assert wait_until(lambda: not profile.exists())
    assert (tmp_path / "exp" / "results").exists()
