"""Ranks on several hosts, in one MPI job and by ssh.

Covers: rank order, training, unencrypted traffic, listening sockets, forwarded variables, faults of a rank, recovery,
ends that leave nothing.
Does not cover: faults of hosts and network (``test_host_faults``), the pre-flight (``test_preflight``).
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.client.registry.cluster_file import ClusterFile
from jupyter_disttrain.config.hosts import parse_hosts
from jupyter_disttrain.errors import RankFailure

from ...lab.places import command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...lab import Lab
    from ...support.notebook_driver import Notebook

SECRET = "correct-horse-battery-staple"
TRAINING = """
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank)
losses = []
for step in range(20):
    x = torch.randn(32, 8, generator=generator)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(float(loss.detach()))
losses[0], losses[-1], model.module.weight.tolist()
"""


@pytest.fixture(scope="module", params=["mpi", "ssh"])
def hosted(request: pytest.FixtureRequest, lab: Lab) -> Iterator[Cluster]:
    """Two ranks on each of two hosts."""
    os.environ["HOSTED_SECRET"] = SECRET
    hosts = parse_hosts("node1:2,node2:2")
    ssh = f"{lab.ssh} -o IdentityFile=~/.ssh/another"  # a value that a shell would require quoted
    try:
        with Cluster(launcher=request.param, hosts=hosts, ssh=ssh, forward=("HOSTED_SECRET",)) as cluster:
            yield cluster
    finally:
        del os.environ["HOSTED_SECRET"]
    assert not lab.left_on("node1")
    assert not lab.left_on("node2")


def test_ranks_are_ordered_by_host(hosted: Cluster, lab: Lab) -> None:
    code = (
        "import os, socket; socket.gethostname(), *(os.environ[n] for n in ('NODE_RANK', 'LOCAL_RANK', 'MASTER_ADDR'))"
    )
    master = lab.address("node1")
    run = hosted.run(code)
    assert set(run.stderr.values()) == {""}, "torch's warning on addresses without names is dropped"
    assert run.results == {
        0: ("node1", "0", "0", master),
        1: ("node1", "0", "1", master),
        2: ("node2", "1", "0", master),
        3: ("node2", "1", "1", master),
    }
    assert hosted.start_report.network == f"network {lab.head_address.rpartition('.')[0]}.0/24 (eth0)"


def test_model_is_trained_over_hosts(hosted: Cluster) -> None:
    results = hosted.run(TRAINING).results
    first, last, weights = results[0]
    assert last < first / 10
    assert all(other[2] == weights for other in results.values())
    assert set(hosted.run("comm is None").results.values()) == {hosted.config.launcher == "ssh"}


def test_cells_output_and_values_cross_the_network_encrypted(hosted: Cluster, lab: Lab) -> None:
    with lab.capture() as capture:
        run = hosted.run(f"word = 'written' + ' in a cell'\nprint('said' + ' by a rank')\n'{SECRET}'[::-1] + word")
        hosted.push({"pushed": b"pushed by the notebook"})
        hosted.run("dist.broadcast_object_list(['told' + ' from rank to rank'])")
    assert run.results[3] == SECRET[::-1] + "written in a cell"
    clear = b"\n".join([capture.data, *capture.streams().values()])
    for text in (b"in a cell", b"by a rank", SECRET.encode(), SECRET[::-1].encode(), b"pushed by the notebook"):
        assert text not in clear, text
    # torch's own traffic can't be encrypted here; finding it shows that the capture is complete.
    assert b"told from rank to rank" in clear


def test_secrets_are_in_no_command_line_and_no_readable_file(hosted: Cluster, lab: Lab) -> None:
    assert set(hosted.run("import os; os.environ['HOSTED_SECRET']").results.values()) == {SECRET}
    processes = [*psutil.process_iter(), *lab.processes("node1"), *lab.processes("node2")]
    key = hosted._session.launch.link.session.key.decode()
    for process in processes:
        try:
            command_line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        assert SECRET not in command_line
        assert key not in command_line
    for path in (hosted._session.launch.folders.profile / "security").iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


def test_only_the_hosts_network_has_listening_sockets(hosted: Cluster, lab: Lab) -> None:
    cluster_file = ClusterFile.read(hosted._session.launch.folders.profile)
    ours = set(map(int, cluster_file.births["controller"]))
    ours |= {child.pid for pid in list(ours) for child in psutil.Process(pid).children(recursive=True)}
    at_head = [each for each in lab.listening("head") if each.pid in ours]
    assert len(at_head) == 6  # registration, mux, control, iopub, two for heartbeats
    assert {each.address for each in at_head} == {lab.head_address}
    for host in ("node1", "node2"):
        ranks = [each for each in lab.listening(host) if each.program not in ("sshd", "slurmd")]
        everywhere = {each.program for each in ranks if each.address not in (lab.address(host), "127.0.0.1")}
        # Open MPI listens on all interfaces: its daemon, which accepts only holders of the job's key, and its ranks,
        # where a filter drops what does not come from the hosts' network.
        assert everywhere <= ({"prted", "python"} if hosted.config.launcher == "mpi" else set()), ranks


def test_killed_rank_is_replaced_on_its_host(hosted: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    hosted.run("kept = rank")
    monkeypatch.delenv("HOSTED_SECRET")  # as in a notebook that joined afterwards
    with pytest.raises(RankFailure, match=r"rank 3 \(node2\).*SIGKILL") as caught:
        hosted.run(f"import os\nif rank == 3: os.kill(os.getpid(), {signal.SIGKILL})\ndist.barrier()")
    assert not caught.value.failures[0].traceback, "it left no stderr lines"
    code = "import socket; socket.gethostname(), globals().get('kept'), comm and comm.allreduce(1)"
    counted = 4 if hosted.config.launcher == "mpi" else None
    assert hosted.run(code).results == {
        0: ("node1", 0, counted),
        1: ("node1", 1, counted),
        2: ("node2", 2, counted),
        3: ("node2", None, counted),
    }
    assert set(hosted.run("import os; os.environ['HOSTED_SECRET']").results.values()) == {SECRET}


def test_death_of_a_nanny_on_another_host_is_reported_as_its_rank_s(hosted: Cluster) -> None:
    kill = f"import os, threading\nif rank == 2:\n    os.kill(os.getppid(), {signal.SIGKILL})\n"
    with pytest.raises(RankFailure, match=r"rank 2 \(node2\)"):
        hosted.run(f"{kill}    threading.Event().wait()  # the kernel ends it a moment later\ndist.barrier()")
    assert hosted.run("dist.barrier(); rank").results == {0: 0, 1: 1, 2: 2, 3: 3}


def test_interrupt_releases_ranks_on_all_hosts(hosted: Cluster) -> None:
    hosted.run("kept = rank")
    run = hosted.run("import threading\nif rank: dist.barrier()\nthreading.Event().wait()", block=False)
    hosted.interrupt()
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        run.wait()
    assert hosted.run("dist.barrier(); kept").results == {0: 0, 1: 1, 2: 2, 3: 3}


@pytest.mark.parametrize("is_lost", [False, True])
def test_end_of_mpiexec_is_named_and_the_session_continues(hosted: Cluster, *, is_lost: bool) -> None:
    if hosted.config.launcher != "mpi":
        return
    if hosted._session.launch.state.mpi_lost:  # Open MPI may start no process after a nanny was killed
        hosted.reset()
    if is_lost:
        hosted._session.launch.state.mpi_lost = "an earlier death"
    run = hosted.run("import threading\nif rank: dist.barrier()\nthreading.Event().wait()", block=False)
    engines = next(iter(hosted._session.launch.state.processes._cluster.engines.values()))  # type: ignore[union-attr]
    os.kill(engines.process.pid, signal.SIGKILL)
    with pytest.raises(RankFailure):
        run.wait()
    how = (
        f"mpiexec (process {engines.process.pid}) was killed by SIGKILL: kill -9, or the kernel's out-of-memory killer"
    )
    end = f"{how}; the ranks on other hosts ended with it"
    lost = f"comm is lost: {end}; use dist, or start a new MPI job with %dist_reset"
    assert [note for note in run.notes if "mpiexec" in note] == [end if is_lost else lost]
    assert hosted.run("dist.barrier(); rank").results == {0: 0, 1: 1, 2: 2, 3: 3}
    hosted.reset()
    assert set(hosted.run("comm.allreduce(1)").results.values()) == {4}


@pytest.mark.parametrize("launcher", ["mpi", "ssh"])
def test_search_path_for_ranks_is_set_when_python_starts(launcher: str, lab: Lab) -> None:
    paths = {"PYTHONPATH": f"/modules:{os.environ.get('PYTHONPATH', '')}", "LD_LIBRARY_PATH": "/libraries"}
    given = tuple(f"{name}={value}" for name, value in paths.items())
    seen = (
        "import sys; '/modules' in sys.path, b'LD_LIBRARY_PATH=/libraries' in open('/proc/self/environ', 'rb').read()"
    )
    hosts = parse_hosts("node1:1,node2:1")
    with Cluster(launcher=launcher, hosts=hosts, ssh=str(lab.ssh), backend="none", forward=given) as cluster:
        assert set(cluster.run(seen).results.values()) == {(True, True)}
        with pytest.raises(RankFailure, match="rank 1"):
            cluster.run("import os\nif rank == 1: os._exit(1)")
        assert set(cluster.run(seen).results.values()) == {(True, True)}


@pytest.mark.parametrize(
    "chosen", [{"OMPI_MCA_btl_tcp_if_exclude": "lo"}, {"OMPI_MCA_pml": "ob1", "PRTE_MCA_prte_if_exclude": "lo"}]
)
def test_mpi_connects_two_hosts_whatever_mpi_settings_the_user_has(
    chosen: dict[str, str], lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    with Cluster(hosts=parse_hosts("node1:1,node2:1"), ssh=str(lab.ssh), backend="none") as cluster:
        assert cluster.run("comm.allreduce(1)").results == {0: 2, 1: 2}
        code = f"import os; {{name: os.environ[name] for name in {tuple(chosen)}}}"
        assert cluster.run(code).results == dict.fromkeys((0, 1), chosen)


@pytest.mark.usefixtures("folder")
def test_hostfile_and_counts_start_ranks(lab: Lab, bare_notebook: Notebook) -> None:
    bare_notebook.run(
        "open('hosts', 'w').write('node1 slots=8  # the first\\nnode2 slots=8\\nnode3 slots=8\\n')"
    ).check()
    options = f"--hostfile hosts --node-count 2 --process-count-per-node 1 --launcher ssh --ssh {lab.ssh}"
    bare_notebook.run(f"%dist_init {options} --backend none").check()
    output = bare_notebook.run("%%distributed\nimport socket; print(socket.gethostname())").text
    assert "rank 0    │ node1" in output
    assert "rank 1    │ node2" in output
    bare_notebook.run("%dist_shutdown").check()


@pytest.fixture
def ipv6(lab: Lab) -> Iterator[list[str]]:
    """Give the hosts and the head IPv6 addresses as well; return those of the hosts."""
    network = f"fd77:{lab.place.lab_id:x}::"
    addresses = [f"{network}1{number}" for number, _ in enumerate(lab.hosts)]
    command("ip", "address", "add", f"{network}1/64", "dev", lab.place.bridge, "nodad")
    for host, address in zip(lab.hosts, addresses, strict=True):
        lab.run(host, f"ip address add {address}/64 dev eth0 nodad")
    yield addresses
    for host, address in zip(lab.hosts, addresses, strict=True):
        lab.run(host, f"ip address delete {address}/64 dev eth0")
    command("ip", "address", "delete", f"{network}1/64", "dev", lab.place.bridge)


def test_ssh_ranks_communicate_over_ipv6(lab: Lab, ipv6: list[str]) -> None:
    hosts = parse_hosts(f"[{ipv6[0]}]:1,[{ipv6[1]}]:1")
    with Cluster(launcher="ssh", hosts=hosts, ssh=str(lab.ssh)) as cluster:
        code = "import os; total = torch.ones(1); dist.all_reduce(total); os.environ['MASTER_ADDR'], float(total)"
        assert cluster.run(code).results == dict.fromkeys((0, 1), (ipv6[0], 2.0))
        head = [each for each in lab.listening("head") if each.address.startswith("fd77:")]
        assert len(head) == 6, "the controller listens only there"
        with pytest.raises(RankFailure, match=r"rank 1 \(node2\)"):
            cluster.run("import os\nif rank == 1: os._exit(1)\ndist.barrier()")
        assert cluster.run("dist.barrier(); rank").results == {0: 0, 1: 1}
