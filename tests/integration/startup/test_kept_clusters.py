"""Clusters without a notebook: from a shell, and their idle timeout."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import ClusterClosedError

from ...support.process_tools import wait_until
from ...support.shell_tools import command

if TYPE_CHECKING:
    from pathlib import Path

    from ...support.notebook_driver import Notebook


def test_shell_lists_and_ends_clusters(light: Cluster) -> None:
    light.run("import time\nwhile True: time.sleep(0.01)", 1, block=False)
    light.detach()
    listed = command("list")
    assert listed.returncode == 0, listed.stderr
    assert "%dist_attach light attaches to it" in listed.stdout
    (row,) = (row for row in json.loads(command("list", "--json").stdout) if row["name"] == "light")
    assert row["held_by"] is None
    assert row["doing"].startswith("rank 0: idle; rank 1: cell ")
    ranks = [psutil.Process(entry.info.pid) for entry in light.table]
    stopped = command("stop", "light")
    assert stopped.returncode == 0, stopped.stderr
    _, left = psutil.wait_procs(ranks, timeout=60)
    assert not left
    assert "light" not in command("list").stdout
    assert command("stop", "light").returncode == 1


def test_shell_reports_that_there_is_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    assert "you have no running cluster" in command("list").stdout


def test_owner_of_a_cluster_ended_by_a_shell_is_notified_and_restarts_nothing(light: Cluster) -> None:
    pids = [entry.info.pid for entry in light.table]
    assert command("stop", "light").returncode == 0
    assert wait_until(lambda: light.closed)
    with pytest.raises(ClusterClosedError, match="was ended by jupyter disttrain stop"):
        light.run("1")
    assert [entry.info.pid for entry in light.table] == pids


# Idle timeout


def test_use_postpones_the_idle_timeout_after_which_a_cluster_ends() -> None:
    cluster = Cluster(n=1, launcher="local", backend="none", idle_timeout_s=2.0, name="late")
    for _ in range(2):
        assert wait_until(lambda: cluster.idle_s > 1.2)
        cluster.run("1")
    cluster.run("import time; time.sleep(2.5)")  # a running cell is use, however long it takes
    assert not cluster.closed
    assert wait_until(lambda: cluster.closed)
    with pytest.raises(ClusterClosedError, match="was ended, because it had not been used for 2 s"):
        cluster.run("1")
    assert wait_until(lambda: not cluster._session.launch.folders.profile.exists())


def test_persistent_cluster_without_a_client_ends_after_its_timeout() -> None:
    cluster = Cluster(n=1, launcher="local", backend="none", keep=True, idle_timeout_s=1.0, name="forgotten")
    rank = psutil.Process(cluster.table[0].info.pid)
    cluster.detach()
    psutil.wait_procs([rank], timeout=60)
    assert not rank.is_running()
    assert wait_until(lambda: not cluster._session.launch.folders.profile.exists())


def test_status_warns_before_the_timeout(bare_notebook: Notebook) -> None:
    bare_notebook.run("%dist_init -n 1 --launcher local --backend none --idle-timeout 3").check()
    assert wait_until(lambda: "it ends in" in bare_notebook.run("%dist_status").text)
    bare_notebook.run("%%distributed\n1").check()
    assert "it ends in" not in bare_notebook.run("%dist_status").text
    assert wait_until(lambda: "it had not been used" in bare_notebook.run("%dist_status --name default").error)
    bare_notebook.run("%dist_init -n 1 --launcher local --backend none").check()
