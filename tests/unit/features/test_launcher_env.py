"""Jobs of mpirun, srun and torchrun that a notebook joins: variables, files, addresses."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.client.transport.ssh_tunnel import LEASE_SCRIPT as HOLD_THERE
from jupyter_disttrain.errors import LaunchError, UsageError
from jupyter_disttrain.features.batch_jobs import launcher_env
from jupyter_disttrain.features.batch_jobs.launcher_env import Launched, network_of, own_address
from jupyter_disttrain.protocol.time_limits import TUNNEL_STALE_SECONDS

from ...support.join_tools import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Mapping


def test_only_a_notebook_with_a_lost_network_is_ended(tmp_path: Path) -> None:
    script = HOLD_THERE.format(folder=tmp_path, stale=TUNNEL_STALE_SECONDS)

    def take() -> tuple[subprocess.Popen[str], str]:
        shell = subprocess.Popen(
            ["sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert shell.stdin is not None
        assert shell.stdout is not None
        shell.stdin.write(f"{script}\n")
        shell.stdin.flush()
        return shell, shell.stdout.readline().strip()

    first, code = take()
    other = subprocess.Popen(["sleep", "1000"])
    shells = [first]
    try:
        assert code == "0"
        note = tmp_path / "holder.shell"
        host = note.read_text().split()[1]
        note.write_text(f"{other.pid} {host}\n")  # of an ended shell, whose process id was reused
        os.utime(note, (0, 0))
        shells.append(take()[0])
        assert other.poll() is None
        assert first.poll() is None
        note.write_text(f"{first.pid} {host}\n")
        os.utime(note, (0, 0))
        third, code = take()
        shells.append(third)
        assert code == "0"
        assert first.wait(LIMIT_S) == -signal.SIGTERM
    finally:
        other.kill()
        other.wait()
        for shell in shells:
            shell.communicate()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            },
            ("mpirun", 3, 4, 2),
        ),
        (
            {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "3(x2)", "PMI_RANK": "5"},
            ("srun", 5, 6, 3),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "SLURM_PROCID": "0"}, ("torchrun", 1, 2, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, ("mpirun", 1, 2, 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),
        ({}, None),
    ],
)
def test_launcher_variables_are_parsed(environment: Mapping[str, str], expected: tuple[Any, ...] | None) -> None:
    if expected is None:
        with pytest.raises(LaunchError, match="start it with mpirun, srun or torchrun"):
            Launched.read(environment)
        return
    found = Launched.read(environment)
    assert (found.launcher, found.rank, found.world_size, found.on_this_host) == expected


def test_controller_listens_on_an_address_reachable_by_the_ranks() -> None:
    assert own_address("", {"AZ_BATCH_MASTER_NODE": "127.0.0.1:6000"}) == "127.0.0.1"
    assert own_address("", {"MASTER_ADDR": "127.0.0.1"}) == "127.0.0.1"
    assert own_address("", {"MASTER_ADDR": "203.0.113.7"}) not in ("203.0.113.7", "0.0.0.0")
    assert own_address("127.0.0.0/8", {}) == own_address("lo", {}) == "127.0.0.1"
    assert network_of("127.0.0.1") == "127.0.0.0/8"
    with pytest.raises(LaunchError, match=r"no address on ib7; name one of its interfaces or networks: .*lo"):
        own_address("ib7", {})


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "the job has not started, has ended, or wrote its file elsewhere"),
        ("not JSON", "not the file of a job"),
        ("[1]", "not the file of a job"),
        ('{"version": "0.0.1"}', "version 0.0.1"),
    ],
)
def test_file_of_another_kind_is_refused(file: Path, content: str | None, named: str) -> None:
    if content is not None:
        file.write_text(content)
    with pytest.raises(UsageError, match=named):
        Cluster.attach(str(file))


def test_file_of_another_user_is_refused(file: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("to give a file away takes root")
    file.write_text("{}")
    os.chown(file, 65534, 65534)
    with pytest.raises(
        UsageError, match=r"it belongs to another user \(nobody\); only the user who started the job may attach to it"
    ):
        Cluster.attach(str(file))


def test_launcher_is_found_by_its_name_or_is_the_nearest_process_that_is_no_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {9: "bash", 8: "apptainer", 7: "prterun", 6: "slurmstepd"}
    there = [SimpleNamespace(pid=pid, name=lambda name=name: name) for pid, name in names.items()]
    monkeypatch.setattr(launcher_env.psutil, "Process", lambda: SimpleNamespace(parents=lambda: there))
    assert launcher_env.launcher_process("mpirun", {}) == 7
    assert launcher_env.launcher_process("srun", {}) == 6
    assert launcher_env.launcher_process("torchrun", {"TORCHELASTIC_RUN_ID": "none"}) == 8
    assert launcher_env.launcher_process("torchrun", {"RANK": "0"}) is None
