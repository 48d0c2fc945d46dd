"""Slurm: output of other versions and sites, variables around the notebook, late and malformed replies.

Covers: text that the lab's Slurm does not print, variables that it does not set, rare failures of commands.
Does not cover: jobs that succeed or are cancelled (``test_slurm``), the queue (``test_slurm_start``).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.client.startup import job_watch
from jupyter_disttrain.config.slurm import SlurmOptions
from jupyter_disttrain.errors import LaunchError, UsageError
from jupyter_disttrain.launchers.slurm import allocated_nodes, batch_script, cancel_on_exit, commands, job
from jupyter_disttrain.launchers.slurm.allocated_nodes import AllocatedNodes, step_command
from jupyter_disttrain.launchers.slurm.allocation import Allocation
from jupyter_disttrain.launchers.slurm.job import SlurmJob
from jupyter_disttrain.launchers.slurm.job_state import JobState, from_scontrol
from jupyter_disttrain.launchers.slurm.launcher import StepRank
from jupyter_disttrain.notebook.magics.arguments import parse
from jupyter_disttrain.notebook.magics.slurm_arguments import slurm_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


RUNNING = (
    "JobId=7 JobName=disttrain-x Reason=None JobState=RUNNING ExitCode=0:0 TimeLimit=01:00:00 StartTime=1000 "
    "EndTime=4600 Partition=gpu NodeList=node[1-2] NumNodes=2 NumCPUs=16 NumTasks=8 "
)

# GPUs


@pytest.mark.parametrize(
    ("output", "gpus"),
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
def test_job_gpus_are_parsed_for_every_version_and_site(output: str, gpus: int) -> None:
    assert from_scontrol(RUNNING + output).gpus == gpus


def test_gpus_not_counted_by_the_site_are_taken_from_the_request() -> None:
    state = dataclasses.replace(from_scontrol(RUNNING), nodes=("node1", "node2"))
    messages: list[str] = []
    assert allocated_nodes._gpus_of_each(state, SlurmOptions(nodes=2, gpus_per_node="a100:4"), messages.append) == 4
    assert not messages
    assert allocated_nodes._gpus_of_each(state, SlurmOptions(nodes=2, more=("--gres=gpu:4",)), messages.append) == 0
    assert "--gres=gpu:4 requests GPUs, but Slurm reports none, so the ranks use CPUs" in messages[0]
    assert allocated_nodes._gpus_of_each(state, SlurmOptions(nodes=2, partition="gpu"), messages.append) == 0
    assert len(messages) == 1
    assert Allocation.of(state, {"SLURM_GPUS_ON_NODE": "4"}).gpus_per_node == 4


# Variables around the notebook

AROUND = {
    "SLURM_JOB_ID": "7",
    "SLURM_GPUS": "8",
    "SLURM_TRES_PER_TASK": "cpu:4",
    "SLURM_HOSTFILE": "/nowhere",
    "SLURM_MEM_PER_NODE": "4096",
    "SLURM_CLUSTERS": "other",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "1",
    "PMI_RANK": "0",
    "JUPYTERHUB_API_TOKEN": "secret",
    "JPY_API_TOKEN": "secret",
}


def test_step_inherits_no_variables_of_the_enclosing_job_and_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**AROUND, "SLURM_CONF": "/etc/slurm.conf", "SLURM_TMPDIR": "/local/7"}.items():
        monkeypatch.setenv(name, value)
    own = AllocatedNodes(job_id="9", nodes=("node1",), per_node=1, start_file="/p/start.sh")
    state = dataclasses.replace(from_scontrol(RUNNING), nodes=("node1", "node2"))
    around = dataclasses.replace(own, job_id="7", prefix=tuple(Allocation.of(state, {}).variables(1, 1)))
    for allocated in (own, around):
        command = step_command(allocated, "node1", ["env"])
        at = command.index("srun")
        output = subprocess.run([*command[:at], "env"], capture_output=True, text=True, check=True).stdout
        found = dict(line.partition("=")[::2] for line in output.splitlines())
        left = {name for name in found if name.startswith(("SLURM_", "PMI")) or found[name] == "secret"}
        if allocated.is_own:
            assert left == {"SLURM_CONF"}
        else:
            assert found["SLURM_NODELIST"] == "node1"
            assert not left & AROUND.keys() - {"SLURM_JOB_ID"}
            assert found["SLURM_TMPDIR"] == "/local/7"


# Late and malformed replies


@pytest.fixture
def fake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that puts a shell script in the place of one of Slurm's commands."""
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(command: str, script: str) -> None:
        path = folder / command
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return put


NEVER = "exec sleep 600"


def test_position_is_that_in_the_queue_and_unknown_if_slurm_does_not_list_it(
    fake: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = dataclasses.replace(from_scontrol(RUNNING), state="PENDING")
    fake("squeue", "printf '%s\\n' '3' '5_[1-9]' '7' '8'")
    assert SlurmJob("7").position(state) == 3
    assert SlurmJob("9").position(state) is None
    assert SlurmJob("7").position(dataclasses.replace(state, reason="JobHeldUser")) is None
    monkeypatch.setattr(job, "COMMANDS_STATE_SECONDS", 0.1)
    fake("squeue", NEVER)
    assert SlurmJob("7").position(state) is None


def test_state_is_unknown_until_slurm_lists_the_nodes(
    fake: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "COMMANDS_STATE_SECONDS", 1.0)
    record = f"echo '{RUNNING.replace('node', 'other')}'"
    for answer in (NEVER, "exit 1"):
        fake("scontrol", f"[ $2 = hostnames ] && {answer}; {record}")
        assert SlurmJob("7").state().state == "UNKNOWN"
    fake("scontrol", f"[ $2 = hostnames ] && exec echo other1 other2; {record}")
    assert SlurmJob("7").state().nodes == ("other1", "other2")
    fake("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert SlurmJob("7").state().state == "GONE"


@pytest.mark.parametrize("has_ranks", [False, True])
def test_job_of_a_notebook_that_has_ended_is_cancelled_unless_ranks_were_started(folder: Path, has_ranks: bool) -> None:
    start, profile, run = folder / "profile" / "start.sh", folder / "profile", folder / "run"
    profile.mkdir()
    run.mkdir()
    if has_ranks:
        start.touch()
    command = ["/bin/bash", "-c", cancel_on_exit._PROGRAM, "x", str(start), "/bin/echo", str(run), str(profile)]
    done = subprocess.run(command, input="7\n", capture_output=True, text=True, check=False)
    assert done.stdout == ("" if has_ranks else "7\n")
    assert (profile.exists(), run.exists()) == (has_ranks, has_ranks)


def test_job_ends_if_its_node_does_not_see_the_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_script, "UNSEEN_SECONDS", 0)
    start = folder / "a b" / "start.sh"
    text = batch_script.batch_script("x", 1, 1, folder="/", log="/log", start_file=str(start))
    done = subprocess.run(["/bin/bash"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"can't read {start.parent}: the notebook has ended, or this host does not share its folders" in done.stderr
    start.parent.mkdir()
    start.write_text("echo ranks")
    assert subprocess.run(["/bin/bash"], input=text, capture_output=True, text=True, check=True).stdout == "ranks\n"


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
    watch = job_watch.JobWatch(fake_job, reported.append, reported.append)  # type: ignore[arg-type]

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


@pytest.mark.parametrize(
    ("script", "scancel", "message"),
    [
        ("echo 'welcome'; echo '12;lab'; echo 'bye'", "", "12"),
        (
            NEVER,
            "exit 0",
            r"sbatch did not end within .*; if Slurm has accepted the job nevertheless, it is cancelled; try again",
        ),
        (NEVER, NEVER, r"if Slurm has accepted the job nevertheless, scancel --user=\S+ --name=disttrain-x cancels it"),
        (
            "echo 'error: Socket timed out on send/recv operation' >&2; exit 1",
            "exit 0",
            "Slurm does not respond: .*send",
        ),
        ("echo 'error: invalid partition' >&2; exit 1", "exit 1", "Slurm rejected the job: .* sinfo shows"),
        ("exit 0", "exit 0", "sbatch printed no job number, but: nothing; if Slurm has accepted"),
        ("echo 12; echo 'see job 5'; echo 'no 7;'", "", "12"),
        ("echo 'job 5 it is'", "exit 0", "sbatch printed no job number, but: job 5 it is; if Slurm"),
    ],
)
def test_late_or_malformed_sbatch_reply_leaves_no_unnamed_job(
    fake: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, script: str, scancel: str, message: str
) -> None:
    monkeypatch.setattr(commands, "COMMAND_SECONDS", 1.0)
    monkeypatch.setattr(job, "COMMANDS_STATE_SECONDS", 1.0)
    fake("sbatch", script)
    fake("scancel", scancel)
    if message == "12":
        assert SlurmJob.submit("", name="disttrain-x").job_id == "12"
        return
    with pytest.raises(LaunchError, match=message):
        SlurmJob.submit("", name="disttrain-x")


def test_cancel_timeout_names_the_job(fake: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "COMMAND_SECONDS", 1.0)
    fake("scontrol", f"echo '{RUNNING.replace('NodeList=node[1-2]', '')}'")
    fake("scancel", NEVER)
    with pytest.raises(LaunchError, match=r"job 7 could not be cancelled: .*; run scancel 7"):
        SlurmJob("7").cancel()


# Options


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--launcher slurm --ntasks=4", "the ranks are counted by -N and --ntasks-per-node"),
        ("--launcher slurm --gpus-per 4", "GPUs are counted by --gpus-per-node"),
        ("--share", "unrecognized arguments: --share"),
    ],
)
def test_option_is_not_matched_as_a_prefix_of_a_longer_one(line: str, message: str) -> None:
    args = parse("dist_init", line)
    with pytest.raises(UsageError, match=message):
        slurm_of(args, args.launcher or "mpi", args.unknown)


def test_replacement_starts_with_variables_read_by_python_itself() -> None:
    allocated = AllocatedNodes(job_id="9", nodes=("node1",), per_node=1, start_file="/p/start.sh")
    rank = StepRank(allocated=allocated, host="node1", environment={"PYTHONSAFEPATH": "1", "DISTTRAIN_CLIENT": "x"})
    early = {"PYTHONSAFEPATH": "1", "PYTHONPATH": "", "LD_LIBRARY_PATH": ""}
    assert rank.get_env() == early, "nothing of the environment of a notebook that has joined since"


@pytest.mark.parametrize("after", ["", " Power= TresPerNode=gres:gpu:4"])
def test_job_log_path_may_contain_blanks(after: str) -> None:
    text = f"{RUNNING}StdIn=/dev/null StdOut=/home/me/my data/x.log{after}\n"
    assert from_scontrol(text).log == "/home/me/my data/x.log"


def test_allocation_that_slurm_does_not_report_is_kept(
    fake: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "COMMANDS_STATE_SECONDS", 0.5)
    fake("scontrol", NEVER)
    with pytest.raises(LaunchError, match=r"allocation 7, whose state Slurm does not report now .*; try again later"):
        Allocation.find({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1"})
