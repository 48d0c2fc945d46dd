"""Choose the network between hosts from their reports, with made-up addresses; faults of this machine in a survey.

Does not cover: real hosts with real faults (``tests/integration/hosts/test_preflight.py``).
"""

from __future__ import annotations

import sys
import tempfile
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.errors import LaunchError, UsageError
from jupyter_disttrain.launchers.hosts import probe
from jupyter_disttrain.launchers.hosts.network import Network, choose_network, describe, device_environment
from jupyter_disttrain.launchers.hosts.preflight import check_version
from jupyter_disttrain.launchers.hosts.probe_runner import survey_by
from jupyter_disttrain.launchers.hosts.report import Address, HostReport, HostRequirements

from ...support.process_tools import own_children

if TYPE_CHECKING:
    from pathlib import Path


def host(name: str, *addresses: str, ssh: str = "", **others: object) -> HostReport:
    """Make a report of a host with addresses such as ``"eth0 127.0.0.11/8"``."""
    parts = [each.replace("/", " ").split() for each in addresses]
    own = tuple(Address(interface=i, address=a, prefix=int(p), loopback=i == "lo") for i, a, p in parts)
    report = HostReport(name=name, addresses=own, ssh_address=ssh)
    return replace(report, **others)  # type: ignore[arg-type]


def test_network_is_the_one_used_by_ssh_and_never_machine_internal() -> None:
    hosts = [
        host("a", "lo 127.0.0.1/8", "docker0 172.17.0.1/16", "eth0 127.1.0.1/16", "eth1 127.2.0.1/16", ssh="127.2.0.1"),
        host("b", "lo 127.0.0.1/8", "docker0 172.17.0.1/16", "eth0 127.1.0.2/16", "ens7 127.2.0.2/16", ssh="127.2.0.2"),
    ]
    network = choose_network((), hosts)
    assert network.cidr == "127.2.0.0/16"
    assert describe(network) == "network 127.2.0.0/16 (eth1 on a, ens7 on b)"
    assert choose_network((), hosts, "eth0").cidr == "127.1.0.0/16"
    with pytest.raises(LaunchError, match=r"b has no address that fits on an interface eth1; .* b has 127\.1\.0\.2/16"):
        choose_network((), hosts, "eth1")
    with pytest.raises(LaunchError, match="a, b have no address that fits on an interface eth9; "):
        choose_network((), hosts, "eth9")
    here = choose_network(hosts[0].addresses, hosts[:1], "lo").addresses["a"]
    assert here.address == "127.0.0.1", "ranks on this machine may communicate over loopback"
    with pytest.raises(UsageError, match="'eth0/x' is not a network"):
        choose_network((), hosts, "eth0/x")


def test_hosts_with_one_address_networks_are_combined() -> None:
    """As in clouds that give each host a network of one address."""
    hosts = [host(name, f"eth0 127.5.{n}.7/32", ssh=f"127.5.{n}.7") for n, name in enumerate("abc")]
    assert choose_network((), hosts).cidr == "127.5.0.0/22"
    with pytest.raises(LaunchError, match="the hosts share no network; name one"):
        choose_network((), [*hosts, host("d", "eth0 10.0.0.1/24", ssh="10.0.0.1")])


def test_ipv6_network_is_refused_for_mpi_before_the_start() -> None:
    with pytest.raises(LaunchError, match="fd00::/64, and an MPI job over hosts needs IPv4; start without MPI"):
        check_version(Network(client_address="fd00::1", cidr="fd00::/64", addresses={}, ports={}), "mpi")


def test_infiniband_is_used_if_every_host_has_it_and_user_settings_are_kept() -> None:
    active, roce = {"mlx5_0:1": "InfiniBand"}, {"mlx5_2:1": "Ethernet"}
    both = [
        host("a", "eth0 127.1.0.1/16", ssh="127.1.0.1", rdma_ports=active),
        host("b", "eth0 127.1.0.2/16", ssh="127.1.0.2", rdma_ports=active | roce),
    ]
    network = choose_network((), both)
    assert describe(network) == "network 127.1.0.0/16 (eth0), InfiniBand mlx5_0 on all nodes"
    assert device_environment(network, {}) == {"NCCL_IB_HCA": "=mlx5_0:1", "UCX_NET_DEVICES": "mlx5_0:1,eth0"}
    assert device_environment(network, {"NCCL_IB_HCA": "mlx5_0"}).keys() == {"UCX_NET_DEVICES"}
    other = host("b", "ens7 127.1.0.2/16", ssh="127.1.0.2", rdma_ports={"mlx5_3:1": "InfiniBand"})
    named = "network 127.1.0.0/16 (eth0 on a, ens7 on b), InfiniBand mlx5_0 on a, mlx5_3 on b"
    differs = choose_network((), [both[0], other])
    assert describe(differs) == named
    assert device_environment(differs, {}) == {}
    one = choose_network((), [both[0], replace(both[1], rdma_ports=roce)])
    assert describe(one).endswith("InfiniBand mlx5_0 on a, not used: not every node has it")
    assert device_environment(one, {}) == {}
    neither = choose_network((), [replace(each, rdma_ports={}) for each in both])
    assert device_environment(neither, {}) == {"UCX_NET_DEVICES": "eth0"}


def test_infiniband_sysfs_files_are_parsed(tmp_path: Path) -> None:
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        for name, text in (("state", state), ("link_layer", "InfiniBand")):
            (port / name).write_text(f"{text}\n")
    assert probe.rdma_ports(str(tmp_path)) == {"mlx5_0:1": "InfiniBand"}
    assert probe.rdma_ports(str(tmp_path / "none")) == {}


def test_error_output_needs_no_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    wanted = HostRequirements.here(torch=False, shared_folder=tmp_path)
    (report,) = survey_by(lambda *_: ["sh", "-c", "echo no route >&2; exit 5"], ["node1"], wanted, {})
    assert (report.failure, report.exit_code) == ("no route", 5)


def test_command_without_a_thread_that_reads_its_replies_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(LaunchError, match=r"cannot query node1: can't start new thread; raise .*ulimit -u"):
        survey_by(lambda *_: ["sleep", "600"], ["node1"], HostRequirements.here(torch=False), {})
    assert not own_children("600")


def test_missing_psutil_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = str(tmp_path)
    request = {"nonce": "", "mpiexec": None, "shared_folder": "", "temporary_folder": folder, "working_folder": folder}
    found = probe.report({**request, "python_path": [], "least_free_bytes": 0})
    ((what, remedy),) = found["problems"]
    assert what.startswith("psutil can't be imported there (")
    assert remedy == "install the same environment on all hosts"
