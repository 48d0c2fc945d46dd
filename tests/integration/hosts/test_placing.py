"""Controller ports, MPI launchers and logs, without real hosts.

Does not cover: real hosts (``test_over_hosts``).
"""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.client.transport.controller_process import ControllerProcess
from jupyter_disttrain.config.hosts import parse_hosts
from jupyter_disttrain.errors import LaunchError
from jupyter_disttrain.launchers.local import LocalRanks, OneProcess
from jupyter_disttrain.launchers.mpi import MPIRanks
from jupyter_disttrain.protocol import controller_args
from jupyter_disttrain.protocol.controller_args import choose_ports


def test_controller_whose_port_is_taken_exits_with_a_message(tmp_path: Path) -> None:
    for folder in ("security", "log", "pid", "startup"):
        (tmp_path / folder).mkdir()
    ports = choose_ports("127.0.0.1", 8)
    with socket.create_server(("127.0.0.1", ports[2])):
        command = controller_args.controller_arguments(
            sockets=str(tmp_path / "s"), listen="127.0.0.1", engine_ports=",".join(map(str, ports))
        )
        done = subprocess.run(
            [*command, f"--profile-dir={tmp_path}", "--cluster-id=taken"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode != 0
    assert "Address already in use" in done.stderr


@pytest.mark.parametrize(
    ("output", "named"),
    [
        ("HYDRA build details:\n    Version:                                 4.1.2", "MPICH 4.1.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.5 Build 20211102", "Intel(R) MPI Library for Linux* OS, V"),
        ("mpiexec (Open MPI) 4.1.6\n\nReport bugs to http://www.open-mpi.org", "Open MPI 4.1.6"),
    ],
)
@pytest.mark.parametrize("launcher", ["mpi", "slurm"])
def test_mpi_that_cannot_start_remote_ranks_is_refused_before_any_host_is_contacted(
    output: str, named: str, launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in ("mpiexec", "srun", "sbatch", "ssh"):
        text = f"echo '{output}'" if program == "mpiexec" else f"touch {tmp_path}/was-asked"
        (tmp_path / program).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    hosts = parse_hosts("node1:1,node2:1") if launcher == "mpi" else ()
    with pytest.raises(LaunchError) as refused:
        Cluster(launcher=launcher, hosts=hosts)
    without = "--launcher ssh" if launcher == "mpi" else "--ranks-by srun"
    assert f"MPI over hosts needs Open MPI 5, and {tmp_path}/mpiexec is {named}" in str(refused.value)
    assert str(refused.value).endswith(f"put Open MPI first on PATH, or start without MPI: {without}")
    assert not (tmp_path / "was-asked").exists()


@pytest.mark.parametrize("launcher", [OneProcess, LocalRanks, ControllerProcess, MPIRanks])
def test_log_with_any_bytes_is_shown(launcher: type[Any], tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"refus\xe9 par node2\n")
    one = launcher(output_file=str(tmp_path / "log"), profile_dir=str(tmp_path), cluster_id="x", identifier="1")
    assert one.get_output() == "refus\ufffd par node2\n"
