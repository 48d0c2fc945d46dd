"""Release threads that wait in Gloo for a connection that was closed or never opened.

Covers: finding such threads, raising in them the error that Gloo omits.
Does not cover: ending connections (``sockets``), deciding when to release (``client.recovery.state_machine``).

When a connection closes, Gloo raises in the operations that are queued on it, but not in the one that is half sent or
half received: ``Pair::signalException`` in gloo/transport/tcp/pair.cc skips unbound buffers in ``tx_``, and skips
``rx_``. A thread that waits for that operation waits until the group's timeout, half an hour by default. This happens
when a rank dies in the middle of a large message.

Such a thread sleeps in a condition variable of a ``gloo::transport::tcp::UnboundBuffer``; Linux reports its address.
The buffer's own ``signalException``, which Gloo exports, ends the wait with an error, as Gloo should have done.

Memory that Gloo has freed still looks like a buffer until all of it is reused, e.g. while a lock of Python lies in the
middle of it; ``signalException`` would crash there. A thread that waits in a buffer has locked its mutex before, and
the C++ object that unlocks the mutex points to it from the thread's stack. A thread without such a pointer waits for
something else.

The same happens while a group is formed: of two ranks one connects and the other waits for it, in a condition variable
of a ``gloo::transport::tcp::Pair``, with no connection that could be closed. If the first dies, the pair's own
``signalExceptionExternal`` ends that wait. Gloo then frees the pair, and a peer that connects at that moment would use
freed memory: so this is done only if a rank has died or the user has given up the group.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...protocol.time_limits import GLOO_WAITS_POLL_SECONDS, SETTLED_SECONDS
from ..interrupts.deferral import is_standard
from ..proc_self import list_proc_self, read_memory, system_call

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

BUSIEST = 10.0  # limit of the processes per core, which scale SETTLED_SECONDS: on a busy host Gloo's threads run later
PAGE_BYTES = 4096
MESSAGE = b"gloo/transport: Connection closed by peer in the midst of a message; the process group was released"
NOT_CONNECTED = b"gloo/transport: The peer did not connect; the process group was released"
_FUTEX = {"x86_64": "202", "aarch64": "98"}  # number of the futex system call
# After a stop, or a signal that another thread handled, Linux continues a sleep with a time limit as another system
# call, restart_syscall; the arguments it reports stay those of the sleep.
_RESTART = {"x86_64": "219", "aarch64": "128"}
_OPERATION, _WAIT_BITSET = 0x7F, 9  # the futex operation without its flags; that of condition variables
_BUFFER, _PAIR = "N4gloo9transport3tcp13UnboundBuffer", "N4gloo9transport3tcp4Pair"
# Largest offset of a condition variable in an object, with room for other builds; beyond it lies another object.
_REACH = {_BUFFER: 192, _PAIR: 576}
_CONDITION_BYTES = 48  # size of a condition variable, which comes after its mutex
_STACK_BYTES = 2048  # of a waiting thread's stack to read, from its innermost call to Gloo's
_STRING = "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"


@dataclass(frozen=True, slots=True)
class Wait:
    """A thread that waits for an operation on a buffer or for a pair to be connected."""

    thread: int
    what: str  # _BUFFER or _PAIR
    address: int  # the object's


def end_forgotten_waits() -> None:
    """Raise an error in every thread that still waits in Gloo; call it after the connections were closed."""
    gloo = _gloo()
    if gloo is None:
        return
    waits = _waits(gloo.vtables)
    processes_per_core = os.getloadavg()[0] / (os.cpu_count() or 1)
    deadline = time.monotonic() + SETTLED_SECONDS * min(BUSIEST, max(1.0, processes_per_core))
    while waits and time.monotonic() < deadline:
        time.sleep(GLOO_WAITS_POLL_SECONDS)  # threads in which Gloo itself raises are about to leave
        waits &= _waits(gloo.vtables)
    for wait in waits:
        error = gloo.make_error()
        # Check right before: a thread that woke up since the last check frees the object, which must not be used then.
        # The main thread needs the GIL to free it, and this thread holds the GIL from here on.
        if _is_in(wait, gloo.vtables):
            gloo.end(wait, error)
        gloo.forget(error)


def _is_in(wait: Wait, vtables: Mapping[str, int]) -> bool:
    """Whether the thread is in this wait now; a thread that was woken counts as running."""
    before = _sleep_of(wait.thread)
    return _wait_of(wait.thread, vtables) == wait and before == _sleep_of(wait.thread)


def is_main_thread_waiting() -> bool:
    """Whether the main thread waits in Gloo, e.g. in the ``wait()`` of an ``irecv``, which has no Python frame."""
    gloo = _gloo()
    return gloo is not None and _wait_of(os.getpid(), gloo.vtables) is not None


def may_wait_for_collective(frame: FrameType | None) -> bool:
    """Whether the main thread may wait for a collective in C code, as in the ``wait()`` of one that was called before.

    Then it sleeps in a condition variable without a time limit. With one it waits for the GIL. OpenMP uses no condition
    variable, and Python's own locks are those of the standard library's functions, in which ``frame``, the main
    thread's innermost one, then is. Where Linux does not allow reading the system call, every thread counts as waiting.
    """
    if frame is not None and is_standard(frame):
        return False
    call = system_call(os.getpid())
    if not call:
        return True
    if call[0] != _FUTEX.get(platform.machine()):
        return False
    operation, limit = int(call[2], 16) & _OPERATION, int(call[4], 16)
    return operation == _WAIT_BITSET and limit == 0


def _waits(vtables: Mapping[str, int]) -> set[Wait]:
    """Return the waits of this process's threads in Gloo."""
    found = (_wait_of(int(thread), vtables) for thread in list_proc_self("task"))
    return {wait for wait in found if wait is not None}


def _sleep_of(thread: int) -> tuple[int, int] | None:
    """Return the address of the condition variable or lock that a thread sleeps in, and its stack pointer."""
    values = system_call(thread)
    machine = platform.machine()
    is_asleep = bool(values) and values[0] in {_FUTEX.get(machine), _RESTART.get(machine)}
    return (int(values[1], 16), int(values[-2], 16)) if is_asleep else None


def _wait_of(thread: int, vtables: Mapping[str, int]) -> Wait | None:
    """Return the wait that a thread is in, whose object begins with its vtable's address; None if it is in none."""
    sleep = _sleep_of(thread)
    if sleep is None:
        return None
    address, stack_pointer = sleep
    start = (address - max(_REACH.values())) & ~7
    data = read_memory(start, address - start)
    if not data:  # the mapping begins within these bytes
        start = max(start, address & -PAGE_BYTES)
        data = read_memory(start, address - start)
    places = {what: data.rfind(vtable.to_bytes(8, "little")) for what, vtable in vtables.items()}
    what, at = max(places.items(), key=lambda place: place[1])
    begin = start + at
    if at < 0 or at % 8 or address - begin > _REACH[what]:
        return None
    stack = memoryview(read_memory(stack_pointer & -8, _STACK_BYTES)).cast("Q")
    return Wait(thread, what, begin) if any(begin <= each < address - _CONDITION_BYTES for each in stack) else None


class _String(ctypes.Structure):
    """A ``std::string`` to read from, as libstdc++ lays it out."""

    _fields_ = (("data", ctypes.c_char_p), ("size", ctypes.c_size_t), ("local", ctypes.c_char * 16))


class _Returned(ctypes.Structure):
    """Room for an ``exception_ptr``, which is returned in memory; larger, so that ctypes returns it in memory too."""

    _fields_ = (("pointer", ctypes.c_void_p), ("unused", ctypes.c_void_p * 3))


class _Gloo:
    """Functions that torch exports from Gloo, and the C++ library's functions for exceptions."""

    def __init__(self, path: str, cpp: ctypes.CDLL) -> None:
        torch_library = ctypes.CDLL(path)
        self.vtables = {_BUFFER: _table(torch_library, _BUFFER)}
        signal_pair = f"_Z{_PAIR}23signalExceptionExternalERK{_STRING}"
        if hasattr(torch_library, signal_pair):  # missing in torch's builds with the pre-C++11 string ABI, up to 2.5
            self.vtables[_PAIR] = _table(torch_library, _PAIR)
            self._signal_pair = _function(torch_library, signal_pair, _Returned, ctypes.c_void_p, ctypes.c_void_p)
        self._destroy = _function(cpp, "_ZNSt15__exception_ptr13exception_ptrD1Ev", None, ctypes.c_void_p)
        signal_buffer = f"_Z{_BUFFER}15signalExceptionENSt15__exception_ptr13exception_ptrE"
        keeps_lock = ctypes.PyDLL(path)  # calls through it do not release the GIL
        self._signal = _function(keeps_lock, signal_buffer, None, ctypes.c_void_p, ctypes.c_void_p)
        self._allocate = _function(cpp, "__cxa_allocate_exception", ctypes.c_void_p, ctypes.c_size_t)
        self._construct = _function(cpp, "_ZNSt13runtime_errorC1EPKc", None, ctypes.c_void_p, ctypes.c_char_p)
        self._prepare = _function(cpp, "__cxa_init_primary_exception", ctypes.c_void_p, *[ctypes.c_void_p] * 3)
        take = "_ZNSt15__exception_ptr13exception_ptrC1EPv"
        self._take = _function(cpp, take, None, ctypes.c_void_p, ctypes.c_void_p)
        self._type = ctypes.addressof(ctypes.c_void_p.in_dll(cpp, "_ZTISt13runtime_error"))
        self._destructor = ctypes.cast(cpp["_ZNSt13runtime_errorD1Ev"], ctypes.c_void_p)

    def make_error(self) -> ctypes.c_void_p:
        """Return a reference-counted ``exception_ptr`` to a ``std::runtime_error``, as make_exception_ptr does."""
        error = self._allocate(16)  # sizeof(std::runtime_error)
        self._prepare(error, self._type, self._destructor)
        self._construct(error, MESSAGE)
        counted = ctypes.c_void_p()
        self._take(ctypes.byref(counted), error)
        return counted

    def end(self, wait: Wait, error: ctypes.c_void_p) -> None:
        """Raise in a thread the error that Gloo omitted."""
        if wait.what == _BUFFER:
            self._signal(wait.address, ctypes.byref(error))  # moves the pointer into the buffer
            return
        of_pair = self._signal_pair(wait.address, ctypes.byref(_String(NOT_CONNECTED, len(NOT_CONNECTED))))
        self.forget(of_pair)

    def forget(self, error: Any) -> None:
        """Destroy an ``exception_ptr``; after a move it is null."""
        self._destroy(ctypes.byref(error))


def _table(library: ctypes.CDLL, what: str) -> int:
    """Return the vtable pointer with which objects of a class begin."""
    return ctypes.addressof(ctypes.c_void_p.in_dll(library, f"_ZTV{what}E")) + 16  # after the offset and the type info


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = library[name]
    function.restype, function.argtypes = result, list(arguments)
    return function


@functools.cache
def _gloo() -> _Gloo | None:
    """Return Gloo's functions, or None if a symbol is missing: waits then last until the timeout or the rank's exit."""
    import torch  # noqa: PLC0415

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return _Gloo(str(library), ctypes.CDLL("libstdc++.so.6"))
    except (OSError, AttributeError, ValueError) as missing:
        sys.stderr.write(f"waits that Gloo does not end by itself can't be aborted here: {missing}\n")
        return None
