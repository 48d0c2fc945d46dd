"""Network options of launchers: address families, ports, unsupported combinations.

Does not cover: real hosts (``test_over_hosts``), faults (``test_host_faults``), the pre-flight (``test_preflight``).
"""

from __future__ import annotations

import socket

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.client.transport.controller_process import free_ports
from jupyter_disttrain.config.hosts import parse_hosts
from jupyter_disttrain.errors import LaunchError, UsageError
from jupyter_disttrain.launchers.hosts.network import Network
from jupyter_disttrain.launchers.hosts.preflight import check_version


def test_ipv6_network_is_refused_for_mpi_before_the_start() -> None:
    with pytest.raises(LaunchError, match="fd00::/64, and an MPI job over hosts needs IPv4; start without MPI"):
        check_version(Network(client_address="fd00::1", cidr="fd00::/64", addresses={}, ports={}), "mpi")


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
