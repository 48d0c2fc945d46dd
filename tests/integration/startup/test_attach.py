"""A cluster outlives its notebook, and is attached again with its state."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import CellTimeoutError, ClusterClosedError, RankFailure, UsageError

from ...support.notebook_driver import Notebook
from ...support.process_tools import processes_of_cluster, wait_until
from ...support.recovery_tools import SUM, stop
from ...support.shell_tools import command

if TYPE_CHECKING:
    from collections.abc import Callable

CONTROLLER = "jupyter_disttrain.client.transport.controller"
COUNT = """
import pathlib, time
for number in range(10_000):
    print("line", number, flush=True)
    time.sleep(0.01)
    if pathlib.Path({path!r}).exists():
        break
number
"""


WAIT = "import pathlib, time\nwhile not pathlib.Path({path!r}).exists(): time.sleep(0.01)"


def log_of(cluster: Cluster, rank: int) -> str:
    """Return the content of a rank's log."""
    path = cluster._session.launch.folders.rank_log(rank)
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("persistent", ["local"], indirect=True)
def test_variables_are_kept(persistent: Cluster) -> None:
    pids = persistent.run("import os; mine = torch.arange(3) * rank; os.getpid()").results
    last = persistent.run("1").number
    persistent.detach()
    with pytest.raises(ClusterClosedError, match="was detached"):
        persistent.run("1")
    with Cluster.attach("kept") as again:
        assert again.missed == []
        assert again.run("os.getpid()").results == pids
        assert again.pull("mine", 1)[1]["mine"].tolist() == [0, 1, 2]
        assert again.run(SUM).results == {0: [3.0], 1: [3.0]}
        assert again.run("1").number > last, "cell numbers continue"


def test_running_cells_continue_without_losing_output(light: Cluster, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    for rank in (0, 1):
        light.run(COUNT.format(path=str(stop)), rank, block=False)
    assert wait_until(lambda: "line 20\n" in log_of(light, 0))
    light.detach()
    assert wait_until(lambda: "line 60\n" in log_of(light, 0) and "line 60\n" in log_of(light, 1))
    with Cluster.attach("light") as again:
        assert [run.ranks for run in again.missed] == [(0,), (1,)]
        assert {entry.state for entry in again.table} == {"running"}
        with pytest.raises(UsageError, match="still run"):
            again.run("1")
        stop.touch()
        for run in again.missed:
            ((rank, last),) = run.wait().results.items()
            assert run.stdout[rank] == "".join(f"line {number}\n" for number in range(last + 1))
        assert again.run("rank").results == {0: 0, 1: 1}


def test_cell_that_ended_meanwhile_is_reported_with_its_value(light: Cluster, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    light.run(COUNT.format(path=str(stop)), block=False)
    assert wait_until(lambda: "line 1\n" in log_of(light, 0))
    light.detach()
    stop.touch()
    assert wait_until(lambda: "idle" in command("list").stdout)
    with Cluster.attach("light") as again:
        (run,) = again.missed
        assert run.done
        run.wait()
        for rank, last in run.results.items():
            assert run.stdout[rank].splitlines() == [f"line {number}" for number in range(last + 1)]


def test_cell_whose_end_was_shown_or_that_has_no_waiter_is_not_reported(light: Cluster) -> None:
    never_waited = light.run("'of the first'", 0, block=False)
    assert wait_until(lambda: never_waited.done)
    light.run("print('seen')")
    light.detach()
    with Cluster.attach("light") as again:
        assert again.missed == []
        assert again.run("rank").results == {0: 0, 1: 1}


def test_abandoned_cell_is_resumed_and_ends(light: Cluster, tmp_path: Path) -> None:
    ignores_interrupts = "import signal\nsignal.signal(signal.SIGINT, lambda *_: None)\n"
    with pytest.raises(CellTimeoutError):
        light.run(ignores_interrupts + WAIT.format(path=str(tmp_path / "stop")), 1, timeout_s=0.1)
    light.detach()
    with Cluster.attach("light") as again:
        (run,) = again.missed
        assert again.run("rank", 0).results == {0: 0}
        (tmp_path / "stop").touch()
        run.wait()
        assert again.run("rank").results == {0: 0, 1: 1}


def test_lost_reply_and_cell_that_never_arrived_are_distinguished(light: Cluster, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    cell_log = light._session.launch.folders.cell_log
    runs = [light.run(WAIT.format(path=str(stop)), rank, block=False) for rank in (0, 1)]
    without_replies = cell_log.read_text()
    stop.touch()
    for run in runs:
        run.wait()
    light.run("'later'", 0)
    light.detach()
    cell_log.write_text(without_replies.replace(light.table[1].request, "of-a-cell-that-was-lost"))
    with Cluster.attach("light") as again:
        outcomes = ("has ended on this rank", r"did not reach this rank before .* run it again")
        for lost, outcome in zip(again.missed, outcomes, strict=True):
            with pytest.raises(RankFailure, match=f"ReplyLost: the cell {outcome}"):
                lost.wait(10)
        assert again.run("rank").results == {0: 0, 1: 1}


def test_cell_in_transit_when_the_notebook_leaves_is_not_lost(light: Cluster) -> None:
    controller = [each for each in processes_of_cluster(light.cluster_id) if CONTROLLER in each.cmdline()]
    for process in controller:
        process.suspend()
    later = threading.Timer(0.3, lambda: [process.resume() for process in controller])
    later.start()
    light.run("kept = rank * 2", block=False)
    light.detach()
    with Cluster.attach("light") as again:
        later.join()
        for run in again.missed:  # none, if it had ended by then
            run.wait()
        assert again.run("kept").results == {0: 0, 1: 2}


@pytest.mark.parametrize("persistent", ["local"], indirect=True)
def test_unseen_failure_is_reported_and_an_interrupt_reaches_a_resumed_cell(persistent: Cluster) -> None:
    persistent.run("mine = rank")
    persistent.run("if rank == 1: raise ValueError('unseen')\ndist.barrier()", block=False)
    persistent.detach()
    second = Cluster.attach("kept")
    (run,) = second.missed
    with pytest.raises(RankFailure) as caught:
        run.wait()
    assert [failure.ename for failure in caught.value.failures] == ["ValueError"]
    assert set(caught.value.waited) == {0}
    assert second.run(SUM).results == {0: [3.0], 1: [3.0]}
    second.run("while True: dist.all_reduce(torch.ones(3))", block=False)
    second.detach()
    with Cluster.attach("kept") as third:
        (run,) = third.missed
        third.interrupt()
        with pytest.raises(RankFailure, match="KeyboardInterrupt"):
            run.wait()
        assert third.run(SUM).results == {0: [3.0], 1: [3.0]}
        assert third.run("mine").results == {0: 0, 1: 1}


def test_rank_that_died_meanwhile_is_replaced(
    persistent: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    persistent.run("import os; mine = rank; os.chdir('/')")
    folder = str(Path.cwd())
    pid = persistent.table[1].info.pid
    persistent.run("while True: dist.all_reduce(torch.ones(3))", block=False)
    persistent.detach()
    process = psutil.Process(pid)
    process.kill()
    assert wait_until(lambda: not process.is_running())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_NEXT_NOTEBOOK", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with Cluster.attach("kept") as again:
        (run,) = again.missed
        with pytest.raises(RankFailure, match=f"process {pid} was killed by SIGKILL"):
            run.wait()
        assert again.run("import os; os.getcwd()", 1).results == {1: folder}
        own = again.run("[os.environ.get(name) for name in ('OF_THE_NEXT_NOTEBOOK', 'OMP_NUM_THREADS')]").results
        assert own[0] == own[1], "the new process has the environment of the session"
        assert again.run(SUM).results == {0: [3.0], 1: [3.0]}
        assert again.run("mine", 0).results == {0: 0}


def test_replaced_rank_is_known_to_later_clients(persistent: Cluster) -> None:
    first, second = (entry.info.pid for entry in persistent.table)
    psutil.Process(second).kill()
    assert wait_until(lambda: persistent.table[1].info.pid != second)
    persistent.run("mine = rank")
    persistent.detach()
    with Cluster.attach("kept") as again:
        assert again.run("mine").results == {0: 0, 1: 1}
        if again.config.launcher == "mpi":
            assert again.run("comm.allreduce(1)").results == {0: 2, 1: 2}
        psutil.Process(first).kill()  # and can be replaced again
        assert wait_until(lambda: again.table[0].info.pid != first)
        # MPI's world is lost once none is left that the job began with.
        if again.config.launcher == "mpi" and not again._session.launch.state.mpi_lost:
            assert again.run("comm.allreduce(1)").results == {0: 2, 1: 2}
        assert again.run(SUM).results == {0: [3.0], 1: [3.0]}


def test_unresponsive_rank_is_attached(light: Cluster) -> None:
    light.run("import time\nif rank == 1: time.sleep(1000)", block=False)
    assert wait_until(lambda: light.table[0].state == "idle")
    light.detach()
    os.kill(light.table[1].info.pid, signal.SIGSTOP)
    with Cluster.attach("light") as again:
        (run,) = again.missed
        assert run.running_now == {1}
        os.kill(light.table[1].info.pid, signal.SIGCONT)
        stop(again, run)


def test_output_beyond_the_replay_buffer_is_reported_to_be_in_the_log(light: Cluster, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    light.run(
        f"for _ in range(30): print('x' * 1_000_000)\nprint('the end')\n{WAIT.format(path=str(stop))}", 0, block=False
    )
    assert wait_until(lambda: log_of(light, 0).endswith("the end\n"))
    light.detach()
    stop.touch()
    with Cluster.attach("light") as again:
        (run,) = again.missed
        assert run.wait().stdout[0].endswith("the end\n")
        log = again._session.launch.folders.rank_log(0)
        assert run.stderr[0] == f"... its earlier output is in {log}\n"


@pytest.mark.usefixtures("light")
def test_cluster_with_an_owner_cannot_be_attached_and_one_without_keep_cannot_be_detached(
    started: Callable[[str], Cluster],
) -> None:
    with pytest.raises(UsageError, match=f"is held by process {os.getpid()}, which still runs"):
        Cluster.attach("light")
    with pytest.raises(UsageError, match="no cluster 'nowhere' is running"):
        Cluster.attach("nowhere")
    with pytest.raises(UsageError, match="--keep"):
        started("local").detach()


# From notebooks and shells


def test_ranks_of_a_killed_kernel_are_attached_by_the_next(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    first = Notebook()
    first.run("%dist_init -n 2 --keep --launcher local --backend none").check()
    first.run("%%distributed\nmine = rank + 5").check()
    first.run(f"%%distributed --noblock\n{COUNT.format(path=str(stop))}").check()
    os.kill(first.pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(first.pid)], timeout=60)
    first.close()
    with Notebook() as second:
        assert "the kept cluster 'default' still runs with 2 ranks" in second.run("%dist_init -n 1 --name other").text
        second.run("%dist_shutdown").check()
        output = second.run("%dist_attach --noblock").check().text
        assert "ranks 0-1 attached, with their variables" in output
        assert "still runs on ranks 0-1" in output
        assert "running" in second.run("%dist_status").text
        stop.touch()
        lines = second.run("%dist_wait").check().lines
        assert lines[0].endswith("line 0")
        assert second.run("%%distributed\nmine").check().lines == ["rank 0 │ 5", "rank 1 │ 6"]
        assert "is already attached to this notebook" in second.run("%dist_attach default").error
        second.run("%dist_shutdown").check()
