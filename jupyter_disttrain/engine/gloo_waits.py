"""Threads that wait in Gloo for a connection that is gone, or never comes.

Covers: finding them, and giving them the error that Gloo forgot.
Does not cover: ending connections (``sockets``), deciding when (``cluster.recovery``).

When a connection ends, Gloo tells the operations that wait for their turn on it, but not the one that is half sent or
half received: ``Pair::signalException`` in gloo/transport/tcp/pair.cc passes over unbound buffers in ``tx_``, and over
``rx_``. Whoever waits for that one waits until the group's time-out, half an hour by default. So it is when a rank dies
in the midst of a large message.

Such a thread sleeps in a condition variable of a ``gloo::transport::tcp::UnboundBuffer``; Linux tells its address. The
buffer's own ``signalException``, which Gloo exports, ends the wait as it should have ended.

So it is with a group in the making: of two ranks one connects and the other waits to be connected to, in a condition
variable of a ``gloo::transport::tcp::Pair``, with no connection that could be ended. If the first dies, the pair's own
``signalExceptionExternal`` ends that wait. Gloo then frees the pair, and a peer that connected at that very moment
would find it gone: so this is done only where a rank has died, or the person has given the group up.
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

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SETTLED_SECONDS = 0.1  # of waiting after the connections have ended, before a wait is called forgotten
BUSIEST = 10.0  # processes per core at most, by which that is multiplied: Gloo's threads get their turn that much later
LOOK_SECONDS = 0.02
PAGE_BYTES = 4096
MESSAGE = b"gloo/transport: Connection closed by peer in the midst of a message; the process group was released"
NOT_CONNECTED = b"gloo/transport: The peer did not connect; the process group was released"
_FUTEX = {"x86_64": "202", "aarch64": "98"}  # the number of that system call
_BUFFER, _PAIR = "N4gloo9transport3tcp13UnboundBuffer", "N4gloo9transport3tcp4Pair"
# How far into an object its condition variables lie, with room for other builds; what is beyond is another object's.
_REACH = {_BUFFER: 192, _PAIR: 576}
_STRING = "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"


@dataclass(frozen=True, slots=True)
class Wait:
    """A thread that waits for a buffer's turn, or for a pair to be connected."""

    thread: int
    what: str  # _BUFFER or _PAIR
    address: int  # of the object


def end_forgotten_waits() -> int:
    """Give an error to every thread that goes on waiting in Gloo; call it once the connections have ended.

    Returns
    -------
    int
        How many threads that were. 0 also where this build of torch, or this C++ library, keeps its names to itself.
    """
    gloo = _gloo()
    if gloo is None:
        return 0
    waits = _waits(gloo.vtables)
    deadline = time.monotonic() + SETTLED_SECONDS * _processes_per_core()
    while waits and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)  # those that Gloo has told are about to go
        waits &= _waits(gloo.vtables)
    ended = 0
    for wait in waits:
        # Right before: a thread that has woken since the last look frees the object, which must not be touched then.
        if _is_in(wait, gloo.vtables):
            gloo.end(wait)
            ended += 1
    return ended


def _processes_per_core() -> float:
    """Return how many processes want to run on each core of this machine, between 1 and ``BUSIEST``."""
    return min(BUSIEST, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def _is_in(wait: Wait, vtables: Mapping[str, int]) -> bool:
    """Whether the thread is in this wait at this moment; one that was woken counts as running."""
    address = _sleeping_at(Path(f"/proc/self/task/{wait.thread}"))
    return address is not None and _object_around(address, vtables) == (wait.what, wait.address)


def is_main_thread_waiting() -> bool:
    """Whether the main thread waits for a message, e.g. in the ``wait()`` of an ``irecv``: that has no Python frame."""
    gloo = _gloo()
    if gloo is None:
        return False
    address = _sleeping_at(Path(f"/proc/self/task/{os.getpid()}"))
    return address is not None and _object_around(address, gloo.vtables) is not None


def _waits(vtables: Mapping[str, int]) -> set[Wait]:
    """Return the threads of this process that wait in Gloo."""
    found = ((thread, _object_around(address, vtables)) for thread, address in _sleepers())
    return {Wait(thread, *what) for thread, what in found if what is not None}


def _sleepers() -> Iterator[tuple[int, int]]:
    """Yield the threads that sleep in a condition variable or lock, and where in memory that is."""
    for task in Path("/proc/self/task").iterdir():
        address = _sleeping_at(task)
        if address is not None:
            yield int(task.name), address


def _sleeping_at(task: Path) -> int | None:
    try:
        words = (task / "syscall").read_text().split()
    except OSError:
        return None  # it has ended, or this kernel does not tell
    return int(words[1], 16) if words[0] == _FUTEX.get(platform.machine()) else None


def _object_around(address: int, vtables: Mapping[str, int]) -> tuple[str, int] | None:
    """Return the object of Gloo's that an address lies in; it begins with the address of its class's table."""
    start = (address - max(_REACH.values())) & ~7
    data = _memory(start, address - start)
    if data is None:  # the mapping begins within these bytes
        start = max(start, address & -PAGE_BYTES)
        data = _memory(start, address - start) or b""
    places = {what: data.rfind(vtable.to_bytes(8, "little")) for what, vtable in vtables.items()}
    what, at = max(places.items(), key=lambda place: place[1])
    if at < 0 or at % 8 or address - (start + at) > _REACH[what]:
        return None
    return what, start + at


def _memory(start: int, size: int) -> bytes | None:
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY)
    except OSError:
        return None
    try:
        return os.pread(memory, size, start)
    except OSError:
        return None
    finally:
        os.close(memory)


class _String(ctypes.Structure):
    """A ``std::string`` to read from, as libstdc++ lays it out."""

    _fields_ = (("data", ctypes.c_char_p), ("size", ctypes.c_size_t), ("local", ctypes.c_char * 16))


class _Returned(ctypes.Structure):
    """Room for an ``exception_ptr``, which is returned in memory; larger, so that ctypes does it like that as well."""

    _fields_ = (("pointer", ctypes.c_void_p), ("unused", ctypes.c_void_p * 3))


class _Gloo:
    """What torch exports of Gloo, and the C++ library of exceptions."""

    def __init__(self, torch_library: ctypes.CDLL, cpp: ctypes.CDLL) -> None:
        self.vtables = {_BUFFER: _table(torch_library, _BUFFER)}
        signal_pair = f"_Z{_PAIR}23signalExceptionExternalERK{_STRING}"
        if hasattr(torch_library, signal_pair):  # not in torch's builds with the strings of before C++11, up to 2.5
            self.vtables[_PAIR] = _table(torch_library, _PAIR)
            self._signal_pair = _function(torch_library, signal_pair, _Returned, ctypes.c_void_p, ctypes.c_void_p)
        self._forget = _function(cpp, "_ZNSt15__exception_ptr13exception_ptrD1Ev", None, ctypes.c_void_p)
        self._signal = torch_library[f"_Z{_BUFFER}15signalExceptionENSt15__exception_ptr13exception_ptrE"]
        self._signal.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._signal.restype = None
        self._allocate = _function(cpp, "__cxa_allocate_exception", ctypes.c_void_p, ctypes.c_size_t)
        self._construct = _function(cpp, "_ZNSt13runtime_errorC1EPKc", None, ctypes.c_void_p, ctypes.c_char_p)
        self._prepare = _function(cpp, "__cxa_init_primary_exception", ctypes.c_void_p, *[ctypes.c_void_p] * 3)
        self._copy = _function(
            cpp, "_ZNSt15__exception_ptr13exception_ptrC1ERKS0_", None, ctypes.c_void_p, ctypes.c_void_p
        )
        self._type = ctypes.addressof(ctypes.c_void_p.in_dll(cpp, "_ZTISt13runtime_error"))
        self._destructor = ctypes.cast(cpp["_ZNSt13runtime_errorD1Ev"], ctypes.c_void_p)

    def end(self, wait: Wait) -> None:
        """Have a thread get the error that Gloo forgot."""
        if wait.what == _BUFFER:
            self._signal_exception(wait.address)
            return
        error = self._signal_pair(wait.address, ctypes.byref(_String(NOT_CONNECTED, len(NOT_CONNECTED))))
        self._forget(ctypes.byref(error))

    def _signal_exception(self, buffer: int) -> None:
        """Have who waits for a buffer get a ``std::runtime_error``: make_exception_ptr, then signalException."""
        error = self._allocate(16)  # sizeof(std::runtime_error)
        self._prepare(error, self._type, self._destructor)
        self._construct(error, MESSAGE)
        pointer, counted = ctypes.c_void_p(error), ctypes.c_void_p()
        self._copy(ctypes.byref(counted), ctypes.byref(pointer))  # an exception_ptr is a pointer that counts its copies
        self._signal(buffer, ctypes.byref(counted))  # which moves it into the buffer


def _table(library: ctypes.CDLL, what: str) -> int:
    """Return what an object of a class begins with."""
    return ctypes.addressof(ctypes.c_void_p.in_dll(library, f"_ZTV{what}E")) + 16  # after the offset and the type


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = library[name]
    function.restype, function.argtypes = result, list(arguments)
    return function


@functools.cache
def _gloo() -> _Gloo | None:
    """Return None where a name is missing: then such a wait ends with the group's time-out, or with its rank."""
    import torch  # noqa: PLC0415

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return _Gloo(ctypes.CDLL(str(library)), ctypes.CDLL("libstdc++.so.6"))
    except (OSError, AttributeError, ValueError) as missing:
        sys.stderr.write(f"waits that Gloo forgets can't be ended here: {missing}\n")
        return None
