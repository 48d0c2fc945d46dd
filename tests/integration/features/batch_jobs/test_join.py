"""Jobs of mpirun, srun and torchrun whose ranks a notebook joins."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import ClusterClosedError, LaunchError, RankFailure, UsageError
from jupyter_disttrain.features.batch_jobs import client
from jupyter_disttrain.protocol.shared_memory import PREFIX, ROOT
from jupyter_disttrain.rank_sessions import ranks_in
from jupyter_disttrain.server.clusters import Clusters

from ....support.join_tools import ENGINE, HOLD, LIMIT_S, Job, start_process
from ....support.process_tools import own_children, wait_until

if TYPE_CHECKING:
    import psutil

    from jupyter_disttrain.server.live_cluster import LiveCluster

    from ....lab.lab import Lab
    from ....lab.slurm import Slurm
    from ....support.notebook_driver import Notebook


def test_mpi_job_on_two_hosts_is_joined_left_and_joined_again(lab: Lab, file: Path, jobs: list[Job]) -> None:
    network = f"{lab.head_address}/24"
    agent = ["--prtemca", "plm_ssh_agent", str(lab.ssh), "--prtemca", "prte_if_include", network]
    names = ["PYTHONPATH", "AZ_BATCH_MASTER_NODE"]
    command = [
        *("mpirun", "--host", "node1:2,node2:2", "--map-by", "slot", "--bind-to", "none", *agent),
        *("--mca", "btl_tcp_if_include", network, *(argument for name in names for argument in ("-x", name))),
    ]
    variables = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "AZ_BATCH_MASTER_NODE": f"{lab.address('node1')}:6000",
    }
    jobs.append(Job([*command, *ENGINE, "--join", str(file)], file.with_name("mpirun.log"), **variables))
    assert jobs[0].wait_for_file(file)["address"] == lab.address("node1")
    assert file.stat().st_mode & 0o777 == 0o600
    cluster = Cluster.attach(str(file))
    places = [(entry.info.host, entry.info.local_rank, entry.info.node_rank) for entry in cluster.table]
    assert places == [("node1", 0, 0), ("node1", 1, 0), ("node2", 0, 1), ("node2", 1, 1)]
    run = cluster.run("x = torch.ones(1) * rank; dist.all_reduce(x); x.item(), comm.allreduce(rank)")
    assert set(run.results.values()) == {(6.0, 6)}
    waiting = cluster.run("comm.recv(source=(rank + 1) % 4)", block=False)
    cluster.interrupt()
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        waiting.wait()
    with pytest.raises(RankFailure, match=r"rank 1.*ZeroDivisionError"):
        cluster.run("comm.barrier() if rank != 1 else 1 / 0")
    assert set(cluster.run("comm.allreduce(rank)").results.values()) == {6}
    controller = json.loads(file.read_text())["connection"]["control"]
    assert [found.address for found in lab.listening("node1") if found.port == controller] == [lab.address("node1")]
    with pytest.raises(UsageError, match="held by process"):
        Cluster.attach(str(file))
    cluster.detach()
    cluster = Cluster.attach(str(file))
    assert cluster.run("x.item() + rank").results == {rank: 6.0 + rank for rank in range(4)}
    with pytest.raises(UsageError, match="start it again with its launcher"):
        cluster.reset()
    cluster.shutdown()
    assert jobs[0].end() == 0, jobs[0].output
    assert {path.name.partition("-logs-")[0] for path in file.parent.iterdir()} == {"job", "mpirun.log"}


SCRIPT = """#!/bin/sh
#SBATCH --nodes 2 --ntasks-per-node 2 --output {folder}/out.txt
export PYTHONPATH={path}
srun --mpi=none {command}
echo srun ended with $?
"""


def test_sbatch_job_is_joined_and_outlives_notebook_and_rank_0(
    slurm: Slurm, file: Path, bare_notebook: Notebook
) -> None:
    command = " ".join([*ENGINE, "--join", str(file), "--backend", "none"])
    script = file.with_name("job.sh")
    script.write_text(SCRIPT.format(folder=file.parent, path=os.environ.get("PYTHONPATH", ""), command=command))
    submitted = slurm.run("sbatch", "--parsable", str(script)).strip()
    try:
        assert wait_until(file.exists)
        begun = bare_notebook.run(f"%dist_attach {file}").check()
        assert "ranks 0-3 ready" in begun.text
        assert "node2: ranks 2-3" in begun.text
        bare_notebook.run(f"%%distributed\n{HOLD}").check()
        left = bare_notebook.run("%dist_detach").check()
        assert left.text == f"ranks 0-3 continue without this notebook; %dist_attach {file} attaches to them again"
        back = bare_notebook.run(f"%dist_attach {file}").check()
        assert "ranks 0-3 attached, with their variables" in back.text
        died = bare_notebook.run("%%distributed\nif rank == 0: os.kill(os.getpid(), signal.SIGKILL)")
        assert "rank 0 (node1)" in died.text
        assert "killed by SIGKILL" in died.text
        others = bare_notebook.run("%%distributed -r 1-3 -o found\nkept").check()
        assert "rank 0 can't be replaced: no process can be added to a running job of srun" in died.text + others.text
        assert bare_notebook.run("found").text == "{1: 11, 2: 22, 3: 33}"
        bare_notebook.run("%dist_shutdown").check()
        assert wait_until(lambda: "srun ended with 0" in (file.parent / "out.txt").read_text())
        assert wait_until(lambda: submitted not in slurm.run("squeue", "-h", "-o", "%i"))
    finally:
        slurm.cancel_all()
    assert not file.exists()


def test_job_with_a_closed_network_is_reached_through_ssh(lab: Lab, file: Path, jobs: list[Job]) -> None:
    command = [
        *(
            "env",
            f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}",
            f"JUPYTER_DATA_DIR={os.environ['JUPYTER_DATA_DIR']}",
        ),
        *(
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--log-dir",
            str(file.parent / "log"),
        ),
        *("--no-python", *ENGINE, "--join", str(file), "--backend", "none", "--interface", "lo"),
    ]
    jobs.append(Job([str(lab.ssh), "node1", " ".join(command)], file.with_name("torchrun.log")))
    assert jobs[0].wait_for_file(file)["address"] == "127.0.0.1"
    with pytest.raises(UsageError, match=f"reached only on node1.*%dist_attach node1:{file} connects through ssh"):
        Cluster.attach(str(file))
    which = f"node1:{file}"
    cluster = Cluster.attach(which, ssh=str(lab.ssh))
    cluster.push({"big": b"1" * 2_000_000})
    assert cluster.run("kept = rank * 11; log_metrics(1, loss=kept); len(big)").results == {0: 2_000_000, 1: 2_000_000}
    clusters = Clusters(logging.getLogger(__name__))
    (live,) = held(clusters, cluster.cluster_id)
    assert (live.file.name, live.file.launcher, live.file.is_held) == ("job", "torchrun job", True)
    with pytest.raises(UsageError, match="belong to a job; stop ends it"):
        live.ask("reset")
    with pytest.raises(UsageError, match=r"the log of rank 1 is on node1: .*/rank1\.log; ssh node1"):
        live.log_ends([1])
    with pytest.raises(UsageError, match="held by another notebook"):
        Cluster.attach(which, ssh=str(lab.ssh))
    running = cluster.run("import time\nwhile not getattr(time, 'go', 0): time.sleep(0.01)\n7", block=False)
    cluster.detach()
    assert not list(Path("/dev/shm").glob(f"disttrain-job-{os.getpid()}-*"))
    assert ssh_here() == []
    assert wait_until(lambda: not held(clusters, live.file.cluster_id))
    clusters.close()
    cluster = Cluster.attach(which, ssh=str(lab.ssh))
    assert cluster.metrics.gather("loss").values.tolist() == [[0.0, 11.0]]
    assert [run.ranks for run in cluster.missed] == [running.ranks]
    cluster.interrupt()
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        cluster.missed[0].wait()
    (tunnel,) = ssh_here()
    assert not any(key in " ".join(tunnel.cmdline()) for key in secrets(file))
    tunnel.kill()
    assert wait_until(lambda: cluster.closed)
    with pytest.raises(ClusterClosedError, match=f"the ssh tunnel to node1 ended: .*%dist_attach {which} opens it"):
        cluster.run("1")
    cluster = Cluster.attach(which, ssh=str(lab.ssh))
    assert cluster.run("kept").results == {0: 0, 1: 11}
    stop = [sys.executable, "-m", "jupyter_disttrain.cli", "stop", cluster.cluster_id]
    assert "ended" in subprocess.run(stop, check=True, capture_output=True, text=True).stdout
    assert wait_until(lambda: cluster.closed)
    with pytest.raises(ClusterClosedError, match="was ended by jupyter disttrain stop"):
        cluster.run("1")
    assert jobs[0].end() == 0, jobs[0].output
    assert not list(Path("/dev/shm").glob(f"disttrain-job-{os.getpid()}-*"))
    with pytest.raises(UsageError, match="No such file"):
        Cluster.attach(which, ssh=str(lab.ssh))
    with pytest.raises(LaunchError, match=r"ssh to 127\.0\.0\.1 failed: .*try: .*127\.0\.0\.1 true"):
        Cluster.attach(f"127.0.0.1:{file}", ssh=str(lab.ssh))


def held(clusters: Clusters, cluster_id: str) -> list[LiveCluster]:
    """Return what the server tracks of a cluster."""
    return [live for live in clusters.running() if live.file.cluster_id == cluster_id]


def ssh_here() -> list[psutil.Process]:
    """Return the ssh tunnels of this process."""
    return own_children("ExitOnForwardFailure=yes")


def secrets(file: Path) -> list[str]:
    content = json.loads(file.read_text())["connection"]
    return [content["key"], content["curve_secretkey"]]


def test_obstacles_between_ranks_and_notebook_are_reported(
    file: Path, jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start_process(jobs, file, 0, 2)
    content = first.wait_for_file(file)
    assert wait_until(lambda: bool(ranks_in(ROOT / f"{PREFIX}{content['cluster_id']}"))), "its nanny has connected"
    monkeypatch.setattr(client, "JOB_MEET_SECONDS", 2.5)
    with pytest.raises(LaunchError, match=r"1 of 2 ranks of .*job\.json connected within 2\.5 s"):
        Cluster.attach(str(file))
    lost = start_process(jobs, file.with_name("other.json"), 1, 2, "--join-timeout", "0.3", log="lost.log")
    assert lost.end() == 1
    assert "did not find" in lost.output
    assert "on a file system that all hosts of the job share" in lost.output
    second = start_process(jobs, file, 0, 1, log="second.log")  # another job
    start_process(jobs, file, 1, 2)
    monkeypatch.setattr(client, "JOB_MEET_SECONDS", LIMIT_S)
    cluster = Cluster.attach(str(file))
    assert cluster.run("rank").results == {0: 0, 1: 1}
    assert second.end() == 1
    assert f"{file} belongs to another job, which runs on" in second.output
    assert "%dist_shutdown" in second.output
    text = file.read_text()
    first.kill()  # the guard of the controller, as when a job is cancelled at once
    assert wait_until(lambda: cluster.closed)
    with pytest.raises(ClusterClosedError, match=r"job of .* has ended( after ranks? [01-]+ died)?; start it again"):
        cluster.run("1")
    assert wait_until(lambda: not file.exists())
    file.write_text(text)
    with pytest.raises(UsageError, match=r"the job that wrote .* has ended"):
        Cluster.attach(str(file))
    for each in jobs:
        each.end()


def test_localhost_is_an_ipv4_address_even_where_ipv6_is_preferred(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("needs root, for a namespace with an /etc/hosts of its own")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n::1 localhost ip6-localhost\n")
    code = (
        "from jupyter_disttrain.features.batch_jobs.launcher_env import own_address\n"
        "print(own_address('', {'MASTER_ADDR': 'localhost'}))"
    )
    script = 'mount --bind "$0" /etc/hosts && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, str(hosts), sys.executable, "-c", code]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "127.0.0.1\n"
