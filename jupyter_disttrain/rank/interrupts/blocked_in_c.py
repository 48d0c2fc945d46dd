"""Detect that the main thread is blocked in C code.

Covers: whether it has run no Python code since the last check.
Does not cover: what it waits for (``rank.process_group.flight_recorder``).

The CPU starts a collective of NCCL and the GPU runs it: until it ends, it is in torch's record, whether the rank waits
for it or not. The rank waits once its main thread is blocked in C, as in ``loss.item()`` or
``torch.cuda.synchronize()``. CUDA waits by spinning, so the thread's state and its processor time do not show it.

So each check adds a pending call to Python, which the main thread makes between two of its instructions. It is
``sem_post``: no Python code, in which an interrupt could be lost.
"""

from __future__ import annotations

import ctypes
import time

from ...protocol.time_limits import LEAST_SECONDS


class BlockedInC:
    """Detects whether the main thread runs Python code."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._answers = ctypes.create_string_buffer(64)  # a sem_t, which is 32 bytes large
        self._libc.sem_init(self._answers, 0, 0)
        self._call = ctypes.cast(self._libc.sem_post, ctypes.c_void_p)
        self._asked_at: float | None = None

    def check(self) -> bool:
        """Return whether the main thread has run no Python code since an earlier check, some time ago."""
        now = time.monotonic()
        if self._asked_at is not None:
            if self._libc.sem_trywait(self._answers) != 0:
                return now - self._asked_at >= LEAST_SECONDS
            self._asked_at = None
        if ctypes.pythonapi.Py_AddPendingCall(self._call, ctypes.byref(self._answers)) == 0:  # else the queue is full
            self._asked_at = now
        return False
