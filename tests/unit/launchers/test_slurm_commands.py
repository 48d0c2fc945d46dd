"""Slurm's commands and scripts, with shell scripts in the place of Slurm.

Covers: late and malformed replies, variables around the notebook, jobs whose notebook has ended.
Does not cover: parsing and notices (``test_slurm``).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import subprocess
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from jupyter_disttrain.client.startup import job_watch
from jupyter_disttrain.errors import LaunchError
from jupyter_disttrain.launchers.folders import Folders
from jupyter_disttrain.launchers.slurm import batch_script, cancel_on_exit, commands, job
from jupyter_disttrain.launchers.slurm.allocated_nodes import AllocatedNodes, Allocation, step_command
from jupyter_disttrain.launchers.slurm.job import SlurmJob
from jupyter_disttrain.launchers.slurm.job_state import JobState
from jupyter_disttrain.launchers.slurm.launcher import StepRanks, write_script

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Fake = Callable[[str, str], None]

RECORD = "JobId=7 JobState=RUNNING Partition=gpu NodeList=other[1-2] NumNodes=2"
OWN = AllocatedNodes(job_id="9", nodes=("node1",), per_node=1, start_file="/p/start.sh")
NEVER = "exec sleep 600"


@pytest.fixture
def fake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Return a function that puts a shell script in the place of one of Slurm's commands."""
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(commands, "COMMAND_SECONDS", 1.0)
    monkeypatch.setattr(job, "COMMANDS_STATE_SECONDS", 1.0)

    def put(command: str, script: str) -> None:
        path = folder / command
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return put


def bash(script: str, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = ["/bin/bash", "-c", script, "name", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


# A job that is of no use


def test_job_of_a_notebook_that_has_ended_is_cancelled_with_its_folders(folder: Path) -> None:
    profile, run = folder / "profile", folder / "run"
    profile.mkdir()
    run.mkdir()
    assert bash(cancel_on_exit._PROGRAM, "/bin/echo", str(run), str(profile), text="7\n").stdout == "7\n"
    assert not profile.exists()
    assert not run.exists()


@pytest.mark.parametrize("has_ranks", [False, True])
def test_process_that_cancels_the_job_ends_once_it_is_not_needed(fake: Fake, folder: Path, has_ranks: bool) -> None:
    folders = Folders(profile=folder / "profile", run=folder / "run", local=folder / "local", cluster_id="x")
    folders.run.mkdir()
    fake("scancel", f"touch {folder}/cancelled")
    allocated = dataclasses.replace(OWN, start_file=str(folder / "start.sh"), starts_with="srun")
    cancel_on_exit.cancel_on_exit(folders, allocated.start_file)
    process = cancel_on_exit._processes[allocated.start_file]
    cancel_on_exit.guard(allocated.start_file, "7")
    if has_ranks:
        write_script(allocated, {}, "environment.json", "")
    else:
        cancel_on_exit.relieve(allocated.start_file)
    assert process.returncode == -signal.SIGKILL
    assert not (folder / "cancelled").exists()
    assert folders.run.exists()


def test_job_ends_if_its_node_does_not_see_the_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_script, "UNSEEN_SECONDS", 0)
    start = folder / "a b" / "start.sh"
    text = batch_script.batch_script("x", str(start))
    done = bash(text)
    assert done.returncode == 1
    assert f"can't read {start.parent}: the notebook has ended, or this host does not share its folders" in done.stderr
    start.parent.mkdir()
    start.write_text("echo ranks")
    assert bash(text).stdout == "ranks\n"


@pytest.mark.parametrize(
    ("script", "scancel", "message"),
    [
        ("echo 'welcome'; echo '12;lab'; echo 'bye'", "", "12"),
        ("echo 12; echo 'see job 5'; echo 'no 7;'", "", "12"),
        (NEVER, "exit 0", r"sbatch did not end within .*; if Slurm has accepted .*, it is cancelled; try again"),
        (NEVER, NEVER, r"if Slurm has accepted the job nevertheless, scancel --user=\S+ --name=disttrain-x cancels it"),
        ("echo 'error: Socket timed out on send' >&2; exit 1", "exit 0", "Slurm does not respond: .*send"),
        ("echo 'error: invalid partition' >&2; exit 1", "exit 1", "Slurm rejected the job: .* sinfo shows"),
        ("exit 0", "exit 0", "sbatch printed no job number, but: nothing; if Slurm has accepted"),
        ("echo 'job 5 it is'", "exit 0", "sbatch printed no job number, but: job 5 it is; if Slurm"),
    ],
)
def test_late_or_malformed_sbatch_reply_leaves_no_unnamed_job(
    fake: Fake, script: str, scancel: str, message: str
) -> None:
    fake("sbatch", script)
    fake("scancel", scancel)
    if message == "12":
        assert SlurmJob.submit("", name="disttrain-x").job_id == "12"
        return
    with pytest.raises(LaunchError, match=message):
        SlurmJob.submit("", name="disttrain-x")


def test_cancel_timeout_names_the_job(fake: Fake) -> None:
    fake("scontrol", f"echo '{RECORD.replace('other[1-2]', '')}'")
    fake("scancel", NEVER)
    with pytest.raises(LaunchError, match=r"job 7 could not be cancelled: .* did not end within 1 s; .*run scancel 7"):
        SlurmJob("7").cancel()


# State


def test_position_is_that_in_the_queue_and_unknown_if_slurm_does_not_list_it(fake: Fake) -> None:
    state = JobState(job_id="7", state="PENDING", partition="gpu")
    fake("squeue", "printf '%s\\n' '3' '5_[1-9]' '7' '8'")
    assert SlurmJob("7").position(state) == 3
    assert SlurmJob("9").position(state) is None
    assert SlurmJob("7").position(dataclasses.replace(state, reason="JobHeldUser")) is None
    fake("squeue", NEVER)
    assert SlurmJob("7").position(state) is None


def test_state_is_unknown_until_slurm_lists_the_nodes(fake: Fake) -> None:
    for answer in (NEVER, "exit 1"):
        fake("scontrol", f"[ $2 = hostnames ] && {answer}; echo '{RECORD}'")
        assert SlurmJob("7").state().state == "UNKNOWN"
    fake("scontrol", f"[ $2 = hostnames ] && exec echo other1 other2; echo '{RECORD}'")
    assert SlurmJob("7").state().nodes == ("other1", "other2")
    fake("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert SlurmJob("7").state().state == "GONE"


def test_allocation_that_slurm_does_not_report_is_kept(fake: Fake) -> None:
    fake("scontrol", NEVER)
    with pytest.raises(LaunchError, match=r"allocation 7, whose state Slurm does not report now .*; try again later"):
        Allocation.find({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1"})


class FakeJob:
    """A job whose first state query fails, and which then runs; ``then`` is called during the query."""

    job_id = "7"

    def __init__(self) -> None:
        self.times = 0
        self.meanwhile: Callable[[], None] = lambda: None

    def state(self) -> JobState:
        self.times += 1
        self.meanwhile()
        if self.times == 1:
            raise OSError(12, "Cannot allocate memory")
        return JobState(job_id="7", state="UNKNOWN")


def test_deaths_are_reported_whatever_queries_fail_and_slurm_is_queried_once_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_watch, "JOB_WATCH_TURN_SECONDS", 600.0)
    monkeypatch.setattr(job_watch, "JOB_WATCH_LATE_SECONDS", 0.0)
    fake_job, reported, all_reported = FakeJob(), list[int](), threading.Event()
    allocated: Any = SimpleNamespace(job=fake_job, nodes=())
    watch = job_watch.JobWatch(allocated, reported.append, reported.append)

    def report(rank: int) -> None:
        reported.append(rank)
        if rank == 0:
            raise OSError(24, "Too many open files")
        if rank == 8:
            all_reported.set()

    def others() -> None:
        fake_job.meanwhile = lambda: None
        for rank in range(1, 9):
            watch.if_it_runs(functools.partial(report, rank))

    first = threading.Event()
    watch.if_it_runs(functools.partial(report, 0))
    watch.if_it_runs(first.set)
    assert first.wait(60)
    fake_job.meanwhile = others
    before = fake_job.times
    watch.if_it_runs(lambda: None)
    assert all_reported.wait(60)
    assert reported == list(range(9))
    assert fake_job.times == before + 1
    watch.close()


# Variables


def test_step_inherits_no_variables_of_the_enclosing_job_and_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = {"GPUS": "8", "TRES_PER_TASK": "cpu:4", "HOSTFILE": "/nowhere", "CLUSTERS": "other", "STEP_ID": "0"}
    tokens = {"JUPYTERHUB_API_TOKEN": "secret", "JPY_API_TOKEN": "secret", "PMI_RANK": "0", "SLURM_CONF": "/conf"}
    values = {f"SLURM_{name}": value for name, value in {**inherited, "JOB_ID": "7", "TMPDIR": "/local/7"}.items()}
    for name, value in {**values, **tokens}.items():
        monkeypatch.setenv(name, value)
    allocation = Allocation(job_id="7", nodes=("node1", "node2"), ranks_per_node=1, most_per_node=1)
    around = dataclasses.replace(OWN, job_id="7", prefix=tuple(allocation.variables(1, 1)))
    of_allocation = {line.partition("=")[0] for line in around.prefix}
    for allocated, expected in ((OWN, {"SLURM_CONF"}), (around, {"SLURM_CONF"} | of_allocation)):
        command = step_command(allocated, "node1", ["env"])
        output = subprocess.check_output([*command[: command.index("srun")], "env"], text=True)
        found = dict(line.partition("=")[::2] for line in output.splitlines())
        assert {name for name in found if name.startswith(("SLURM_", "PMI")) or found[name] == "secret"} == expected
    assert (found["SLURM_NODELIST"], found["SLURM_TMPDIR"]) == ("node1", "/local/7")
    assert not of_allocation & {f"SLURM_{name}" for name in inherited}


def test_replacement_starts_with_variables_read_by_python_itself() -> None:
    rank = StepRanks(allocated=OWN, host="node1", environment={"PYTHONSAFEPATH": "1", "DISTTRAIN_CLIENT": "x"})
    early = {"PYTHONSAFEPATH": "1", "PYTHONPATH": "", "LD_LIBRARY_PATH": ""}
    assert rank.get_env() == early, "nothing of the environment of a notebook that has joined since"
