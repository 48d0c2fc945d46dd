"""Collectives and device waits of a GPU on ranks without one, for cells of the tests.

torch's backend "fake" replaces NCCL, on the device "meta": it starts collectives and returns. This module adds
the flight recorder that NCCL keeps, and a wait like cudaStreamSynchronize: in C, without the GIL, not interrupted by
signals. As with ncclCommAbort, an abort ends the waits without an error. It shows which calls happen when, and
nothing of CUDA's streams, of timing or of NCCL's own abort.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

from jupyter_disttrain.config import frameworks
from jupyter_disttrain.rank.process_group import subgroups

_libc = ctypes.CDLL(None)  # whose calls release the GIL
_mutex, _spin = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
_libc.pthread_mutex_lock(_mutex)
_libc.pthread_spin_init(_spin, 0)
_libc.pthread_spin_lock(_spin)
_torch: dict[str, Any] = {"__name__": "torch.distributed.distributed_c10d"}
_code = "def all_reduce(function, *arguments): return function(*arguments)"
exec(compile(_code, dist.distributed_c10d.__file__, "exec"), _torch)
_pending: list[dict[str, Any]] = []
aborts: list[tuple[str, str]] = []  # thread and group
hangs = False  # an abort that never returns
_aborting = threading.Lock()
_end_wait: Any = None  # releases what the main thread waits for


def install() -> None:
    """Use this device in the session's next group."""
    frameworks.TORCH_BACKENDS["gloo"] = "cpu:gloo,meta:fake"
    subgroups._abort_devices = abort
    _distributed_c10d._dump_nccl_trace_json = dump
    dist.destroy_process_group()


def dump(includeCollectives: bool = True, onlyActive: bool = False) -> str:  # noqa: ARG001, N803  (torch's names)
    assert includeCollectives
    return json.dumps({"entries": _pending})


def all_reduce(size: int, name: str = "all_reduce") -> None:
    """Start a collective that ends only with an abort."""
    dist.all_reduce(torch.ones(size, device="meta"))
    entry = {"profiling_name": f"nccl:{name}", "state": "started", "retired": False, "is_p2p": False}
    entry |= {"collective_seq_id": len(_pending) + 1, "p2p_seq_id": 0, "process_group": ["0", "default_pg"]}
    _pending.append(entry | {"input_sizes": [[size]], "input_dtypes": ["Float"], "time_created_ns": time.time_ns()})


def item(*, spins: bool = False) -> str:
    """Wait for the device like ``tensor.item()``; return what is in its memory after an abort."""
    global _end_wait
    lock, _end_wait = (
        (lambda: _libc.pthread_spin_lock(_spin), lambda: _libc.pthread_spin_unlock(_spin))
        if spins
        else (lambda: _libc.pthread_mutex_lock(_mutex), lambda: _libc.pthread_mutex_unlock(_mutex))
    )
    lock()
    return "garbage"


def initialize() -> None:
    """Wait as NCCL does while it initializes a communicator: in C, for a connection from the other ranks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        descriptor = listener.detach()  # it is no socket of Python's
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # as NCCL, it goes on after a signal
    try:
        accepted = _torch["all_reduce"](_libc.accept, descriptor, None, None)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        os.close(descriptor)
    if accepted < 0:
        raise RuntimeError("NCCL error: unhandled system error")


def abort(pg: Any) -> None:
    global _end_wait
    aborts.append((threading.current_thread().name, pg.group_name))
    if hangs:
        threading.Event().wait()
    _pending.clear()
    with _aborting:
        end, _end_wait = _end_wait, None
        if end is not None:
            end()
