"""Slurm: what other versions and sites of it say, what is set around the notebook, answers that are late or odd.

Covers: text that the lab's Slurm does not print, variables that it does not set, commands that fail in rare ways.
Does not cover: jobs that go well or are ended (``test_slurm``), the queue (``test_slurm_start``).
"""

from __future__ import annotations

import dataclasses

import pytest

from jupyter_disttrain.cluster.slurm import grant as grants
from jupyter_disttrain.cluster.slurm.allocation import Allocation
from jupyter_disttrain.cluster.slurm.state import from_scontrol
from jupyter_disttrain.slurm_options import SlurmOptions

RUNNING = (
    "JobId=7 JobName=disttrain-x Reason=None JobState=RUNNING ExitCode=0:0 TimeLimit=01:00:00 StartTime=1000 "
    "EndTime=4600 Partition=gpu NodeList=node[1-2] NumNodes=2 NumCPUs=16 NumTasks=8 "
)

# GPUs


@pytest.mark.parametrize(
    ("said", "gpus"),
    [
        ("TRES=cpu=16,node=2,billing=16,gres/gpu=8", 8),
        ("ReqTRES=cpu=8,node=2,gres/gpu=4 AllocTRES=cpu=16,node=2,gres/gpu=8", 8),
        ("ReqTRES=cpu=16,gres/gpu=8 AllocTRES=(null)", 8),
        ("AllocTRES=cpu=16,gres/gpu=8,gres/gpu:a100=8", 8),
        ("AllocTRES=cpu=16,gres/gpu:a100=6,gres/gpu:v100=2", 8),
        ("AllocTRES=cpu=16,node=2 TresPerNode=gres/gpu:a100:4", 8),
        ("TRES=cpu=16,node=2 TresPerNode=gres:gpu:4", 8),
        ("TRES=cpu=16,node=2 TresPerNode=gpu:4", 8),
        ("TRES=cpu=16,node=2 TresPerJob=gres:gpu:8", 8),
        ("AllocTRES=cpu=16,gres/gpumem=80", 0),
    ],
)
def test_a_jobs_gpus_are_read_as_every_version_and_site_says_them(said: str, gpus: int) -> None:
    assert from_scontrol(RUNNING + said).gpus == gpus


def test_gpus_that_a_site_does_not_count_are_those_asked_for() -> None:
    state = dataclasses.replace(from_scontrol(RUNNING), nodes=("node1", "node2"))
    told: list[str] = []
    assert grants._gpus_of_each(state, SlurmOptions(nodes=2, gpus_per_node="a100:4"), told.append) == 4
    assert not told
    assert grants._gpus_of_each(state, SlurmOptions(nodes=2, more=("--gres=gpu:4",)), told.append) == 0
    assert "--gres=gpu:4 asks for GPUs, but Slurm tells of none, so the ranks use CPUs" in told[0]
    assert grants._gpus_of_each(state, SlurmOptions(nodes=2, partition="gpu"), told.append) == 0
    assert len(told) == 1
    assert Allocation.of(state, {"SLURM_GPUS_ON_NODE": "4"}).gpus_per_node == 4
