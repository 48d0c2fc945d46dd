"""Measure clusters over two hosts: their start, the loss of a host, short network cuts.

Covers: two hosts with two ranks each until the first all_reduce, with mpirun as the baseline; the time until a lost
host is reported; cells during a network cut.
Does not cover: listening sockets (sockets), copying files (staging), many ranks (overhead.control_plane).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from benchmarks.lib.environment import OPENMPI_AS_ROOT, WORKLOADS
from jupyter_disttrain import Cluster
from jupyter_disttrain.config.hosts import parse_hosts
from jupyter_disttrain.errors import RankFailure
from jupyter_disttrain.launchers.mpi import find_mpiexec

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lab import Lab

HOSTS = "node1:2,node2:2"
CUT_S = 5
LOOP = "import time\nwhile True:\n    dist.all_reduce(torch.ones(1))\n    time.sleep(0.02)"
FINITE_LOOP = """
import time
end = time.time() + {seconds}
running = torch.ones(1)
while running.item():
    running[0] = time.time() < end
    dist.all_reduce(running, op=dist.ReduceOp.MIN)
    time.sleep(0.02)
"""
# Sets torch's variables from those of mpirun, as a script for mpirun has to.
MPIRUN_SCRIPT = """
export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK
export MASTER_ADDR={address} MASTER_PORT=29511 GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1
exec {command}
"""


def mpirun_seconds(lab: Lab, folder: Path) -> float:
    """Return the seconds from mpirun's start to the first all_reduce of the same four processes."""
    (folder / "done").unlink(missing_ok=True)
    script = folder / "script.sh"
    command = f"{sys.executable} {WORKLOADS / 'first_all_reduce.py'} {folder}"
    script.write_text(MPIRUN_SCRIPT.format(address=lab.address("node1"), command=command))
    options = ["--host", HOSTS, "--map-by", "slot", "--bind-to", "none", "--prtemca", "plm_ssh_agent", str(lab.ssh)]
    begun = time.time()
    subprocess.run(
        [find_mpiexec(), "-n", "4", *options, "sh", str(script)],
        check=True,
        env=os.environ | OPENMPI_AS_ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return float((folder / "done").read_text()) - begun


def start_seconds(lab: Lab, launcher: str) -> float:
    """Return the seconds until all ranks are ready, which includes their first all_reduce."""
    begun = time.monotonic()
    with Cluster(launcher=launcher, hosts=parse_hosts(HOSTS), ssh=str(lab.ssh)):
        return time.monotonic() - begun


def _cluster(lab: Lab) -> Cluster:
    return Cluster(launcher="ssh", hosts=parse_hosts(HOSTS), ssh=str(lab.ssh), on_rank_death="stop")


def loss_seconds(lab: Lab, how: str) -> float:
    """Return the seconds until a cell reports a host whose network was cut (``cut``) or power failed (``kill``)."""
    with _cluster(lab) as cluster:
        cluster.run("dist.barrier()")
        run = cluster.run(LOOP, block=False)
        begun = time.monotonic()
        (lab.cut if how == "cut" else lab.kill)("node2")
        try:
            run.wait()
        except RankFailure as error:
            failures = error.failures
        else:
            raise RuntimeError(f"the cell did not fail although node2 was lost ({how})")
        died = next(failure for failure in failures if failure.ename == "RankDied")
        seconds = died.time_s - time.time() + time.monotonic() - begun
    lab.restore()
    return seconds


def survives_cut(lab: Lab) -> bool:
    """Return whether a running cell survives a network cut of ``CUT_S`` seconds."""
    with _cluster(lab) as cluster:
        run = cluster.run(FINITE_LOOP.format(seconds=CUT_S + 4), block=False)
        lab.cut("node2")
        timer = threading.Timer(CUT_S, lab.heal, ("node2",))
        timer.start()
        try:
            run.wait()
        except RankFailure:
            return False
        finally:
            timer.join()
    return True
