"""Waits for collectives: read from torch's flight recorder, distinguished from other code, and ended in Gloo."""

from __future__ import annotations

import ctypes
import json
import platform
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest
import torch
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroupGloo

from jupyter_disttrain.rank.process_group import gloo_abort
from jupyter_disttrain.rank.process_group.flight_recorder import pending_on_device
from jupyter_disttrain.rank.process_group.gloo_abort import may_wait_for_collective

if TYPE_CHECKING:
    from collections.abc import Callable

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


def test_wait_that_gloo_does_not_end_is_ended_with_an_error() -> None:
    first, _second = formed()
    errors: list[str] = []

    def receive() -> None:
        with pytest.raises(RuntimeError) as caught:
            first.recv([torch.ones(1)], 1, 0).wait()
        errors.append(str(caught.value))

    thread = threading.Thread(target=receive)
    thread.start()
    gloo = gloo_abort._gloo()
    assert gloo is not None
    while not gloo_abort._waits(gloo.vtables):
        time.sleep(0.001)
    gloo_abort.end_forgotten_waits()
    thread.join()
    assert errors == [gloo_abort.MESSAGE.decode()]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[gloo_abort.Wait]:
    """The waits in which an error is raised, which would use their object."""
    ended: list[gloo_abort.Wait] = []
    monkeypatch.setattr(gloo_abort._Gloo, "end", lambda _gloo, wait, _error: ended.append(wait))
    return ended


def test_thread_that_left_gloo_since_the_last_sample_is_not_touched(
    ended: list[gloo_abort.Wait], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffer is freed by then."""
    leaves = threading.Event()
    thread = threading.Thread(target=leaves.wait)
    thread.start()
    assert thread.native_id is not None
    wait = gloo_abort.Wait(thread.native_id, gloo_abort._BUFFER, 4096)
    monkeypatch.setattr(gloo_abort, "_waits", lambda _vtables: {wait})  # as if it slept in a buffer at each look
    gloo_abort.end_forgotten_waits()
    leaves.set()
    thread.join()
    assert ended == []


def test_thread_that_sleeps_in_memory_freed_by_gloo_is_not_touched(ended: list[gloo_abort.Wait]) -> None:
    """The address of the freed buffer's condition variable now belongs to something else."""
    gloo = gloo_abort._gloo()
    assert gloo is not None
    call, number = ctypes.CDLL(None).syscall, int(gloo_abort._FUTEX[platform.machine()])
    freed = (ctypes.c_uint64 * 32)(gloo.vtables[gloo_abort._BUFFER])
    word = ctypes.c_void_p(ctypes.addressof(freed) + 120)
    thread = threading.Thread(target=call, args=(number, word, 0, 0, None))
    thread.start()
    while f"{word.value:#x}" not in Path(f"/proc/self/task/{thread.native_id}/syscall").read_text():
        pass
    gloo_abort.end_forgotten_waits()
    call(number, word, 1, 1)
    thread.join()
    assert ended == []
