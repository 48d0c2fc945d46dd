"""Slurm: options, scripts, the queue, ends of jobs, allocations."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.config.slurm import SlurmOptions, parse_more, split_more
from jupyter_disttrain.errors import UsageError
from jupyter_disttrain.launchers.slurm import allocated_nodes
from jupyter_disttrain.launchers.slurm.allocated_nodes import AllocatedNodes, Allocation, least_cpus
from jupyter_disttrain.launchers.slurm.batch_script import job_options, start_script
from jupyter_disttrain.launchers.slurm.job_state import JobState, from_sacct, from_scontrol
from jupyter_disttrain.launchers.slurm.monitor import JobMonitor
from jupyter_disttrain.launchers.slurm.user_messages import waiting_text
from jupyter_disttrain.notebook import extension  # noqa: F401  (defines the magics)
from jupyter_disttrain.notebook.magics.arguments import parse
from jupyter_disttrain.notebook.magics.slurm_arguments import slurm_of

if TYPE_CHECKING:
    from collections.abc import Callable

HOUR = 3600.0
RUNNING = JobState(
    job_id="7", state="RUNNING", nodes=("a", "b"), node_list="[a-b]", start_s=0.0, end_s=HOUR, time_limit="01:00:00"
)
ALLOCATED = AllocatedNodes(job_id="7", nodes=("a", "b"), per_node=1, start_file="/p/start.sh")
SCONTROL = (
    "JobId=7 JobName=disttrain-x Priority=40 Reason=None JobState=RUNNING Restarts=1 ExitCode=0:0 TimeLimit=01:00:00 "
    "StartTime=1000 EndTime=4600 PreemptTime=None Partition=gpu NodeList=node[1-2] NumNodes=2 NumCPUs=16 NumTasks=8 "
    "TRES=cpu=16,node=2,gres/gpu=8 NtasksPerN:B:S:C=4:0:*:* Comment=JobState=FAILED StdOut=/logs/7.log"
)

# Options


def test_sbatch_options_are_parsed_as_given() -> None:
    more = parse_more(["--qos", "high", "--exclusive", "--mem=64G"]) + split_more("--comment 'a b'")
    assert more == ("--qos=high", "--exclusive", "--mem=64G", "--comment=a b")
    options = SlurmOptions(nodes=2, gpus_per_node="a100:4", partition="gpu", time="1-00:00:00", more=more)
    assert options.lines[:3] == ("--gpus-per-node=a100:4", "--partition=gpu", "--time=1-00:00:00")
    assert options.shape() == (2, 4)
    assert SlurmOptions(nodes=2).shape(ranks=8) == (2, 4)


# Scripts


def test_step_survives_the_death_of_one_rank() -> None:
    options = job_options("x-1", 2, 4, folder="/a b", log="/logs/%j.log", survives_nodes=True)
    assert {"--job-name=disttrain-x-1", "--chdir=/a b", "--no-requeue", "--no-kill"} <= set(options)
    assert start_script(2, 4, ["python"], {"A": "b c"}).splitlines() == [
        "#!/bin/bash",
        "export A='b c'",
        (
            "exec srun --mpi=none --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --distribution=block "
            "--nodes=2 --ntasks=8 --ntasks-per-node=4 "
            "${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} python"
        ),
    ]
    assert start_script(2, 4, ["python"], {}, ["mpirun"]).splitlines()[-1] == (
        "exec mpirun --continuous --map-by ppr:4:node:oversubscribe --bind-to none -n 8 python"
    )


# Output of Slurm's commands


def test_job_is_parsed_from_scontrol_and_sacct_output() -> None:
    state = from_scontrol(SCONTROL)
    assert (state.state, state.requeued, state.partition, state.node_list) == ("RUNNING", 1, "gpu", "node[1-2]")
    assert (state.gpus, state.cpus, state.tasks_per_node, state.log) == (8, 16, 4, "/logs/7.log")
    assert state.runs
    assert state.time_left_s(4000) == 600
    assert from_scontrol(SCONTROL.replace("TimeLimit=01:00:00", "TimeLimit=UNLIMITED")).end_s is None
    over = from_scontrol("JobId=7 JobState=CANCELLED ExitCode=0:15 EndTime=2000 TimeLimit=UNLIMITED")
    assert (over.state, over.exit_signal, over.end_s) == ("CANCELLED", 15, 2000)
    kept = from_sacct("7|CANCELLED by 0|0:15|1000|2000|None\n")
    assert kept is not None
    assert (kept.state, kept.exit_signal, kept.end_s) == ("CANCELLED", 15, 2000)
    assert from_sacct("") is None


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
    assert from_scontrol(f"JobId=7 JobState=RUNNING NumNodes=2 {output}").gpus == gpus


def test_gpus_not_counted_by_the_site_are_taken_from_the_request() -> None:
    messages: list[str] = []

    def gpus_of_each(options: SlurmOptions) -> int:
        return allocated_nodes._gpus_of_each(RUNNING, options, messages.append)

    assert gpus_of_each(SlurmOptions(nodes=2, gpus_per_node="a100:4")) == 4
    assert gpus_of_each(SlurmOptions(nodes=2, partition="gpu")) == 0
    assert not messages
    assert gpus_of_each(SlurmOptions(nodes=2, more=("--gres=gpu:4",))) == 0
    assert "--gres=gpu:4 requests GPUs, but Slurm reports none, so the ranks use CPUs" in messages[0]
    assert Allocation.of(RUNNING, {"SLURM_GPUS_ON_NODE": "4"}).gpus_per_node == 4


@pytest.mark.parametrize("after", ["", " Power= TresPerNode=gres:gpu:4"])
def test_job_log_path_may_contain_blanks(after: str) -> None:
    text = f"JobId=7 StdIn=/dev/null StdOut=/home/me/my data/x.log{after}\n"
    assert from_scontrol(text).log == "/home/me/my data/x.log"


def test_pending_job_line_shows_position_reason_and_start() -> None:
    state = JobState(job_id="7", state="PENDING", reason="Resources", partition="gpu", start_s=9000.0)
    text = waiting_text(dataclasses.replace(state, position=3), now_s=8000.0)
    assert text.startswith("job 7 is pending: position 3 in partition gpu (Resources), expected to start ")
    assert "set another with --account" in waiting_text(dataclasses.replace(state, reason="InvalidAccount"))


def test_time_limit_is_announced_at_ten_five_and_one_minute() -> None:
    monitor, notices = JobMonitor(ALLOCATED), []
    for left_s in (700, 590, 603, 580, 290, 280, 50, 40):  # Slurm may move the end a little
        notices += [text.partition(", at its")[0] for text in monitor.look(RUNNING, HOUR - left_s)]
    assert [text.split(", ")[-1] for text in notices] == ["in 10 min", "in 5 min", "in 50 s"]
    assert [text.partition(", at its")[0].split(", ")[-1] for text in monitor.standing] == ["in 40 s"]
    longer = dataclasses.replace(RUNNING, end_s=2 * HOUR)
    assert not monitor.look(longer, HOUR)
    assert monitor.standing == []
    assert monitor.look(longer, 2 * HOUR - 300)
    short = dataclasses.replace(RUNNING, end_s=240.0)
    assert not JobMonitor(ALLOCATED).look(short, 1.0), "a job of four minutes gets no early warning"


def test_job_events_are_reported_once() -> None:
    monitor = JobMonitor(ALLOCATED)
    monitor.look(RUNNING, 0.0)
    silent = JobState(job_id="7", state="UNKNOWN", reason="no route")
    assert not monitor.look(silent, 10.0)
    assert "has not responded" in monitor.look(silent, 200.0)[0]
    assert "has not responded" in monitor.standing[0]
    assert not monitor.look(silent, 210.0)
    smaller = dataclasses.replace(RUNNING, nodes=("a",), node_list="a")
    assert "has lost b" in monitor.look(smaller, 210.0)[0]
    assert ["has lost b" in text for text in monitor.standing] == [True], "Slurm answers again"
    assert "to be preempted" in monitor.look(dataclasses.replace(smaller, preempt_s=300.0), 220.0)[0]
    assert [text.split()[2] for text in monitor.standing] == ["has", "is"]
    assert not monitor.look(smaller, 225.0)
    assert len(monitor.standing) == 1, "it is not to be preempted any more"
    assert not monitor.look(dataclasses.replace(smaller, state="TIMEOUT"), 230.0)
    assert "job 7 (a) was ended by Slurm, because it reached its time limit of 01:00:00" in monitor.over
    assert monitor.standing == []


def test_nodes_freed_by_a_completing_job_are_not_lost() -> None:
    monitor = JobMonitor(ALLOCATED)
    monitor.look(RUNNING, 0.0)
    assert not monitor.look(dataclasses.replace(RUNNING, state="COMPLETING", nodes=("a",), node_list="a"), 1.0)
    monitor.look(dataclasses.replace(RUNNING, state="PENDING", nodes=(), node_list=""), 2.0)
    assert monitor.over.startswith("job 7 (a, b) was put back into the queue")


def test_job_that_is_requeued_before_the_first_look_is_over() -> None:
    monitor = JobMonitor(ALLOCATED)
    monitor.look(dataclasses.replace(RUNNING, state="PENDING", nodes=(), node_list=""), 0.0)
    assert monitor.over.startswith("job 7 (a, b) was put back into the queue")


def test_allocation_refuses_more_than_it_has() -> None:
    state = dataclasses.replace(from_scontrol(SCONTROL), nodes=("node1", "node2"))
    around = Allocation.of(state, {"SLURM_JOB_CPUS_PER_NODE": "8(x2)"})
    assert (around.ranks_per_node, around.most_per_node, around.gpus_per_node) == (4, 8, 4)
    assert around.shape(SlurmOptions()) == (2, 4)
    assert around.shape(SlurmOptions(), ranks=3) == (1, 3)
    with pytest.raises(
        UsageError, match=r"3 nodes with 4 ranks each are requested, but the allocation 7.*node1, node2"
    ):
        around.shape(SlurmOptions(nodes=3))
    with pytest.raises(UsageError, match="--partition can't be changed in the allocation 7"):
        around.shape(SlurmOptions(partition="gpu"))
    environment = around.variables(1, 2, {"SLURM_PROCID": "0", "SLURM_TMPDIR": "/local/7", "HOME": "/"})
    assert {"SLURM_NODELIST=node1", "SLURM_TASKS_PER_NODE=2(x1)", "SLURM_OVERLAP=1", "SLURM_TMPDIR=/local/7"} <= set(
        environment
    )
    assert least_cpus("4(x2),2") == 2


def from_line(line: str) -> SlurmOptions | None:
    args = parse("dist_init", line)
    return slurm_of(args, args.launcher or "mpi")


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: parse_more(["--output=x"]), "--output can't be passed to sbatch here"),
        (lambda: parse_more(["--arr", "1-3"]), "a cluster is one job"),
        (lambda: parse_more(["--requeue"]), "%dist_reset submits a new job"),
        (lambda: parse_more(["--nodes=3"]), "-N"),
        (lambda: parse_more(["-q", "x"]), "write its long form"),
        (lambda: split_more("--comment 'a"), "cannot read --sbatch"),
        (lambda: SlurmOptions(time="soon"), "--time 2:00:00"),
        (lambda: SlurmOptions(gpus_per_node="all"), "--gpus-per-node all"),
        (lambda: SlurmOptions(nodes=0), "-N must be 1 or more"),
        (lambda: SlurmOptions(more=("--comment=a\n#SBATCH --wrap",)), "one line of text"),
        (lambda: SlurmOptions(nodes=3).shape(ranks=8), "-n 8 is not 3 nodes with 2 each"),
        (lambda: Cluster(slurm=SlurmOptions()), "add --launcher slurm"),
        (lambda: from_line("--launcher slurm --ntasks=4"), "the ranks are counted by -N and --ntasks-per-node"),
        (lambda: from_line("--launcher slurm --gpus-per 4"), "GPUs are counted by --gpus-per-node"),
        (lambda: from_line("--share"), "unrecognized arguments: --share"),
    ],
)
def test_options_that_contradict_the_allocation_are_refused(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        ask()
    assert message in str(caught.value)
