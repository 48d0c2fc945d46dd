"""Which rank is on which host, and a shared file system that is out of order, without any host.

Covers: hosts that have one name of their own, the connection file that can't be looked for, the controller's ports.
Does not cover: real hosts (``test_over_hosts``).
"""

from __future__ import annotations

import socket
import subprocess
from dataclasses import replace
from pathlib import Path

from jupyter_disttrain.cluster.rank_table import decide, tell_apart
from jupyter_disttrain.controller_arguments import EPHEMERAL, choose_ports, controller_arguments
from jupyter_disttrain.engine.connection import Connection
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


def test_machines_of_one_name_in_a_job_are_two_nodes() -> None:
    hellos = [replace(hello(rank, "vm"), boot=boot) for rank, boot in enumerate("abab")]
    told = tell_apart([*hellos, replace(hello(4, "other"), boot="a")])  # a container beside the first
    assert [each.launch_host for each in told] == ["vm", "vm(2)", "vm", "vm(2)", "other"]
    infos = [info for info, _ in decide(told, "gloo", 0, ["vm", "vm(2)", "other"])]
    places = [(info.node_rank, info.local_rank, info.local_world_size) for info in infos]
    assert places == [(0, 0, 2), (1, 0, 2), (0, 1, 2), (1, 1, 2), (2, 0, 1)]


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
