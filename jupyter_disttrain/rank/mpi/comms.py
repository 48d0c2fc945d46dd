"""Find the communicators of this process.

Covers: all communicators, those attached to another, that of a request or file; which requests are partitioned;
receiving pending messages; an ``Abort`` that does not end the job.
Does not cover: revoking communicators (``world``).

MPI has no call to list communicators, so this reads the memory of Open MPI's objects (Open MPI 5.0 or later).
"""

from __future__ import annotations

import ctypes
import functools
import gc
import struct
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from ..proc_self import read_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST_ATTRIBUTES = 64  # attribute keys to try
MOST_WORDS = 48  # words to read of a communicator, request or file
PAST_NUMBERS = 1 << 40  # a larger word is taken for a pointer
NAME_BYTES = 32  # of the name of a class, of which the beginning suffices
MOST_COMMS = 4096  # Fortran handles to try
MOST_GAPS = 64  # consecutive handles without a communicator (freed ones) before the search ends


class MpiAbortError(RuntimeError):
    """A cell has called what would end MPI, e.g. ``comm.Abort()``."""


def keep_mpi_running(mpi: Any) -> None:
    """Prevent that a cell ends MPI, which later cells and the recovery use.

    ``Abort`` of any communicator ends the cell on this rank instead of all ranks. ``Finalize`` has no effect; what it
    replaces is its ``__wrapped__``. ``Free`` and ``Disconnect`` refuse the communicator of all ranks.

    mpi4py's types do not allow setting attributes, but the dictionaries that hold their methods can be changed.
    """
    methods, reduce = gc.get_referents(vars(mpi.Comm))[0], mpi.Comm.__reduce__

    def abort(_comm: Any, errorcode: int = 0) -> NoReturn:
        """End the cell on this rank."""
        raise MpiAbortError(
            f"comm.Abort({errorcode}) would end all ranks of the session with their variables; it ends only this "
            "cell, and other ranks that wait are released; %dist_shutdown ends all ranks"
        )

    def reduce_by_name(comm: Any) -> Any:
        """Pickle the world by its name, as mpi4py does, including one that was made after a rank died."""
        return "COMM_WORLD" if comm is mpi.COMM_WORLD else reduce(comm)

    def keeping_world(name: str) -> Callable[[Any], None]:
        original = methods[name]

        @functools.wraps(original)
        def free(comm: Any) -> None:
            if comm in (mpi.COMM_WORLD, mpi.COMM_SELF):
                raise MpiAbortError(f"comm.{name}() would end MPI for all later cells, which use this communicator")
            original(comm)

        return free

    @functools.wraps(mpi.Finalize)
    def finalize() -> None:
        sys.stderr.write("MPI.Finalize() has no effect in a cell: MPI ends with the rank\n")

    mpi.Finalize = finalize
    methods |= {"Abort": abort, "__reduce__": reduce_by_name}
    methods |= {name: keeping_world(name) for name in ("Free", "Disconnect")}
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(mpi.Comm))


def hidden(mpi: Any, comm: Any) -> Iterator[Any]:
    """Find the communicators that are attached to another: mpi4py reduces Python objects in a duplicate of its own.

    An attribute's value is a communicator if it begins like one, with a pointer to Open MPI's class of communicators.
    """
    kind = _word(comm.handle)
    for key in range(MOST_ATTRIBUTES):
        try:
            value = comm.Get_attr(key)
        except mpi.Exception:
            continue  # no such attribute
        handle = _word(value) if isinstance(value, int) and value > 0 else 0
        if handle and kind and _word(handle) == kind:
            yield mpi.Comm.fromhandle(handle)


def usable_comms(mpi: Any) -> Iterator[Any]:
    """Find the communicators of this process that are not revoked, including those within windows and files."""
    return (comm for comm in _complete_comms(mpi) if not comm.Is_revoked())


def _complete_comms(mpi: Any) -> Iterator[Any]:
    """Find all communicators of this process except those that are still being made.

    Each has a Fortran handle; the handles count up from that of the world, which is 0.
    """
    gaps = 0
    for number in range(MOST_COMMS):
        try:
            comm = mpi.Comm.f2py(number)
        except mpi.Exception:  # no communicator has this handle, or its communicator was freed
            gaps += 1
            if gaps > MOST_GAPS:
                return
            continue
        gaps = 0
        if comm in (mpi.COMM_NULL, mpi.COMM_SELF):
            continue
        words = _words(comm.handle)
        if all(words[at] > PAST_NUMBERS for at in pointers_of_comm(mpi)):
            yield comm


@cache
def pointers_of_comm(mpi: Any) -> list[int]:
    """Return the indices of the words that are pointers in every complete communicator of Open MPI.

    A communicator that is still being made lacks some of these pointers; revoking it would crash.
    """
    made = [mpi.COMM_SELF.Dup(), mpi.COMM_SELF.Split(0), mpi.COMM_SELF.Create(mpi.COMM_SELF.Get_group())]
    finished = [_words(comm.handle) for comm in (*made, mpi.COMM_SELF, mpi.Comm.f2py(0))]
    for comm in made:
        comm.Free()
    return [at for at in range(MOST_WORDS) if all(words[at] > PAST_NUMBERS for words in finished)]


def comm_within(mpi: Any, owner: Any) -> Any:
    """Return the communicator that a request or file of Open MPI points to, revoked or not; None if not found."""
    comms = {comm.handle: comm for comm in _complete_comms(mpi)}
    return next((comms[word] for word in _words(owner.handle) if word in comms), None)


def is_partitioned(mpi: Any, request: Any) -> bool:
    """Whether a request of Open MPI is one of partitioned communication, made by ``Psend_init`` or ``Precv_init``."""
    if not isinstance(request, mpi.Prequest) or request == mpi.REQUEST_NULL:
        return False
    name = _word(_word(request.handle))  # an object begins with a pointer to its class, which begins with its name
    return b"_part_" in _read(name, NAME_BYTES)


def receive_all(mpi: Any) -> Iterator[tuple[Any, bytearray]]:
    """Start to receive all messages sent to this rank; yield each request with its buffer."""
    for comm in usable_comms(mpi):
        status = mpi.Status()
        try:
            while (message := comm.Improbe(status=status)) is not None:
                place = bytearray(status.Get_count(mpi.BYTE))
                yield message.Irecv(place), place
        except mpi.Exception:
            continue  # the communicator was revoked meanwhile


def is_received(mpi: Any, request: Any) -> bool:
    """Whether a receive has finished."""
    try:
        return bool(request.Test())
    except mpi.Exception:
        return False  # MPI may still write to its buffer


def _word(address: int) -> int:
    """Read a word of this process's memory; 0 if the address is not mapped."""
    return _words(address, 1)[0]


def _words(address: int, count: int = MOST_WORDS) -> tuple[int, ...]:
    """Read words of this process's memory; 0 for what is not mapped."""
    return struct.unpack(f"{count}Q", _read(address, 8 * count))


def _read(address: int, size: int) -> bytes:
    """Read this process's memory; zeros for what is not mapped."""
    return read_memory(address, size).ljust(size, b"\0")
