"""Read torch's flight recorder on a rank; tell a wait for what it lists from other code that runs meanwhile."""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroupGloo

from jupyter_disttrain.rank.process_group.flight_recorder import pending_on_device
from jupyter_disttrain.rank.process_group.gloo_abort import may_wait_for_collective

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

SAMPLES = 50


def test_record_is_read_again_after_a_thread_failed_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"profiling_name": "nccl:all_reduce", "state": "started", "collective_seq_id": 1, "time_created_ns": 0}
    dump = json.dumps({"entries": [entry]})
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace_json", lambda **_: dump, raising=False)

    def refuse(_thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert pending_on_device(0.5) is None
    pending = pending_on_device(0.5)
    assert pending is not None
    assert pending["name"] == "all_reduce"


def formed() -> list[ProcessGroupGloo]:
    """Return both members of a group of two ranks, in this process."""
    store, members = HashStore(), dict[int, ProcessGroupGloo]()

    def join(rank: int) -> None:
        members[rank] = ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return [members[rank] for rank in range(2)]


def is_waiting() -> bool:
    return may_wait_for_collective(sys._current_frames()[threading.main_thread().ident or 0])


def seen_during(code: Callable[[threading.Event], object]) -> int:
    """Return in how many samples the main thread seems to wait while it runs code until an event is set."""
    is_over, seen = threading.Event(), list[bool]()

    def sample() -> None:
        for _ in range(SAMPLES):
            seen.append(is_waiting())
            time.sleep(0.001)
        is_over.set()

    sampler = threading.Thread(target=sample)
    sampler.start()
    code(is_over)
    sampler.join()
    return sum(seen)


def spin(is_over: threading.Event) -> None:
    while not is_over.is_set():
        pass


def doze(is_over: threading.Event) -> None:
    while not is_over.is_set():
        time.sleep(0.01)


def test_only_the_wait_for_an_async_collective_counts_as_one() -> None:
    first, second = formed()
    work = first.allreduce([torch.ones(1)])
    assert [seen_during(code) for code in (spin, doze, threading.Event.wait)] == [0, 0, 0]

    def join_once_awaited() -> None:
        while not is_waiting():
            time.sleep(0.001)
        second.allreduce([torch.ones(1)]).wait()

    other = threading.Thread(target=join_once_awaited, daemon=True)
    other.start()
    work.wait()
    other.join()
