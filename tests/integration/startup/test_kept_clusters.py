"""Clusters that no notebook holds: from a shell, and how long they stay."""

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


def test_a_shell_lists_and_ends_clusters(light: Cluster) -> None:
    light.run("import time\nwhile True: time.sleep(0.01)", 1, block=False)
    light.detach()
    listed = command("list")
    assert listed.returncode == 0, listed.stderr
    assert "%dist_attach light brings it back" in listed.stdout
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


def test_a_shell_is_told_when_there_is_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    assert "no cluster of yours runs" in command("list").stdout


def test_who_holds_a_cluster_that_a_shell_ends_is_told_and_starts_nothing_anew(light: Cluster) -> None:
    pids = [entry.info.pid for entry in light.table]
    assert command("stop", "light").returncode == 0
    assert wait_until(lambda: light.closed)
    with pytest.raises(ClusterClosedError, match="was ended by jupyter disttrain stop"):
        light.run("1")
    assert [entry.info.pid for entry in light.table] == pids


# Nobody uses it


def test_use_before_the_end_puts_it_off() -> None:
    with Cluster(n=1, launcher="local", backend="none", idle_timeout_s=2.0, name="late") as cluster:
        for _ in range(3):
            assert wait_until(lambda: cluster.idle_s > 1.2)
            cluster.run("1")
        assert not cluster.closed


def test_a_cluster_that_nobody_uses_ends_after_its_time() -> None:
    cluster = Cluster(n=1, launcher="local", backend="none", idle_timeout_s=1.0, name="unused")
    cluster.run("import time; time.sleep(2.5)")  # which is use, however long it takes
    assert wait_until(lambda: cluster.closed)
    with pytest.raises(ClusterClosedError, match="was ended, because nobody had used it for 1 s"):
        cluster.run("1")
    assert wait_until(lambda: not cluster._session.launch.folders.profile.exists())


def test_a_kept_cluster_that_nobody_came_back_to_ends_after_its_time() -> None:
    cluster = Cluster(n=1, launcher="local", backend="none", keep=True, idle_timeout_s=1.0, name="forgotten")
    rank = psutil.Process(cluster.table[0].info.pid)
    cluster.detach()
    psutil.wait_procs([rank], timeout=60)
    assert not rank.is_running()
    assert wait_until(lambda: not cluster._session.launch.folders.profile.exists())


def test_the_status_warns_before_the_end(bare_notebook: Notebook) -> None:
    bare_notebook.run("%dist_init -n 1 --launcher local --backend none --idle-timeout 3").check()
    assert wait_until(lambda: "it ends in" in bare_notebook.run("%dist_status").text)
    bare_notebook.run("%%distributed\n1").check()
    assert "it ends in" not in bare_notebook.run("%dist_status").text
    assert wait_until(lambda: "nobody had used it" in bare_notebook.run("%dist_status --name default").error)
    bare_notebook.run("%dist_init -n 1 --launcher local --backend none").check()
