"""Slurm, rare cases with real ranks: nested allocations, a silent controller, user defaults.

Does not cover: jobs that succeed or are cancelled (``test_slurm``), the queue (``test_slurm_start``).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.config.slurm import SlurmOptions
from jupyter_disttrain.errors import UsageError
from jupyter_disttrain.launchers.slurm.job_state import from_scontrol

from ...support.process_tools import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...lab.slurm import Slurm


def test_new_job_starts_from_within_any_allocation(batch: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    job = batch.allocate("-N1")
    # As salloc sets them for a job of one node with more than a node of the lab has.
    around = {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "node1", "SLURM_NNODES": "1", "SLURM_MEM_PER_NODE": "64000"}
    for name, value in {**around, "SLURM_GPUS": "8", "SLURM_CLUSTERS": "other"}.items():
        monkeypatch.setenv(name, value)
    options = SlurmOptions(nodes=2, ntasks_per_node=1, start="srun", new_job=True)
    with Cluster(launcher="slurm", slurm=options, backend="none", report=lambda _words: None) as cluster:
        job_ids = cluster.run("import os; os.environ['SLURM_JOB_ID']").results
        assert job not in job_ids.values()
        with pytest.raises(Exception, match="RankDied"):
            cluster.run("os.kill(os.getpid(), 9)", ranks=1)
        assert cluster.run("import os; os.environ['SLURM_JOB_ID']").results == job_ids
    monkeypatch.delenv("SLURM_CLUSTERS")  # with which the lab's own commands would not find it


def test_ranks_start_in_an_allocation_with_more_gpus_than_a_node_has(
    batch: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = batch.allocate("-N2", "--ntasks-per-node=1")
    around = {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_GPUS": "8", "SLURM_HOSTFILE": "/nowhere"}
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    with Cluster(launcher="slurm", backend="none") as cluster:
        assert cluster.run("import os; os.environ['SLURM_JOB_ID']").results == {0: job, 1: job}


@contextlib.contextmanager
def silent(slurm: Slurm) -> Iterator[None]:
    """Suspend Slurm's controller meanwhile: requests to it block."""
    controllers = [
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] == "slurmctld" and str(slurm.conf) in process.info["cmdline"]
    ]
    assert controllers
    for process in controllers:
        process.suspend()
    try:
        yield
    finally:
        for process in controllers:
            process.resume()
        assert wait_until(lambda: not slurm.run("squeue", "-h", "--states=COMPLETING"))


def test_node_whose_only_rank_died_is_not_lost_while_slurm_is_silent(batch: Slurm) -> None:
    options = SlurmOptions(nodes=2, ntasks_per_node=1, start="srun")
    with Cluster(launcher="slurm", slurm=options, backend="none", report=lambda _words: None) as cluster:
        with silent(batch):
            run = cluster.run("import os; os.kill(os.getpid(), 9)", ranks=1, block=False)
            with pytest.raises(Exception, match="RankDied"):
                run.wait(120)
            assert any("Slurm does not respond, so no process can be started on node2" in note for note in run.notes)
            with pytest.raises(UsageError, match=r"rank 1 died; %dist_reset -r 1 tries again"):
                cluster.run("1")
        cluster.replace([1])
        assert cluster.run("rank").results == {0: 0, 1: 1}


def test_given_options_override_user_defaults_and_others_are_kept(
    batch: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = {"TIMELIMIT": "7", "PARTITION": "urgent", "MEM_PER_NODE": "10", "OUTPUT": "/nowhere", "JOB_NAME": "mine"}
    for name, value in defaults.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    options = SlurmOptions(partition="all", more=("--mem=200", "--comment=a\\b 'c' #d"), start="srun")
    with Cluster(launcher="slurm", slurm=options, backend="none", report=lambda _words: None) as cluster:
        number = cluster.job.split()[1]
        text = batch.run("scontrol", "show", "job", "-o", number)
        for option in (
            "Partition=all",
            "TimeLimit=00:07:00",
            "MinMemoryNode=200M",
            "Comment=a\\b 'c' #d",
            "=disttrain-",
        ):
            assert option in text
        assert from_scontrol(text).log != "/nowhere"
