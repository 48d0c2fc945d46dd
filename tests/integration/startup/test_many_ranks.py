"""Many ranks on one machine, and the process that forks them.

Covers: 64 ranks from start to end through a notebook, ranks whose forking process was killed, imports on a rank.
Does not cover: their cost (``benchmarks.overhead.control_plane``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import RankFailure

from ...support.process_tools import nothing_is_left_of, processes_of_cluster, start, wait_until

if TYPE_CHECKING:
    from ...support.notebook_driver import Notebook

RANKS = 64


def forking_process_of(cluster: Cluster) -> psutil.Process:
    """Return the process that forked all ranks."""
    (pid,) = {psutil.Process(entry.nanny_pid).ppid() for entry in cluster.table}
    return psutil.Process(pid)


def test_64_ranks_from_start_to_end(bare_notebook: Notebook) -> None:
    cluster_id = start(bare_notebook, f"-n {RANKS} --launcher local --backend none")
    outcome = bare_notebook.run("%%distributed -o found\nprint('mine', rank)\nprint('alike')\nrank").check()
    own = [line for line in outcome.lines if "mine" in line]
    assert [line.split("│")[0].strip() for line in own] == [f"rank {rank}" for rank in range(RANKS)]
    assert [line.split("│")[1].strip() for line in own] == [f"mine {rank}" for rank in range(RANKS)]
    assert f"ranks 0-{RANKS - 1} │ alike" in outcome.lines
    assert bare_notebook.run(f"print(found == {{rank: rank for rank in range({RANKS})}})").text.strip() == "True"
    rows = [line.split() for line in bare_notebook.run("%dist_status --text").check().lines]
    assert [row[:2] for row in rows if row and row[0].isdigit()] == [[str(rank), "idle"] for rank in range(RANKS)]
    assert bare_notebook.run("%dist_shutdown").check().text == f"ranks 0-{RANKS - 1} ended"
    assert nothing_is_left_of(cluster_id)


def test_ranks_outlive_the_process_that_forked_them_and_end_with_their_cluster() -> None:
    with Cluster(n=3, launcher="local", backend="none", name="forked") as cluster:
        cluster_id = cluster._session.launch.folders.cluster_id
        forking_process_of(cluster).kill()
        cluster.run("kept = rank * 11")
        with pytest.raises(RankFailure, match="killed"):
            cluster.run("import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
        assert cluster.run("globals().get('kept')").results == {0: 0, 1: None, 2: 22}
    assert wait_until(lambda: nothing_is_left_of(cluster_id)), processes_of_cluster(cluster_id)


def test_first_error_imports_nothing_on_a_rank() -> None:
    with Cluster(n=2, launcher="local", backend="none", name="prepared") as cluster:
        cluster.run("import sys; before = set(sys.modules)")
        with pytest.raises(RankFailure, match="ZeroDivisionError"):
            cluster.run("1 / 0")
        assert cluster.run("sorted(set(sys.modules) - before)").results == {0: [], 1: []}
