"""Processes that die while ranks start, or restart; MPI without shared memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import LaunchError, RankFailure
from jupyter_disttrain.launchers.mpi import find_mpiexec

from ...conftest import LAUNCHERS
from ...support.leftovers import our_processes
from ...support.process_tools import wait_until
from ...support.recovery_tools import HOST, SUM

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SMALL = """
mount -t tmpfs -o size=64k tmpfs /dev/shm || exit 3
exec "$@"
"""
START = """
from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import LaunchError
try:
    Cluster(n=2, launcher="mpi", backend="none").shutdown()
except LaunchError as error:
    print(error)
"""


SLOW = """#!/bin/sh
for word do
    shift
    [ "$word" = "{python}" ] && set -- "$@" sh -c 'test "$OMPI_COMM_WORLD_RANK" = 0 || sleep 4; exec "$@"' sh
    set -- "$@" "$word"
done
exec {mpiexec} "$@"
"""


def running(module: str, name: str) -> list[psutil.Process]:
    """Return the processes that run a module for the cluster of this name."""
    found = []
    for process in our_processes():
        try:
            command_line, identity = process.cmdline(), process.environ().get("DISTTRAIN_CLIENT", "")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if command_line[1:3] == ["-m", module] and f"{name}-" in identity + " ".join(command_line):
            found.append(process)
    return found


def parent_of(process: psutil.Process) -> int:
    try:
        return int(process.ppid())
    except psutil.NoSuchProcess:
        return 0


def start_and_kill(choose: Callable[[], psutil.Process | None], launcher: str) -> str:
    """Start ranks, kill a process as soon as it exists; return the error."""

    def kill() -> bool:
        process = choose()
        if process is not None:
            process.kill()
        return process is not None

    killer = threading.Thread(target=wait_until, args=[kill])
    killer.start()
    # Longer than a test may take: it must not be the timeout that ends the start.
    with pytest.raises(LaunchError) as caught, Cluster(n=2, launcher=launcher, name="killed", start_timeout_s=1000):
        pass
    killer.join()
    return str(caught.value)


def nanny(launcher: str) -> psutil.Process | None:
    """Return a process that has forked a rank, once each has."""
    engines = {process.pid: process for process in running("jupyter_disttrain.rank", "killed")}
    nannies = [engines[parent] for each in engines.values() if (parent := parent_of(each)) in engines]
    # Besides, mpiexec has started a process for each rank, the local launcher one for both.
    all_there = len(engines) == (5 if launcher == "local" else 6)
    return nannies[0] if all_there and nannies else None


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_rank_killed_during_the_start_is_reported_at_once(launcher: str) -> None:
    text = start_and_kill(lambda: nanny(launcher), launcher)
    who = r"a rank's parent process \(process \d+\)|ranks? [01](-1)?"  # it may have just got its number
    assert re.match(rf"({who}) on {HOST} was killed by SIGKILL: kill -9", text), text


def test_rank_processes_that_start_seconds_apart_are_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "mpiexec"
    slow.write_text(SLOW.format(python=sys.executable, mpiexec=find_mpiexec()))
    slow.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with Cluster(n=2, launcher="mpi", backend="none", name="slow") as cluster:
        assert cluster.run("comm.allreduce(rank + 1)").results == {0: 3, 1: 3}


def test_controller_killed_while_starting_is_reported_with_its_signal() -> None:
    def controller() -> psutil.Process | None:
        return next(iter(running("jupyter_disttrain.client.transport.controller", "killed")), None)

    text = start_and_kill(controller, "local")
    assert text.startswith(f"while starting, the controller on {HOST} was killed by SIGKILL")


def test_comm_reports_two_nannies_killed_at_once() -> None:
    with Cluster(n=3, launcher="mpi", name="nannies", grace_s=0.5) as cluster:
        pids = {entry.info.rank: entry.info.pid for entry in cluster.table}
        run = cluster.run("kept = rank; print(kept)\n__import__('time').sleep(1000)", block=False)
        assert wait_until(lambda: run.stdout == {rank: f"{rank}\n" for rank in range(3)})
        for entry in cluster.table[1:]:
            os.kill(entry.nanny_pid, signal.SIGKILL)
        cluster.interrupt([0])
        with pytest.raises(RankFailure) as caught:
            run.wait()
        lost = "comm is lost: several nannies were killed at the same time, after which Open MPI can't start processes"
        assert [note for note in caught.value.notes if note.startswith("comm")] == [
            f"{lost}; use dist, or start a new MPI job with %dist_reset"
        ]
        assert cluster.run("kept", 0).results == {0: 0}
        assert cluster.run(SUM).results == {rank: [6.0] for rank in range(3)}
        assert all(cluster.table[rank].info.pid != pids[rank] for rank in (1, 2))
        ours = {pid for entry in cluster.table for pid in (entry.info.pid, entry.nanny_pid)}
        left = {each.pid for each in running("jupyter_disttrain.rank", "nannies")}
        assert ours < left
        assert len(left - ours) == 3, "only the processes that the launchers have started, one for each rank"


def test_too_little_shared_memory_is_named() -> None:
    command = ["unshare", "--mount", "sh", "-c", SMALL, "sh", sys.executable, "-c", START]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    if ended.returncode in (1, 3) and "Operation not permitted" in ended.stderr:
        pytest.skip("only root can mount a small /dev/shm")
    assert f"Open MPI can't create its shared memory: /dev/shm on {HOST} has 64 KiB" in ended.stdout
    assert "docker run --shm-size=1g" in ended.stdout
    assert "%dist_init --launcher local" in ended.stdout
