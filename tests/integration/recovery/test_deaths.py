"""A rank dies: it is reported and replaced, and the others keep their variables."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.client.cells import cell_run
from jupyter_disttrain.client.lifecycle import Lifecycle
from jupyter_disttrain.errors import ClusterClosedError, GivenUpError, RankFailure
from jupyter_disttrain.protocol.rank_death import RankDeath

from ...conftest import LAUNCHERS
from ...support.listeners import Interrupter
from ...support.process_tools import processes_of_cluster, wait_until
from ...support.recovery_tools import HOLD_GIL, HOST, NO_PEER, SUM, failure_of

if TYPE_CHECKING:
    from collections.abc import Iterator


CRASHING_CHILD = """import ctypes, multiprocessing
child = multiprocessing.get_context("fork").Process(target=ctypes.string_at, args=(0,)); child.start(); child.join()
assert child.exitcode == -11"""


@pytest.mark.parametrize("three", LAUNCHERS, indirect=True)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_dead_rank_is_replaced_and_others_keep_their_variables(three: Cluster, victim: int) -> None:
    pids = three.run("import os; kept = rank * 11; pair = dist.new_group([0, 1]); os.getpid()").results
    three.run("import sys; sys.stderr.write('of an earlier cell\\n')")
    three.run(CRASHING_CHILD)
    run = three.run("sys.stderr.write('of this cell\\n')\nwhile True: dist.all_reduce(torch.ones(1000))", block=False)
    assert wait_until(lambda: set(run.stderr.values()) == {"of this cell\n"})
    psutil.Process(pids[victim]).kill()
    with pytest.raises(RankFailure) as caught:
        run.wait()
    error = caught.value
    assert str(error) == (
        f"rank {victim} ({HOST}): RankDied: process {pids[victim]} was killed by SIGKILL: "
        "kill -9, or the kernel's out-of-memory killer"
    )
    (death,) = error.failures
    assert death.traceback == ("Last lines on stderr:", "of this cell")
    assert set(error.waited) == {0, 1, 2} - {victim}
    assert any(note.startswith(f"rank {victim} was replaced by a new process") for note in error.notes)
    gone = [note for note in error.notes if note.startswith("lost with the old") and "os.getpid()" in note]
    others = {0, 1} - {victim}
    assert len(gone) == (1 if victim < 2 else 0)
    assert all(f"rank {other}" in note and "pair = dist.new_group([0, 1])" in note for note in gone for other in others)
    assert three.run(SUM).results == {rank: [6.0] for rank in range(3)}
    kept = three.run("(os.getpid(), kept) if 'kept' in globals() else None").results
    assert kept == {rank: None if rank == victim else (pid, rank * 11) for rank, pid in pids.items()}


@pytest.mark.parametrize("three", LAUNCHERS, indirect=True)
def test_rank_that_dies_while_the_group_is_formed_is_replaced(three: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "jupyter_disttrain.client.recovery.replacement.RESPAWN_SECONDS", 1e6
    )  # MPI's failures are reported
    for second in (2, 0, 2, 0):  # it may die before the others wait for it, while they do, or after that
        pids = three.run("import os; os.getpid()").results
        psutil.Process(pids[1]).kill()
        assert wait_until(lambda old=pids[1]: three.table[1].info.pid != old)
        psutil.Process(pids[second]).kill()
        assert three.run(SUM).results == {rank: [6.0] for rank in range(3)}


def rank_processes(cluster: Cluster) -> dict[int, psutil.Process]:
    """Return the processes that are ranks, or will be, by pid: the child of each nanny."""
    parents = {each: _parent_in_cluster(each) for each in processes_of_cluster(cluster.cluster_id)}
    members = {each.pid for each, parent in parents.items() if parent}
    return {each.pid: each for each, parent in parents.items() if parent in members}


def _parent_in_cluster(process: psutil.Process) -> int | None:
    """Return the parent of a rank or nanny; None for other processes, and for one that has just ended."""
    try:
        return process.ppid() if "jupyter_disttrain.rank" in process.cmdline() else None
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return None


@pytest.mark.parametrize("three", LAUNCHERS, indirect=True)
def test_new_process_that_dies_while_starting_counts_once(three: Cluster) -> None:
    """Its nanny reports it repeatedly; counting each report would exhaust the attempts.

    It may be complete when it is killed, so it is killed once: three deaths in a row are the limit.
    """
    known = set(rank_processes(three))
    assert len(known) >= 3

    def kill_new_processes() -> bool:
        newcomers = {pid: process for pid, process in rank_processes(three).items() if pid not in known}
        known.update(newcomers)
        for process in newcomers.values():
            process.kill()
        return bool(newcomers)

    psutil.Process(three.table[1].info.pid).kill()
    assert wait_until(kill_new_processes)
    assert three.run(SUM).results == {rank: [6.0] for rank in range(3)}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_rank_that_dies_before_the_ranks_are_watched_is_replaced(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, died = Lifecycle.watch, threading.Event()

    def kill_and_watch(lifecycle: Lifecycle) -> None:
        launch = lifecycle.session.launch
        on_record = launch.registration.on_record

        def note(record: object) -> None:
            on_record(record)
            if isinstance(record, RankDeath):
                died.set()

        monkeypatch.setattr(launch.registration, "on_record", note)
        psutil.Process(launch.table[1].info.pid).kill()
        assert died.wait(60)
        watch(lifecycle)

    monkeypatch.setattr(Lifecycle, "watch", kill_and_watch)
    with Cluster(n=2, launcher=launcher) as cluster:
        assert cluster.run("x = torch.ones(1); dist.all_reduce(x); float(x)").results == {0: 2.0, 1: 2.0}


@pytest.mark.parametrize("three", LAUNCHERS, indirect=True)
def test_two_ranks_die_at_once(three: Cluster) -> None:
    pids = three.run("import os; os.getpid()").results
    run = three.run("dist.barrier() if rank == 0 else __import__('time').sleep(1000)", block=False)
    for rank in (1, 2):
        psutil.Process(pids[rank]).kill()
    with pytest.raises(RankFailure) as caught:
        run.wait()
    assert {failure.ename for failure in caught.value.failures} == {"RankDied"}
    fills = [note for note in caught.value.notes if "%dist_copy" in note]
    assert all("--from 0 " in note for note in fills), "only rank 0 has variables"
    assert three.run(SUM).results == {rank: [6.0] for rank in range(3)}


@pytest.mark.parametrize("three", LAUNCHERS, indirect=True)
def test_death_of_a_nanny_is_reported_as_its_rank_s(three: Cluster) -> None:
    entry = three.table[1]
    run = three.run("import time\nif rank == 1: time.sleep(1000)", block=False)
    os.kill(entry.nanny_pid, signal.SIGKILL)
    with pytest.raises(RankFailure, match=r"rank 1 .*: RankDied: process [0-9]+ was killed by SIGKILL"):
        run.wait(20)
    assert three.run(SUM).results == {rank: [6.0] for rank in range(3)}
    assert not psutil.pid_exists(entry.info.pid)


def test_all_ranks_restart_if_configured() -> None:
    with Cluster(n=2, launcher="local", on_rank_death="reset", name="reset") as cluster:
        cluster.run("kept = 1")
        with pytest.raises(RankFailure, match="RankDied") as caught:
            cluster.run("import os\nif rank == 1: os._exit(1)\ndist.barrier()")
        assert "(--on-rank-death reset)" in "".join(caught.value._render_traceback_())
        run = cluster.run("'kept' in globals()")
        assert run.results == {0: False, 1: False}
        assert [note for note in run.notes if note.startswith("all ranks were started again, with fresh variables")]


def test_cluster_ends_if_configured() -> None:
    with Cluster(n=2, launcher="local", on_rank_death="stop", name="stop") as cluster:
        pid = cluster.table[1].info.pid
        cluster.replace([1])  # at the user's request
        assert cluster.table[1].info.pid != pid
        assert cluster.run(SUM).results == {0: [3.0], 1: [3.0]}
        with pytest.raises(RankFailure, match="RankDied"):
            cluster.run("import os\nif rank == 1: os._exit(1)\ndist.barrier()")
        assert wait_until(lambda: cluster.closed)
        with pytest.raises(ClusterClosedError, match=r"rank 1 on .* died: exited with code 1 \(--on-rank-death stop"):
            cluster.run("1")


def test_process_aborted_by_gloo_over_a_size_is_reported(three: Cluster) -> None:
    failure = failure_of(three, "dist.broadcast(torch.ones(1 if rank == 2 else 3), 0)")
    cause = r"process \d+ was killed by SIGABRT: ranks passed tensors of different sizes or types to one collective, .*"
    assert re.fullmatch(rf"rank 2 \(.*\): RankDied: {cause}; compare the shapes on all ranks", str(failure))
    text = "\n".join(failure._render_traceback_())
    assert text.count("sizes or types to one collective") == 1
    assert "Extension modules" not in text


def test_only_unresponsive_ranks_are_replaced(three: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pids = three.run("import os; kept = rank * 11; os.getpid()").results
    monkeypatch.setattr(cell_run, "GIVE_UP_SECONDS", 0.0)
    code = (
        f"import os, signal, time\nbegun = {str(tmp_path / 'begun')!r}\n"
        "if rank == 1:\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
        f"    open(begun, 'w').close()\n    exec({HOLD_GIL!r})\n"
        "while not os.path.exists(begun): time.sleep(0.01)"
    )
    with pytest.raises(GivenUpError, match=r"rank 1 has not ended the cell.*%dist_reset -r 1 replaces just that rank"):
        three.run(code, listener=Interrupter(lambda run: run.state.running == {1}))
    killed, replaced = three.replace([1])
    assert killed.startswith(f"rank 1 on {HOST} was killed: it did not react within 3 s")
    assert replaced == (
        "rank 1 was replaced by a new process without its variables; run their cells again, or "
        "%dist_copy --from 0 --to 1 NAME..."
    )
    three.copy(["kept"], 0, 1)
    after = three.run("(__import__('os').getpid(), kept)").results
    assert after == {0: (pids[0], 0), 1: (three.table[1].info.pid, 0), 2: (pids[2], 22)}
    assert three.run(SUM).results == {rank: [6.0] for rank in range(3)}


def test_late_interrupt_hides_no_failure(three: Cluster) -> None:
    interrupter = Interrupter(lambda run: run.state.done and run.coming_back, times=1)
    with pytest.raises(RankFailure, match="RankDied"):
        three.run("import os\nif rank == 1: os._exit(1)\ndist.barrier()", listener=interrupter)
    assert interrupter.sent
    run = three.run(SUM)
    assert run.results == {rank: [6.0] for rank in range(3)}
    assert any(note.startswith("rank 1 was replaced") for note in run.notes), (
        "the interrupted wait is reported with the next cell"
    )


def test_unawaited_collective_delays_nothing(three: Cluster) -> None:
    three.run("import os; big = torch.ones(125_000_000)")
    begun = "work = dist.all_reduce(big, async_op=True)\ndel work"
    stop = "if rank == 1: __import__('threading').Timer(0.02, os.kill, (os.getpid(), 19)).start()"
    pid = three.table[1].info.pid
    run = three.run(f"{stop}\n{begun}\nif rank != 1: raise ValueError\n__import__('time').sleep(1000)", block=False)
    assert wait_until(lambda: run.running_now == {1})
    assert wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    psutil.Process(pid).kill()  # the others have parts of a message that never ends
    with pytest.raises(RankFailure, match="RankDied"):
        run.wait()
    assert three.run(SUM, timeout_s=30).results == {rank: [6.0] for rank in range(3)}


def test_rank_that_was_stopped_while_it_waited_for_a_peer_is_released(three: Cluster) -> None:
    """Linux continues its sleep, which has a time limit, as another system call."""
    run = three.run(NO_PEER, 1, block=False)
    assert wait_until(lambda: any("ProcessGroupGloo" in line for line in three.where()))
    rank = psutil.Process(three.table[1].info.pid)
    rank.suspend()
    assert wait_until(lambda: rank.status() == psutil.STATUS_STOPPED)
    rank.resume()
    psutil.Process(three.table[2].info.pid).kill()  # an interrupt would begin another sleep
    with pytest.raises(RankFailure) as caught:
        run.wait()
    assert "The peer did not connect" in str(caught.value)
    assert three.run("import os; os.getpid()", 1).results == {1: rank.pid}


def test_rank_is_replaced_where_no_more_threads_are_allowed(three: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "disttrain recovery":
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RankFailure, match="RankDied"):
        three.run("import os\nif rank == 1: os._exit(1)\ndist.barrier()")
    assert three.run(SUM).results == {rank: [6.0] for rank in range(3)}
    assert refused


def test_user_variable_named_comm_is_kept() -> None:
    with Cluster(n=2, backend="none", name="theirs") as cluster:
        cluster.run("comm = 'mine'")
        cluster.replace([1])
        assert cluster.run("comm", 0).results == {0: "mine"}


# Memory


@pytest.mark.usefixtures("pids")
def test_memory_use_per_rank_is_reported_when_an_allocation_fails(three: Cluster) -> None:
    three.run("import resource; limits = resource.getrlimit(resource.RLIMIT_AS)")
    limited = "if rank == 1: resource.setrlimit(resource.RLIMIT_AS, (2 << 33, limits[1]))\nmine = torch.ones(1 << 33)"
    error = failure_of(three, limited, 1)
    (failure,) = error.failures
    assert "memory" in failure.evalue
    (note,) = error.notes
    assert re.match(r"memory held: rank 0 \d+\.\d GiB, rank 1 \d+\.\d GiB, rank 2 ", note), note
    three.run("resource.setrlimit(resource.RLIMIT_AS, limits)")


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """A control group with 1 GiB, beyond which the kernel kills a process."""
    own = next(line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
    group = Path("/sys/fs/cgroup/memory") / own.strip("/") / f"disttrain-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    (group / "memory.limit_in_bytes").write_text(str(1 << 30))
    yield group
    group.rmdir()


def test_rank_killed_by_the_oom_killer_is_reported_as_such(three: Cluster, little_memory: Path) -> None:
    pid = three.table[1].info.pid
    (little_memory / "tasks").write_text(str(pid))
    error = failure_of(
        three, "hoard = []\nwhile True: hoard.append(bytearray(1 << 24) if rank == 1 else dist.barrier())"
    )
    assert "was killed by SIGKILL, most likely because memory ran out: the kernel killed a process" in str(error)
    assert re.match(r"memory held: rank 0 \d+\.\d GiB, rank 1 [01]\.\d GiB at most, rank 2 ", error.notes[0]), (
        error.notes
    )
    assert set(error.waited) == {0, 2}
    assert three.run(SUM).results == {rank: [6.0] for rank in range(3)}


# C code that keeps the GIL for four seconds; unlike a sleep, no signal ends it.
HELD = """import ctypes, time; libc, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(lock); libc.pthread_mutex_timedlock(lock, (ctypes.c_long * 2)(int(time.time()) + 4, 0))"""


def test_signal_handlers_restored_by_a_library_keep_crash_reports() -> None:
    restore = (
        "import signal\n"
        "for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    if signal.getsignal(number) is not None: signal.signal(number, signal.getsignal(number))"
    )
    with Cluster(n=1, launcher="local", backend="none", name="restored") as cluster:
        cluster.run(restore)
        run = cluster.run(HELD, block=False)
        assert wait_until(lambda: any("holds the GIL, at line 2" in line for line in cluster.where()))
        run.wait()
        with pytest.raises(RankFailure, match=r"line 2: RankDied: .* was killed by SIGSEGV"):
            cluster.run("import ctypes\nctypes.string_at(0)")
