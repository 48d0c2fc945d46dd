"""Starts with Slurm, from the request for nodes until ranks are up, and whatever can end them.

Covers: the queue, interrupts, a notebook that is killed, requests that Slurm refuses, unusable nodes.
Does not cover: ranks that run in a job (``test_slurm``).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.config.slurm import SlurmOptions
from jupyter_disttrain.errors import LaunchError, StartInterruptedError

from ...support.process_tools import folders, interrupt_start, wait_until

if TYPE_CHECKING:
    from ...lab import Lab
    from ...lab.slurm import Slurm

WAITS = """
from jupyter_disttrain import Cluster
from jupyter_disttrain.config.slurm import SlurmOptions
Cluster(launcher="slurm", slurm=SlurmOptions(nodes=2), report=lambda text: print(text, flush=True))
"""


def test_interrupt_in_the_queue_cancels_the_job(batch: Slurm) -> None:
    batch.submit("-N3", "--exclusive")
    batch.submit("-N3", "--exclusive")
    messages: list[str] = []

    def report(message: str) -> None:
        messages.append(message)
        if "position 2" in message:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(StartInterruptedError, match="all processes that it had started have ended"):
        Cluster(launcher="slurm", slurm=SlurmOptions(nodes=2), report=report)
    assert "is pending: position 2 in partition all" in messages[-1]
    number = messages[-1].split()[1]
    assert "JobState=CANCELLED" in batch.run("scontrol", "show", "job", "-o", number)


def test_interrupt_after_the_allocation_cancels_the_job_and_leaves_no_file(
    batch: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, messages = folders(), list[str]()
    interrupt_start(monkeypatch)
    with pytest.raises(StartInterruptedError, match="all processes that it had started have ended"):
        Cluster(launcher="slurm", slurm=SlurmOptions(nodes=2), report=messages.append)
    number = messages[-1].split()[1]
    assert "JobState=CANCELLED" in batch.run("scontrol", "show", "job", "-o", number)
    assert folders() == there


@pytest.mark.usefixtures("batch")
def test_request_refused_by_slurm_is_reported_with_its_message() -> None:
    with pytest.raises(LaunchError, match=r"Slurm rejected the job: .*[Ii]nvalid partition"):
        Cluster(launcher="slurm", slurm=SlurmOptions(partition="nowhere"))


def test_notebook_killed_while_its_job_waits_leaves_no_job_and_no_file(batch: Slurm) -> None:
    there = folders()
    for _ in range(2):
        batch.submit("-N3", "--exclusive")
    notebook = subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True)
    assert notebook.stdout is not None
    output = next(line for line in notebook.stdout if "is pending" in line)
    number = output.split()[1]
    notebook.kill()
    notebook.communicate()
    assert wait_until(lambda: "JobState=CANCELLED" in batch.run("scontrol", "show", "job", "-o", number))
    assert wait_until(lambda: folders() == there)


def test_unusable_node_is_named_and_the_job_is_ended(batch: Slurm, lab: Lab) -> None:
    there, messages = folders(), list[str]()
    runtime = os.environ["JUPYTER_RUNTIME_DIR"]
    lab.run("node2", f"mount -t tmpfs nothing {runtime}")  # as if it were not part of a shared file system
    try:
        with pytest.raises(LaunchError, match=rf"node2: .*{runtime}") as caught:
            Cluster(launcher="slurm", slurm=SlurmOptions(nodes=2), report=messages.append)
    finally:
        lab.run("node2", f"umount {runtime}")
    assert "node1: " not in str(caught.value)
    assert "--exclude=HOST requests other nodes from Slurm" in str(caught.value)
    number = messages[-1].split()[1]
    assert "JobState=RUNNING" not in batch.run("scontrol", "show", "job", "-o", number)
    assert folders() == there
