"""``python -m benchmarks.hosts``: ranks on two hosts, against mpirun on the same; lost hosts; what listens.

Covers: two hosts with two ranks each until the first all_reduce, how soon a lost host is noticed, cuts of five seconds,
the listening sockets of a cluster on one machine and over hosts.
Does not cover: copying files (``stage``), many ranks (``control_plane``).

The hosts are those of the tests' lab: namespaces of this machine, so that all of them share its cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.lib import environment
from jupyter_disttrain import Cluster
from jupyter_disttrain.cluster.launchers.mpi import find_mpiexec
from jupyter_disttrain.cluster.registry import ClusterFile
from jupyter_disttrain.errors import RankFailure
from jupyter_disttrain.hosts import parse_hosts
from tests.lab import Lab

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULTS = Path(__file__).parents[1] / "results" / "hosts.md"
SCRIPT = Path(__file__).parents[1] / "workloads" / "first_all_reduce.py"
HOSTS = "node1:2,node2:2"
CUT_SECONDS = 5
ASKED_RATIO, ASKED_LOSS_SECONDS = 1.5, 6.0
LOOP = "import time\nwhile True:\n    dist.all_reduce(torch.ones(1))\n    time.sleep(0.02)"
FINITE = "import time\nend = time.time() + {seconds}\ngo = torch.ones(1)\nwhile go.item():\n"
FINITE += "    go[0] = time.time() < end\n    dist.all_reduce(go, op=dist.ReduceOp.MIN)\n    time.sleep(0.02)"


def mpirun_seconds(lab: Lab, folder: Path) -> float:
    """Return the seconds from mpirun's start to the first all_reduce of the same four processes."""
    (folder / "done").unlink(missing_ok=True)
    # What a person writes into such a script: who this process is, from mpirun's variables.
    entry = folder / "entry.sh"
    entry.write_text(
        "export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK\n"
        f"export MASTER_ADDR={lab.address('node1')} MASTER_PORT=29511 GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1\n"
        f"exec {sys.executable} {SCRIPT} {folder}\n"
    )
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    options = ["--host", HOSTS, "--map-by", "slot", "--bind-to", "none", "--prtemca", "plm_ssh_agent", str(lab.ssh)]
    begun = time.time()
    subprocess.run(
        [find_mpiexec(), "-n", "4", *options, "sh", str(entry)],
        check=True,
        env=os.environ | root,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return float((folder / "done").read_text()) - begun


def start_seconds(lab: Lab, launcher: str) -> float:
    """Return the seconds until ranks are ready, which have done their first all_reduce then."""
    begun = time.monotonic()
    with Cluster(launcher=launcher, hosts=parse_hosts(HOSTS), ssh=str(lab.ssh)):
        return time.monotonic() - begun


def loss_seconds(lab: Lab, how: str) -> float:
    """Return the seconds from the end of a host's network, or of the host, until the cell says so."""
    with Cluster(launcher="ssh", hosts=parse_hosts(HOSTS), ssh=str(lab.ssh), on_rank_death="stop") as cluster:
        cluster.run("dist.barrier()")
        run = cluster.run(LOOP, block=False)
        begun = time.monotonic()
        (lab.cut if how == "cut" else lab.kill)("node2")
        try:
            run.wait()
        except RankFailure as failure:
            told = failure
        else:
            raise RuntimeError("the loss of a host ended no cell")
        died = next(each for each in told.failures if each.ename == "RankDied")
        seconds = died.time_s - time.time() + time.monotonic() - begun
    lab.restore()
    return seconds


def outlives_cut(lab: Lab) -> bool:
    """Return whether a cell runs on over a cut of five seconds."""
    with Cluster(launcher="ssh", hosts=parse_hosts(HOSTS), ssh=str(lab.ssh), on_rank_death="stop") as cluster:
        run = cluster.run(FINITE.format(seconds=CUT_SECONDS + 4), block=False)
        lab.cut("node2")
        timer = threading.Timer(CUT_SECONDS, lab.heal, ("node2",))
        timer.start()
        try:
            run.wait()
        except RankFailure:
            return False
        finally:
            timer.join()
    return True


def sockets(lab: Lab | None, launcher: str) -> list[tuple[str, str, str, str]]:
    """Return what of a cluster listens for TCP connections: host, program, address, protection."""
    options = {"hosts": parse_hosts(HOSTS), "ssh": str(lab.ssh)} if lab else {"n": 2}
    with Cluster(launcher=launcher, **options) as cluster:
        cluster.run("dist.all_reduce(torch.ones(1))")
        births = ClusterFile.read(cluster._launch.folders.profile).births  # noqa: SLF001
        controller = {pid for each in births["controller"] for pid in _family(int(each))}
        started = {pid for each in births["launcher"] for pid in _family(int(each))}
        rows = set(_at_head(controller, started))
        for host in ("node1", "node2") if lab else ():
            for each in lab.listening(host) if lab else ():
                if "sshd" not in each.program:
                    rows.add((host, each.program, each.address, _protection(each.program, each.address)))
    return sorted(rows)


def _family(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return [pid]


def _at_head(controller: set[int], started: set[int]) -> list[tuple[str, str, str, str]]:
    rows = []
    for connection in psutil.net_connections("tcp"):
        if connection.status != psutil.CONN_LISTEN or connection.pid not in controller | started:
            continue
        program = "controller" if connection.pid in controller else psutil.Process(connection.pid).name()
        address = connection.laddr.ip
        rows.append(("notebook's", program, address, _protection(program, address)))
    return rows


def _protection(program: str, address: str) -> str:
    if program == "controller":
        return "CurveZMQ, and signed messages"
    if program.startswith("pr"):
        return "Open MPI's launcher: the job's key; in clear"
    if address in ("0.0.0.0", "::", "*"):
        return "Open MPI: packets from other networks are dropped; in clear"
    return "this host alone" if address.startswith("127.") else "torch (store, Gloo): none; in clear"


def table(lab: Lab, folder: Path, repeats: int) -> list[str]:
    """Measure and return the lines of the report."""
    seconds: dict[str, list[float]] = {"mpirun": [], "mpi": [], "ssh": []}
    for _ in range(repeats):
        seconds["mpirun"].append(mpirun_seconds(lab, folder))
        for launcher in ("mpi", "ssh"):
            seconds[launcher].append(start_seconds(lab, launcher))
    base = statistics.median(seconds["mpirun"])
    lines = ["| two hosts x two ranks, until the first all_reduce | median (s) | ratio | asked |", "|---|---|---|---|"]
    lines += [f"| mpirun of a plain script | {base:.2f} | 1.00 | |"]
    for launcher in ("mpi", "ssh"):
        median = statistics.median(seconds[launcher])
        lines.append(f"| `--launcher {launcher}` | {median:.2f} | {median / base:.2f} | {ASKED_RATIO} |")
    lines += ["", "| a host is lost | noticed after, median (s) | longest (s) | asked (s) |", "|---|---|---|---|"]
    for how, words in (("cut", "its network is cut"), ("kill", "it loses its power")):
        taken = [loss_seconds(lab, how) for _ in range(repeats)]
        lines.append(f"| {words} | {statistics.median(taken):.2f} | {max(taken):.2f} | {ASKED_LOSS_SECONDS:g} |")
    outlived = sum(outlives_cut(lab) for _ in range(repeats))
    return [*lines, "", f"Cuts of {CUT_SECONDS} s that a running cell outlived: {outlived} of {repeats}."]


def socket_table(title: str, rows: Sequence[tuple[str, str, str, str]]) -> list[str]:
    """Return the lines that list listening sockets."""
    head = ["", f"## {title}", "", "| host | program | address | protection |", "|---|---|---|---|"]
    return [*head, *("| " + " | ".join(row) + " |" for row in rows)]


def main() -> int:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write the report that docs/benchmarks.md quotes")
    arguments = parser.parse_args()
    before = [f"- {fact}" for fact in environment.facts()]
    with tempfile.TemporaryDirectory(prefix="disttrain-bench-") as name, Lab(3) as lab:
        lines = table(lab, Path(name), arguments.repeats)
        lines += socket_table("Listening sockets, one machine, `--launcher mpi`", sockets(None, "mpi"))
        lines += socket_table("Listening sockets, two hosts, `--launcher mpi`", sockets(lab, "mpi"))
        lines += socket_table("Listening sockets, two hosts, `--launcher ssh`", sockets(lab, "ssh"))
    text = "\n".join(["# Ranks over hosts", "", *before, "", *lines, ""])
    print(text)
    if arguments.write:
        RESULTS.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
