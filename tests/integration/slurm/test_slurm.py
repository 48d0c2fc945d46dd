"""Ranks in jobs of a real Slurm: training, deaths, allocations; not the start of a job (``test_slurm_start``)."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.config.slurm import SlurmOptions
from jupyter_disttrain.errors import ClusterClosedError, UsageError
from jupyter_disttrain.launchers.slurm.job import SlurmJob
from jupyter_disttrain.launchers.slurm.job_state import from_scontrol

from ...support.process_tools import own_children, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...lab import Lab
    from ...lab.slurm import Slurm
    from ...support.notebook_driver import Notebook

TRAINING = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    x = torch.randn(8, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
(round(model.module.weight.sum().item(), 5), comm.allreduce(rank), os.environ["SLURM_JOB_ID"], node_rank)
"""


def test_notebook_trains_on_two_nodes_and_the_job_ends_with_the_cluster(batch: Slurm, bare_notebook: Notebook) -> None:
    notebook = bare_notebook
    notebook.run(f"import os; os.environ.update({batch.environment!r})").check()
    outcome = notebook.run("%dist_init --launcher slurm -N 2 --ntasks-per-node 2 --time 30 --comment training").check()
    assert "ranks 0-3 ready" in outcome.text
    notebook.run(f"%%distributed -o values\nimport os\n{TRAINING}").check()
    values = eval(notebook.run("values").check().text)
    assert len({value[:3] for value in values.values()}) == 1
    assert [value[3] for value in values.values()] == [0, 0, 1, 1]
    job = values[0][2]
    assert f"job {job} runs on node1, node2, until" in notebook.run("%dist_status --text").check().text
    script = batch.run("scontrol", "write", "batch_script", job, "-")
    assert "disttrain" in script
    notebook.run("%dist_shutdown").check()
    assert "JobState=COMPLETED" in batch.run("scontrol", "show", "job", "-o", job)


def cancel_job(slurm: Slurm, job: str, how: str) -> None:
    if how == "cancelled":
        slurm.run("scancel", job)
    elif how == "preempted":
        slurm.submit("-N3", "--exclusive", "-p", "urgent")
    elif how == "requeued":
        slurm.run("scontrol", "update", f"JobId={job}", "Requeue=1")
        slurm.run("scontrol", "requeue", job)
    else:
        slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=0")


CANCELLATIONS = {
    "cancelled": "was cancelled by a user or the site",
    "preempted": "a job of higher priority took its nodes",
    "requeued": "was put back into the queue",
    "out of time": "it reached its time limit of 00:00:00",
}


@pytest.mark.parametrize("how", CANCELLATIONS)
def test_cancelled_job_ends_the_cell_with_one_message(batch: Slurm, how: str) -> None:
    options = SlurmOptions(nodes=2, ntasks_per_node=1, start="srun")
    with Cluster(launcher="slurm", slurm=options, backend="none", name="ends", report=lambda _words: None) as cluster:
        run = cluster.run("import time; time.sleep(300)", block=False)
        cancel_job(batch, cluster.job.split()[1], how)
        with pytest.raises(ClusterClosedError) as caught:
            run.wait(60)
        assert CANCELLATIONS[how] in str(caught.value)
        assert "(node1, node2)" in str(caught.value)
        folder = cluster._session.launch.folders.profile
    for thread in threading.enumerate():
        if thread.name == "disttrain end":
            thread.join()
    assert not folder.exists()


def secret_files_of(cluster: Cluster) -> list[str]:
    """The strings that give access to the controller, and may be in private files only."""
    content = json.loads(cluster._session.launch.folders.engine_file.read_text())
    assert cluster._session.launch.folders.engine_file.stat().st_mode & 0o077 == 0
    return [value for name, value in content.items() if "key" in name and value]


def readable_by_slurm(cluster: Cluster, slurm: Slurm, lab: Lab) -> Iterator[str]:
    allocated = cluster._session.launch.state.placement.allocated
    assert allocated is not None
    yield slurm.run("scontrol", "write", "batch_script", allocated.job_id, "-")
    yield Path(allocated.start_file).read_text()
    yield Path(allocated.log).read_text()
    for host in allocated.nodes:
        for process in lab.processes(host):
            yield f"{process.cmdline()} {process.environ()}"


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


def test_rank_that_dies_is_replaced_on_its_node_while_others_continue(batch: Slurm, lab: Lab) -> None:
    options = SlurmOptions(nodes=2, ntasks_per_node=1, start="srun")
    with Cluster(launcher="slurm", slurm=options, backend="none", report=lambda _words: None) as cluster:
        assert not own_children("cancel_on_exit"), "the job now ends with its ranks, also after a detach"
        before = cluster.run("import os, socket; kept = rank; (os.getpid(), socket.gethostname())").results
        with pytest.raises(Exception, match="RankDied"):
            cluster.run("os.kill(os.getpid(), 9)", ranks=1)
        after = cluster.run("import os, socket; (os.getpid(), socket.gethostname())").results
        assert after[0] == before[0]
        assert after[1][1] == "node2"
        assert after[1] != before[1]
        secrets = secret_files_of(cluster)
        assert secrets
        for text in readable_by_slurm(cluster, batch, lab):
            assert not [secret for secret in secrets if secret in text]
        with silent(batch):  # the node, whose only rank died, is not lost
            run = cluster.run("os.kill(os.getpid(), 9)", ranks=1, block=False)
            with pytest.raises(Exception, match="RankDied"):
                run.wait(120)
            assert any("Slurm does not respond, so no process can be started on node2" in note for note in run.notes)
            with pytest.raises(UsageError, match=r"rank 1 died; %dist_reset -r 1 tries again"):
                cluster.run("1")
        cluster.replace([1])
        assert cluster.run("rank").results == {0: 0, 1: 1}


def test_ranks_start_in_the_allocation_around_the_notebook(batch: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    job = batch.allocate("-N2", "--ntasks-per-node=2")
    nodes = batch.run("squeue", "-h", "-j", job, "-o", "%N").strip()
    # As salloc sets them for more GPUs than a node has.
    around = {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": nodes, "SLURM_PROCID": "0", "SLURM_GPUS": "8"}
    for name, value in {**around, "SLURM_HOSTFILE": "/nowhere"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="3 nodes with 2 ranks each"):
        Cluster(launcher="slurm", slurm=SlurmOptions(nodes=3))
    with Cluster(launcher="slurm", backend="none") as cluster:
        values = cluster.run("import os; (node_rank, comm.allreduce(rank), os.environ['SLURM_JOB_ID'])").results
        assert values == {rank: (rank // 2, 6, job) for rank in range(4)}
    assert SlurmJob(job).state().runs, "the allocation of the user is kept"


def test_new_job_starts_from_within_any_allocation_with_given_options_before_user_defaults(
    batch: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = batch.allocate("-N1")
    # As salloc sets them for a job of one node with more than a node of the lab has.
    around = {"JOB_ID": job, "JOB_NODELIST": "node1", "NNODES": "1", "MEM_PER_NODE": "64000", "GPUS": "8"}
    defaults = {"TIMELIMIT": "7", "PARTITION": "urgent", "MEM_PER_NODE": "10", "OUTPUT": "/nowhere", "JOB_NAME": "mine"}
    for name, value in {**around, "CLUSTERS": "other"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name, value in defaults.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    more = ("--mem=200", "--comment=a\\b 'c' #d")
    options = SlurmOptions(nodes=2, ntasks_per_node=1, partition="all", more=more, start="srun", new_job=True)
    with Cluster(launcher="slurm", slurm=options, backend="none", report=lambda _words: None) as cluster:
        number = cluster.job.split()[1]
        assert number != job
        with pytest.raises(Exception, match="RankDied"):
            cluster.run("import os; os.kill(os.getpid(), 9)", ranks=1)
        assert cluster.run("import os; os.environ['SLURM_JOB_ID']").results == {0: number, 1: number}
        monkeypatch.delenv("SLURM_CLUSTERS")  # with which the lab's own commands would not find it
        text = batch.run("scontrol", "show", "job", "-o", number)
    limits = ("Partition=all", "TimeLimit=00:07:00", "MinMemoryNode=200M")
    for option in (*limits, "Comment=a\\b 'c' #d", "=disttrain-"):
        assert option in text
    assert from_scontrol(text).log != "/nowhere"
