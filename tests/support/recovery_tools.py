"""Helpers of the recovery tests: detect ranks that wait, check that a session is intact."""

from __future__ import annotations

import os
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from jupyter_disttrain.errors import RankFailure
from jupyter_disttrain.protocol.requests import Signal

from .process_tools import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from jupyter_disttrain import CellRun, Cluster

HOST = socket.gethostname()
# C code that keeps the GIL, and that no signal ends: a mutex that is locked twice.
HOLD_GIL = """import ctypes
lock, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
libc.pthread_mutex_lock(lock); libc.pthread_mutex_lock(lock)"""
# Code that ignores each interrupt until a file exists, in a function to call with its path.
IGNORE_INTERRUPTS = """import os, time
def stay(path):
    heard = 0
    while True:
        try:
            print("heard", heard, flush=True)
            while not os.path.exists(path): time.sleep(0.01)
            return heard
        except KeyboardInterrupt: heard += 1
"""
# Code that waits in Gloo for a peer that never connects.
NO_PEER = """
import threading
from datetime import timedelta
def answer_for_the_peer():
    store.wait(["0/0"])
    address = bytearray(store.get("0/0"))
    port = address.index(b"\\x02\\x00", 8) + 2  # after the name of the host stands the address: family, port
    address[port : port + 2] = b"\\xff\\xff"  # the higher port is the one that connects
    store.set("0/1", bytes(address))
store = dist.HashStore()
threading.Thread(target=answer_for_the_peer).start()
dist.ProcessGroupGloo(store, 0, 2, timedelta(hours=1))
"""
SUM = "probe = torch.full((1000,), float(rank + 1)); dist.all_reduce(probe); probe.unique().tolist()"


def send_signal(cluster: Cluster, rank: int, number: int) -> dict[str, Any]:
    """Have the nanny of a rank send it a signal; return the nanny's reply."""
    request = Signal(number=int(number))
    launch = cluster._session.launch
    content: dict[str, Any] = launch.open_link.request(launch.table[rank].nanny, request).result(60)["content"]
    return content


@contextmanager
def holding_gil(folder: Path) -> Iterator[str]:
    """Code for a cell that imports os and ctypes: C code that keeps the GIL until this context ends."""
    path = folder / "let-go"
    os.mkfifo(path)
    try:
        yield f"os.close(ctypes.PyDLL(None).open({os.fsencode(path)!r}, os.O_RDONLY))"
    finally:
        os.close(os.open(path, os.O_WRONLY))  # blocks until a reader opens it, and so does the reader's open for us


def is_intact(cluster: Cluster, pids: dict[int, int]) -> bool:
    """Return whether the same processes hold the same variables and can communicate."""
    total = float(sum(range(1, cluster.world_size + 1)))
    intact = {rank: ([total], pid, rank * 11) for rank, pid in pids.items()}
    assert cluster.run(f"{SUM}, os.getpid(), kept").results == intact
    return True


def waits(run: CellRun, ranks: set[int], what: str = "") -> Callable[[], bool]:
    """Return whether these ranks are seen waiting for others."""

    def are_waiting() -> bool:
        reports = run._supervisor.stacks.collect(ranks, 5).values()
        return all(each.waits_s is not None and what in str(each.reply) for each in reports)

    return are_waiting


def interrupted(cluster: Cluster, code: str, waiting: set[int], **options: Any) -> RankFailure:
    """Run code, interrupt it once these ranks wait for others, and return its outcome."""
    run = cluster.run(code, block=False, **options)
    assert wait_until(waits(run, waiting))
    return stop(cluster, run)


def stop(cluster: Cluster, run: CellRun) -> RankFailure:
    """Interrupt a cell that runs, and return its outcome."""
    cluster.interrupt()
    with pytest.raises(RankFailure) as caught:
        run.wait()
    return caught.value


def failure_of(cluster: Cluster, code: str, *args: Any, **options: Any) -> RankFailure:
    """Run code that fails, and return its outcome."""
    with pytest.raises(RankFailure) as caught:
        cluster.run(code, *args, **options)
    return caught.value
