"""Slurm: options, scripts, the queue, ends of jobs, allocations."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.config.slurm import SlurmOptions, parse_more, split_more
from jupyter_disttrain.errors import UsageError
from jupyter_disttrain.features.batch_jobs.templates import LSFRanks, PBSRanks
from jupyter_disttrain.launchers.slurm.allocation import Allocation, least_cpus
from jupyter_disttrain.launchers.slurm.batch_script import BatchScript, StartScript
from jupyter_disttrain.launchers.slurm.job_state import JobState, from_sacct, from_scontrol
from jupyter_disttrain.launchers.slurm.monitor import Watcher
from jupyter_disttrain.launchers.slurm.queue import position
from jupyter_disttrain.launchers.slurm.texts import waiting_text

if TYPE_CHECKING:
    from collections.abc import Callable

HOUR = 3600.0
RUNNING = JobState(
    job_id="7", state="RUNNING", nodes=("a", "b"), node_list="[a-b]", start_s=0.0, end_s=HOUR, time_limit="01:00:00"
)
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


def script(**changed: object) -> BatchScript:
    made = BatchScript(
        cluster_id="x-1-abc",
        nodes=2,
        per_node=4,
        folder="/home/me",
        log="/logs/slurm-%j.log",
        start_file="/p/start.sh",
        sign_file="/p/sign",
    )
    return dataclasses.replace(made, **changed)  # type: ignore[arg-type]


def test_job_waits_for_the_script_that_starts_the_ranks() -> None:
    text = script(folder='/home/a "b" \\ #c').render()
    assert text.splitlines()[:9] == [
        "#!/bin/bash",
        "#SBATCH --job-name=disttrain-x-1-abc",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        '#SBATCH --chdir="/home/a \\"b\\" \\\\ #c"',
        "#SBATCH --output=/logs/slurm-%j.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --export=ALL",
        "#SBATCH --no-requeue",
    ]
    assert "start=/p/start.sh sign=/p/sign" in text
    assert "#SBATCH --no-kill" in script(survives_nodes=True).render()


def test_step_survives_the_death_of_one_rank() -> None:
    by_srun = StartScript(nodes=2, per_node=4, command=("python", "-m", "rank"), environment={"A": "b c"})
    assert by_srun.render().splitlines() == [
        "#!/bin/bash",
        "export A='b c'",
        (
            "exec srun --mpi=none --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --nodes=2 --ntasks=8 "
            "--ntasks-per-node=4 --distribution=block ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} "
            "python -m rank"
        ),
    ]
    by_mpirun = dataclasses.replace(by_srun, mpirun=("mpirun",), environment={})
    assert by_mpirun.render().splitlines()[-1] == (
        "exec mpirun --continuous --map-by ppr:4:node:oversubscribe --bind-to none -n 8 python -m rank"
    )


@pytest.mark.parametrize(
    ("kind", "options", "lines"),
    [
        (
            PBSRanks,
            ["-l walltime=2:00:00"],
            [
                "#PBS -N disttrain",
                "#PBS -V",
                "#PBS -l select=2:ncpus=4:mpiprocs=4",
                "#PBS -j oe",
                "#PBS -o /logs/{job}.log",
                "#PBS -q gpu",
                "#PBS -l walltime=2:00:00",
            ],
        ),
        (
            LSFRanks,
            ["-W 2:00"],
            [
                "#BSUB -J disttrain",
                "#BSUB -env all",
                "#BSUB -n 8",
                '#BSUB -R "span[ptile=4]"',
                "#BSUB -o /logs/{job}.log",
                "#BSUB -q gpu",
                "#BSUB -W 2:00",
            ],
        ),
    ],
)
def test_scripts_for_pbs_and_lsf(
    folder: Path, kind: type[PBSRanks | LSFRanks], options: list[str], lines: list[str]
) -> None:
    ranks = kind(
        join_file="/shared/run.json",
        nodes=2,
        ntasks_per_node=4,
        queue="gpu",
        options=options,
        mpirun=["mpirun"],
        profile_dir=str(folder),
        output_file="/logs/{job}.log",
    )
    ranks.write_batch_script(8)
    text = (folder / ranks.batch_file).read_text().splitlines()
    assert text[:-2] == ["#!/bin/bash", *lines]
    assert text[-2] == f"cd {folder} || exit 1"
    assert text[-1] == (
        "exec mpirun --continuous --map-by ppr:4:node:oversubscribe --bind-to none "
        f'--hostfile "${kind.host_file}" {sys.executable} -m jupyter_disttrain.rank --join /shared/run.json'
    )


# Output of Slurm's commands


def test_job_is_parsed_from_scontrol_and_sacct_output() -> None:
    state = from_scontrol(SCONTROL)
    assert (state.state, state.requeued, state.partition, state.node_list) == ("RUNNING", 1, "gpu", "node[1-2]")
    assert (state.gpus, state.cpus, state.tasks_per_node, state.log) == (8, 16, 4, "/logs/7.log")
    assert state.runs
    assert state.time_left_s(4000) == 600
    assert state.exit_code is None
    assert from_scontrol(SCONTROL.replace("TimeLimit=01:00:00", "TimeLimit=UNLIMITED")).end_s is None
    kept = from_sacct("7|CANCELLED by 0|0:15|1000|2000|node[1-2]|gpu|None\n")
    assert kept is not None
    assert (kept.state, kept.exit_signal, kept.end_s) == ("CANCELLED", 15, 2000)
    assert from_sacct("") is None


def test_pending_job_line_shows_position_reason_and_start() -> None:
    state = JobState(job_id="7", state="PENDING", reason="Resources", partition="gpu", priority=40, start_s=9000.0)
    place = position("50 3\n40 5_[1-9]\n40 8\n30 1\n", state)
    assert place == 3
    text = waiting_text(dataclasses.replace(state, position=place), now_s=8000.0)
    assert text.startswith("job 7 is pending: position 3 in partition gpu (Resources), expected to start ")
    assert "set another with --account" in waiting_text(dataclasses.replace(state, reason="InvalidAccount"))


def test_time_limit_is_announced_at_ten_five_and_one_minute() -> None:
    watcher, notices = Watcher(), []
    for left_s in (700, 590, 580, 290, 280, 50, 40):
        notices += [notice.text.partition(", at its")[0] for notice in watcher.look(RUNNING, HOUR - left_s)]
    assert [text.split(", ")[-1] for text in notices] == ["in 10 min", "in 5 min", "in 50 s"]
    assert [text.partition(", at its")[0].split(", ")[-1] for text in watcher.standing(HOUR - 20)] == ["in 20 s"]
    longer = dataclasses.replace(RUNNING, end_s=2 * HOUR)
    assert not watcher.look(longer, HOUR)
    assert watcher.standing(HOUR) == []
    assert watcher.look(longer, 2 * HOUR - 300)
    short = dataclasses.replace(RUNNING, end_s=240.0)
    assert not Watcher().look(short, 1.0), "a job of four minutes gets no early warning"


def test_job_events_are_reported_once() -> None:
    watcher = Watcher()
    watcher.look(RUNNING, 0.0)
    silent = JobState(job_id="7", state="UNKNOWN", reason="no route")
    assert not watcher.look(silent, 10.0)
    assert "has not responded" in watcher.look(silent, 200.0)[0].text
    assert "has not responded" in watcher.standing(200.0)[0]
    smaller = dataclasses.replace(RUNNING, nodes=("a",), node_list="a")
    assert "has lost b" in watcher.look(smaller, 210.0)[0].text
    assert ["has lost b" in text for text in watcher.standing(210.0)] == [True], "Slurm answers again"
    assert "to be preempted" in watcher.look(dataclasses.replace(smaller, preempt_s=300.0), 220.0)[0].text
    assert [text.split()[2] for text in watcher.standing(220.0)] == ["has", "is"]
    assert not watcher.look(smaller, 225.0)
    assert len(watcher.standing(225.0)) == 1, "it is not to be preempted any more"
    (over,) = watcher.look(dataclasses.replace(smaller, state="TIMEOUT"), 230.0)
    assert over.is_over
    assert "job 7 (a) was ended by Slurm, because it reached its time limit of 01:00:00" in over.text
    assert not watcher.look(dataclasses.replace(smaller, state="GONE"), 240.0)
    assert watcher.standing(240.0) == []


def test_nodes_freed_by_a_completing_job_are_not_lost() -> None:
    watcher = Watcher()
    watcher.look(RUNNING, 0.0)
    assert not watcher.look(dataclasses.replace(RUNNING, state="COMPLETING", nodes=("a",), node_list="a"), 1.0)
    (over,) = watcher.look(dataclasses.replace(RUNNING, state="PENDING", nodes=(), node_list=""), 2.0)
    assert over.text.startswith("job 7 (a, b) was put back into the queue")


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
    ],
)
def test_options_that_contradict_the_allocation_are_refused(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        ask()
    assert message in str(caught.value)
