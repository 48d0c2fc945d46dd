"""Which rank is on which host, and a shared file system that is out of order, without any host.

Covers: hosts that have one name of their own, the connection file that can't be looked for, the controller's ports,
MPIs that can't start ranks over hosts.
Does not cover: real hosts (``test_over_hosts``).
"""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.cluster.rank_table import decide
from jupyter_disttrain.controller_arguments import EPHEMERAL, choose_ports, controller_arguments
from jupyter_disttrain.engine.connection import Connection
from jupyter_disttrain.engine.loopback import is_held_to
from jupyter_disttrain.errors import LaunchError
from jupyter_disttrain.hosts import parse_hosts
from jupyter_disttrain.messages import RankHello


def hello(rank: int, launch_host: str, host: str = "localhost") -> RankHello:
    return RankHello(
        engine=f"engine{rank}",
        host=host,
        pid=100 + rank,
        nanny_pid=200 + rank,
        launch_rank=rank,
        launch_host=launch_host,
        mpi="Open MPI",
        torch="2.13.0",
        cuda_devices=0,
    )


def test_hosts_of_one_name_are_two_nodes_if_the_launcher_tells_them_apart() -> None:
    hellos = [hello(3, "10.0.0.2"), hello(0, "10.0.0.1"), hello(2, "10.0.0.2"), hello(1, "10.0.0.1")]
    infos = [info for info, _ in decide(hellos, "gloo", 0, ["10.0.0.1", "10.0.0.2"])]
    assert [(info.rank, info.node_rank, info.local_rank) for info in infos] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]
    assert {info.node_count for info in infos} == {2}


def test_a_connection_file_that_can_t_be_looked_for_is_not_one_that_is_gone(tmp_path: Path) -> None:
    info = {"interface": "tcp://127.0.0.1", "control": 9}
    assert Connection(Path("/" + "x" * 300), info).is_there(once_reached=True, is_silent=False)  # a name too long
    assert not Connection(tmp_path / "gone", info).is_there(once_reached=True, is_silent=False)


def test_the_controller_has_ports_that_the_system_gives_to_nobody_who_asks_for_any() -> None:
    first, last = map(int, EPHEMERAL.read_text().split())
    ports = choose_ports("127.0.0.1", 8)
    assert len(set(ports)) == 8
    assert all(not first <= port <= last for port in ports)


def test_a_controller_whose_port_is_taken_ends_and_says_so(tmp_path: Path) -> None:
    for folder in ("security", "log", "pid", "startup"):
        (tmp_path / folder).mkdir()
    ports = choose_ports("127.0.0.1", 8)
    with socket.create_server(("127.0.0.1", ports[2])):
        command = controller_arguments(
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
    ("said", "named"),
    [
        ("HYDRA build details:\n    Version:                                 4.1.2", "MPICH 4.1.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.5 Build 20211102", "Intel(R) MPI Library for Linux* OS, V"),
        ("mpiexec (Open MPI) 4.1.6\n\nReport bugs to http://www.open-mpi.org", "Open MPI 4.1.6"),
    ],
)
@pytest.mark.parametrize("launcher", ["mpi", "slurm"])
def test_an_mpi_that_can_t_start_ranks_over_hosts_is_named_before_anybody_is_asked(
    said: str, named: str, launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in ("mpiexec", "srun", "sbatch", "ssh"):
        says = f"echo '{said}'" if program == "mpiexec" else f"touch {tmp_path}/was-asked"
        (tmp_path / program).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    hosts = parse_hosts("node1:1,node2:1") if launcher == "mpi" else ()
    with pytest.raises(LaunchError) as refused:
        Cluster(launcher=launcher, hosts=hosts)
    without = "--launcher ssh" if launcher == "mpi" else "--ranks-by srun"
    assert f"MPI over hosts takes Open MPI 5, and {tmp_path}/mpiexec is {named}" in str(refused.value)
    assert str(refused.value).endswith(f"put that first on PATH, or start without MPI: {without}")
    assert not (tmp_path / "was-asked").exists()


def test_mpi_s_sockets_are_filtered_where_it_was_given_the_network_and_not_where_a_person_chose_another() -> None:
    given = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl_tcp_if_include": "10.1.0.0/16"}
    assert is_held_to("10.1.0.0/16", given)
    assert not is_held_to("10.1.0.0/16", given | {"OMPI_MCA_btl_tcp_if_include": "ib0"})
    assert not is_held_to("10.1.0.0/16", given | {"OMPI_MCA_pml": "ucx"})
    assert not is_held_to("", {"OMPI_MCA_pml": "ob1"})
