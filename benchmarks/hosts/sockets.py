"""List the listening TCP sockets of a cluster and how each is protected."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import psutil

from benchmarks.lib.table import markdown_table
from jupyter_disttrain import Cluster
from jupyter_disttrain.client.registry.cluster_file import ClusterFile
from jupyter_disttrain.config.hosts import parse_hosts

from .clusters import HOSTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.lab import Lab


@dataclass(frozen=True, order=True, slots=True)
class ListeningSocket:
    """One socket; several with the same fields are listed once."""

    host: str
    program: str
    address: str

    @property
    def protection(self) -> str:
        """Return what protects the socket from other users and hosts."""
        if self.program == "controller":
            return "CurveZMQ, and signed messages"
        if self.program.startswith("pr"):
            return "Open MPI's launcher: the job's key; clear text"
        if self.address in ("0.0.0.0", "::", "*"):
            return "Open MPI: packets from other networks are dropped; clear text"
        if self.address.startswith("127."):
            return "reachable only on this host"
        return "torch (store, Gloo): none; clear text"


def listening_sockets(lab: Lab | None, launcher: str) -> list[ListeningSocket]:
    """Start a cluster, on two hosts of ``lab`` or on this machine, and return its listening sockets."""
    options = {"hosts": parse_hosts(HOSTS), "ssh": str(lab.ssh)} if lab else {"n": 2}
    with Cluster(launcher=launcher, **options) as cluster:
        cluster.run("dist.all_reduce(torch.ones(1))")
        births = ClusterFile.read(cluster._session.launch.folders.profile).births  # noqa: SLF001
        controller = {pid for each in births["controller"] for pid in _process_tree(int(each))}
        launched = {pid for each in births["launcher"] for pid in _process_tree(int(each))}
        found = set(_on_this_machine(controller, launched))
        for host in ("node1", "node2") if lab else ():
            for each in lab.listening(host) if lab else ():
                if "sshd" not in each.program:
                    found.add(ListeningSocket(host, each.program, each.address))
    return sorted(found)


def _process_tree(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return [pid]


def _on_this_machine(controller: set[int], launched: set[int]) -> Iterable[ListeningSocket]:
    """Yield the sockets of the controller's and of the launcher's processes."""
    for connection in psutil.net_connections("tcp"):
        if connection.status != psutil.CONN_LISTEN or not connection.laddr or connection.pid is None:
            continue
        if connection.pid in controller | launched:
            program = "controller" if connection.pid in controller else psutil.Process(connection.pid).name()
            yield ListeningSocket("notebook's host", program, connection.laddr.ip)


def socket_table(title: str, sockets: Iterable[ListeningSocket]) -> list[str]:
    """Return a section with a table of sockets."""
    rows = [(*astuple(each), each.protection) for each in sockets]
    return ["", f"## {title}", "", *markdown_table(("host", "program", "address", "protection"), rows)]
