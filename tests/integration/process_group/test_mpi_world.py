"""Release and repair MPI's world communicator."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import Future
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.client.recovery.mpi_respawn import Respawn
from jupyter_disttrain.errors import LaunchError, RankFailure
from jupyter_disttrain.launchers.mpi import find_mpiexec
from jupyter_disttrain.rank_sessions import HeldSession

from ...support.process_tools import wait_until
from ...support.recovery_tools import SUM, failure_of, interrupted, stop
from ...support.shell_tools import left_idle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORLD = "from mpi4py import MPI; (comm.allreduce(1), comm.Get_rank(), MPI.COMM_WORLD.allreduce(rank), row.allreduce(1))"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    """Three ranks of one MPI job."""
    with Cluster(n=3, name="world", grace_s=0.5, hang_after_s=2.0) as cluster:
        yield cluster


@pytest.fixture
def world(ranks: Cluster) -> Iterator[Cluster]:
    """Those ranks with a variable to keep; after each test MPI must have a world of all of them."""
    ranks.run("kept = rank * 11; row = comm.Split(0, rank); held = {'in a dict': comm}")
    yield ranks
    assert left_idle(ranks)
    assert ranks.run("comm.allreduce(1)", timeout_s=20).results == {0: 3, 1: 3, 2: 3}
    assert ranks.run(SUM, timeout_s=20).results == {rank: [6.0] for rank in range(3)}


@pytest.mark.parametrize(
    "call",
    [
        "comm.Barrier()",
        "total = comm.allreduce(1)",
        "comm.recv(source=0, tag=5)",
        "request = comm.irecv(source=0, tag=6); request.wait()",
        "from mpi4py import MPI; MPI.COMM_WORLD.bcast(None, root=0)",
        "(lambda comm, here: here + comm.allreduce(comm.Get_rank()))(comm, 1)",
    ],
)
def test_interrupt_reaches_ranks_that_wait_in_mpi(world: Cluster, call: str) -> None:
    error = interrupted(world, f"if rank:\n    {call}\nelse:\n    while True: pass", {1, 2})
    assert {failure.ename for failure in error.failures} == {"KeyboardInterrupt"}
    assert world.run(WORLD).results == {rank: (3, rank, 3, 3) for rank in range(3)}
    assert world.run("held['in a dict'] is comm and kept").results == {0: 0, 1: 11, 2: 22}


SLOW_SEARCHES = """
from jupyter_disttrain.rank.process_group.object_replacement import _Replacing as Replacing
searched, search = [], Replacing.untracked
def count(self):
    searched.append(self)
    return search(self)
Replacing.untracked = count
"""


def test_comm_is_replaced_without_a_search_of_the_whole_heap() -> None:
    """mpi4py itself holds COMM_WORLD where the collector does not show it; that search takes seconds."""
    with Cluster(n=2, name="search", grace_s=0.5, hang_after_s=2.0) as cluster:
        cluster.run(SLOW_SEARCHES)
        for _ in range(2):
            interrupted(cluster, "if rank:\n    comm.Barrier()\nelse:\n    while True: pass", {1})
            assert cluster.run("comm.allreduce(1), len(searched)").results == {0: (2, 0), 1: (2, 0)}
        cluster.run("import gc; held = (comm, 'in a tuple'); gc.collect()")  # the collector no longer tracks it
        interrupted(cluster, "if rank:\n    comm.Barrier()\nelse:\n    while True: pass", {1})
        assert cluster.run("comm.allreduce(1), held[0] is comm").results == {0: (2, True), 1: (2, True)}
        assert cluster.run("Replacing.untracked = search; len(searched) > 0").results == {0: True, 1: True}


def test_communicator_of_a_request_is_found_after_another_rank_revoked_it(world: Cluster) -> None:
    """Otherwise the release revokes all communicators, including those of the user."""
    world.run("from mpi4py import MPI; from jupyter_disttrain.rank.mpi.comms import comm_within")
    world.run("other = comm.Dup(); request = other.irecv(source=0, tag=6)")
    world.run(
        "other.Revoke()"
    )  # separately: Open MPI can crash when a communicator is revoked before all ranks have created it
    assert world.run("comm_within(MPI, request) == other").results == {0: True, 1: True, 2: True}
    world.run("other.Free(); del other, request")


def test_new_process_has_no_world_before_all_ranks_are_present(world: Cluster) -> None:
    run = world.run("while True: pass", 0, block=False)
    assert wait_until(lambda: world.table[0].state == "running")
    pid = world.table[1].info.pid
    psutil.Process(pid).kill()
    assert wait_until(lambda: world.table[1].info.pid != pid and world.table[1].state == "idle", 60)
    for call in ("comm.allreduce(1)", "from mpi4py import MPI; MPI.COMM_WORLD.allreduce(1)"):
        with pytest.raises(RankFailure, match="no world of all ranks: it is rebuilt with the next process group"):
            world.run(call, 1)
    # It can still be released, and help to start another process.
    world._session.supervisor.release(forced=True)
    other = world.table[2].info.pid
    psutil.Process(other).kill()
    assert wait_until(lambda: world.table[2].info.pid != other and world.table[2].state == "idle", 60)
    failure = stop(world, run)
    assert not [note for note in failure.notes if "could not be released" in note]
    world.run("row = comm.Split(0, rank)")
    assert world.run(WORLD).results == {rank: (3, rank, 3, 3) for rank in range(3)}


def test_second_interrupt_ends_undetectable_calls(world: Cluster) -> None:
    run = world.run("if rank:\n    exec('comm.Barrier()')\nelse:\n    while True: pass", block=False)
    assert wait_until(lambda: len(world.where()) == 2)
    world.interrupt()
    assert wait_until(lambda: run.running_now == {1, 2})
    world.interrupt(forced=True)
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        run.wait()


def test_rank_about_to_wait_during_a_revoke_is_woken(world: Cluster) -> None:
    """Open MPI has a race there, which about one in twelve of these hit."""
    for _ in range(20):
        run = world.run("while True: comm.allreduce(1)", block=False)
        assert wait_until(lambda: all(entry.state == "running" for entry in world.table))
        world.interrupt()
        world.interrupt(forced=True)
        with pytest.raises(RankFailure) as caught:
            run.wait(timeout_s=30)
        others = [failure for failure in caught.value.failures if failure.ename != "KeyboardInterrupt"]
        assert not others, [(failure.ranks, failure.ename, failure.evalue) for failure in others]


def test_only_the_communicator_that_ranks_wait_in_is_revoked(world: Cluster) -> None:
    interrupted(world, "if rank:\n    row.Barrier()\nelse:\n    while True: pass", {1, 2})
    assert world.run("comm.allreduce(1)").results == {0: 3, 1: 3, 2: 3}
    with pytest.raises(RankFailure, match="MPI_ERR_REVOKED"):
        world.run("row.allreduce(1)")


def test_ranks_waiting_in_mpi_for_a_failed_rank_are_released(world: Cluster) -> None:
    error = failure_of(world, "if rank == 1:\n    raise ValueError('the cause')\ncomm.Barrier()")
    (failure,) = error.failures
    assert failure.evalue == "the cause"
    assert set(error.waited) == {0, 2}


def test_hang_in_mpi_is_explained_and_a_loop_is_not_one(world: Cluster) -> None:
    run = world.run("if rank:\n    comm.Barrier()\nelse:\n    while True: pass", block=False)
    assert wait_until(lambda: "ranks 1-2: waits in MPI Barrier at line 2: comm.Barrier()" in run.hang)
    stop(world, run)
    run = world.run("step = 0\nwhile True:\n    step = comm.allreduce(step + 1)", block=False)
    reports = run._supervisor.stacks.reports
    assert wait_until(lambda: reports[0].answered_at - reports[0].asked_at > 0)
    for _ in range(8):
        samples = run._supervisor.stacks.collect({0, 1, 2}, 5)
        assert max(sample.waits_s or 0.0 for sample in samples.values()) < 1.0
    stop(world, run)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_new_process_replaces_a_dead_one_in_the_world(world: Cluster, victim: int) -> None:
    pids = {entry.info.rank: entry.info.pid for entry in world.table}
    run = world.run("while True: comm.allreduce(1)", block=False)
    psutil.Process(pids[victim]).kill()
    with pytest.raises(RankFailure, match="RankDied") as caught:
        run.wait()
    assert set(caught.value.waited) == {0, 1, 2} - {victim}
    code = "from mpi4py import MPI; (comm.allreduce(1), comm.Get_rank(), MPI.COMM_WORLD.allreduce(rank))"
    assert world.run(code).results == {rank: (3, rank, 3) for rank in range(3)}
    living = [rank for rank in range(3) if rank != victim]
    assert world.run("held['in a dict'] is comm and kept", living).results == {rank: rank * 11 for rank in living}


def test_new_process_has_the_same_start_timeout_as_the_first_ones(
    world: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jupyter_disttrain.client.recovery.replacement.RESPAWN_SECONDS", 0.0)
    before = world.table[1].info.pid
    psutil.Process(before).kill()
    assert wait_until(lambda: world.table[1].info.pid != before)
    assert not world._session.launch.state.mpi_lost


def test_two_new_processes_at_once(world: Cluster) -> None:
    pids = {entry.info.rank: entry.info.pid for entry in world.table}
    run = world.run("comm.Barrier() if rank == 0 else __import__('time').sleep(1000)", block=False)
    for rank in (1, 2):
        psutil.Process(pids[rank]).kill()
    with pytest.raises(RankFailure):
        run.wait()
    assert world.run("(comm.allreduce(1), comm.Get_rank())").results == {rank: (3, rank) for rank in range(3)}


def test_world_of_new_processes_only() -> None:
    with Cluster(n=2, name="all-new") as cluster:
        for rank in (0, 1, 0, 1):
            cluster.replace([rank])
            if cluster._session.launch.state.mpi_lost:  # possible once no process is left that the job began with
                with pytest.raises(RankFailure, match=r"MPI has no world of all ranks: .*%dist_reset"):
                    cluster.run("comm.allreduce(1)")
            else:
                assert cluster.run("comm.allreduce(1)").results == {0: 2, 1: 2}
            assert cluster.run(SUM).results == {0: [3.0], 1: [3.0]}
        cluster.reset()
        assert cluster.run("comm.allreduce(1)").results == {0: 2, 1: 2}


def test_unrepairable_mpi_is_reported_by_comm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_btl", "self,sm")  # set by the user, and not passed to later processes
    with Cluster(n=2, name="comm") as cluster:
        assert cluster.run("comm.allreduce(1)").results == {0: 2, 1: 2}
        cluster.replace([1])
        expected = (
            "MPI has no world of all ranks: rank 1 died, and was replaced by a process beside the MPI job; "
            "use dist, or .*%dist_reset"
        )
        generation = cluster._session.launch.state.generation
        for rank in (0, 1):
            with pytest.raises(RankFailure, match=expected):
                cluster.run("comm.allreduce(1)", rank)
        assert cluster._session.launch.state.generation == generation, "the group is intact, and not formed again"
        assert cluster.run(SUM).results == {0: [3.0], 1: [3.0]}
        cluster.reset()
        assert cluster.run("comm.allreduce(1)").results == {0: 2, 1: 2}


def test_new_process_joins_ranks_whose_working_directory_was_deleted(world: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    world.run(f"import os; before = os.getcwd(); os.chdir({str(folder)!r})")
    folder.rmdir()
    assert not any("MPI" in note for note in world.replace([1]))
    assert world.run("comm.allreduce(1)").results == {0: 3, 1: 3, 2: 3}
    assert world.run("os.getcwd() == before", [0, 2]).results == {0: True, 2: True}
    world.run("kept = rank * 11; row = comm.Split(0, rank); held = {'in a dict': comm}")


@pytest.mark.parametrize("mpiexec_ends", [False, True])
def test_no_rank_waits_for_dead_spawners_when_all_ranks_die(
    monkeypatch: pytest.MonkeyPatch, *, mpiexec_ends: bool
) -> None:
    monkeypatch.setattr("jupyter_disttrain.client.recovery.replacement.RESPAWN_SECONDS", 1e6)
    with Cluster(n=2, name="all-die", grace_s=0.5) as cluster, ExitStack() as before_a_new_process:
        mpiexec = mpiexec_of(cluster)
        if mpiexec_ends:  # with its last rank, which is not reported again
            before_a_new_process.enter_context(cluster._session.launch.replacer.one_at_a_time)
        else:
            mpiexec.suspend()
        for pid in cluster.run("import os; os.getpid()").results.values():
            psutil.Process(pid).kill()
        if mpiexec_ends:
            assert wait_until(lambda: not mpiexec.is_running())
            before_a_new_process.close()
        assert wait_until(
            lambda: (
                all(entry.pid_gone.is_set() for entry in cluster.table) or bool(cluster._session.launch.state.mpi_lost)
            )
        )
        assert cluster.run(SUM).results == {0: [3.0], 1: [3.0]}
        assert cluster._session.launch.state.mpi_lost.endswith(
            "within the MPI job: the ranks that were to start a new process have died"
        )
        if not mpiexec_ends:
            mpiexec.resume()


@pytest.mark.parametrize(("code", "is_given_up"), [("time.sleep(1000)", True), ("while True: pass", False)])
def test_new_process_without_a_reply_from_mpiexec_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, is_given_up: bool
) -> None:
    monkeypatch.setattr("jupyter_disttrain.client.recovery.mpi_respawn.ASLEEP_SECONDS", 0.5)
    nanny = [sys.executable, "-c", f"import os, time\nif os.fork(): os.wait()\n{code}"]
    processes = SimpleNamespace(rank_processes=lambda: list(started), command=())
    started: list[psutil.Process] = []
    attempt = Respawn(None, [], processes, "", tmp_path, may_hang=True)  # type: ignore[arg-type]
    starter = SimpleNamespace(state="idle", info=SimpleNamespace(rank=0))
    attempt._starters = [starter]  # type: ignore[list-item]
    attempt._asked = {0: Future()}
    with subprocess.Popen(nanny) as process:
        started.append(psutil.Process(process.pid))
        assert wait_until(started[0].children)
        (rank,) = started[0].children()
        HeldSession(tmp_path, rank.pid)  # as of its nanny
        try:
            if is_given_up:
                with pytest.raises(LaunchError, match="mpiexec does not reply to the new process"):
                    wait_until(attempt.check)  # which returns nothing until it raises
            else:
                used_s = rank.cpu_times().user
                assert wait_until(lambda: attempt.check() or rank.cpu_times().user > used_s + 1.0)
        finally:
            rank.kill()
            process.kill()


def mpiexec_of(cluster: Cluster) -> psutil.Process:
    """Return the mpiexec of this cluster; others may run."""
    (engines,) = cluster._session.launch.state.processes._cluster.engines.values()  # type: ignore[union-attr]
    return psutil.Process(engines.process.pid)


def test_ranks_and_their_comm_outlive_mpiexec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jupyter_disttrain.client.recovery.replacement.RESPAWN_SECONDS", 1e6)
    with Cluster(n=3, name="outlive", grace_s=0.5) as cluster:
        cluster.run("kept = rank")
        mpiexec = mpiexec_of(cluster)
        mpiexec.kill()
        assert wait_until(lambda: not mpiexec.is_running())
        # MPI looks for events in some calls only.
        code = "for _ in range(20_000): total = comm.allreduce(rank)"
        assert cluster.run(f"{code}\n(total, comm.Dup().allreduce(1), kept)").results == {
            rank: (3, 3, rank) for rank in range(3)
        }
        run = cluster.run("while True: pass", 2, block=False)
        psutil.Process(cluster.table[2].info.pid).kill()
        with pytest.raises(RankFailure, match="killed by SIGKILL"):
            run.wait()
        assert cluster.run(SUM, timeout_s=60).results == {rank: [6.0] for rank in range(3)}
        assert cluster.run("kept", [0, 1]).results == {0: 0, 1: 1}
        why = rf"mpiexec \(process {mpiexec.pid}\) was killed by SIGKILL: .*; MPI can't start processes without it"
        assert re.fullmatch(why, cluster._session.launch.state.mpi_lost), cluster._session.launch.state.mpi_lost


def test_rank_that_joins_later_does_not_wait_for_processes_of_a_dead_mpiexec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jupyter_disttrain.client.recovery.replacement.RESPAWN_SECONDS", 1e6)
    cluster = Cluster(n=2, name="later", keep=True, grace_s=0.5)
    mpiexec = mpiexec_of(cluster)
    mpiexec.kill()
    assert wait_until(lambda: not mpiexec.is_running())
    cluster.detach()
    with Cluster.attach("later") as again:
        psutil.Process(again.table[1].info.pid).kill()
        assert wait_until(lambda: bool(again._session.launch.state.mpi_lost))
        assert again.run(SUM, timeout_s=60).results == {0: [3.0], 1: [3.0]}
        assert again._session.launch.state.mpi_lost == "mpiexec has ended; MPI can't start processes without it"


JOIN_LATE = """
import os, pathlib, sys, time
from jupyter_disttrain.rank.startup.app import _init_mpi

folder = pathlib.Path(sys.argv[1])
sys.stderr = (folder / f"{os.getpid()}.said").open("w", buffering=1)
while not (folder / "go").exists():
    time.sleep(0.02)
_init_mpi()
sys.stderr.write("it joined")
"""


@pytest.mark.parametrize("is_removed", [False, True])
def test_rank_whose_mpiexec_has_ended_starts_no_job_of_its_own(tmp_path: Path, is_removed: bool) -> None:
    temporary, processes_of_cluster, of_mpiexec = folders = [
        tmp_path / name for name in ("temporary", "cluster", "mpiexec")
    ]
    for folder in folders:
        folder.mkdir()
    settings = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TMPDIR": str(temporary)}
    settings |= {
        "DISTTRAIN_LOCAL_DIR": str(processes_of_cluster),
        "OMPI_MCA_btl_sm_backing_directory": str(processes_of_cluster),
    }
    settings["PRTE_MCA_prte_local_tmpdir_base"] = str(of_mpiexec)
    command = [find_mpiexec(), "--oversubscribe", "-n", "2", sys.executable, "-c", JOIN_LATE, str(tmp_path)]
    with subprocess.Popen(command, env=os.environ | settings, start_new_session=True) as mpiexec:
        assert wait_until(lambda: len(list(tmp_path.glob("*.said"))) == 2)
        mpiexec.kill()
    ranks = [psutil.Process(int(path.stem)) for path in tmp_path.glob("*.said")]
    if is_removed:
        processes_of_cluster.rmdir()
    (tmp_path / "go").touch()
    _gone, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive
    text = {path.read_text() for path in tmp_path.glob("*.said")}
    what = "the cluster" if is_removed else "mpiexec"
    assert text <= {f"this process can't join the MPI job: {what} has ended\n", ""}, text  # "": MPI may crash
    assert list(temporary.iterdir()) == []
    assert processes_of_cluster.exists() is not is_removed
