"""Find the communicators of this process.

Covers: all that there are, those attached to one, the one that a request or file belongs to; receiving what was sent;
that of the cells, which does not end the job.
Does not cover: revoking them (``mpi_world``).

MPI has no call to find them, so the memory of Open MPI's own objects is read, from 5.0 on.
"""

from __future__ import annotations

import os
import struct
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_ATTRIBUTES = 64  # that are looked for
MOST_WORDS = 48  # of a communicator, request or file
PAST_NUMBERS = 1 << 40  # what is larger is a pointer
MOST_COMMS = 4096  # that are looked for
MOST_GAPS = 64  # of communicators that were freed, between two


class MpiAbortError(RuntimeError):
    """A cell has called ``comm.Abort()``."""


def for_cells(mpi: Any, comm: Any) -> Any:
    """Return a communicator for cells: like another, but ``Abort`` ends the cell and not all ranks."""
    return _class_for_cells(mpi)(comm)


@cache
def _class_for_cells(mpi: Any) -> Any:
    base: Any = mpi.Intracomm

    class Intracomm(base):
        """mpi4py's; a duplicate of it is of this class too, what Split or Create makes is not."""

        __module__ = base.__module__  # where what is pickled by its name is looked up

        def __reduce__(self) -> Any:
            """Pickle the world by its name, as mpi4py does."""
            return "COMM_WORLD" if self is mpi.COMM_WORLD else super().__reduce__()

        def Abort(self, errorcode: int = 0) -> NoReturn:  # noqa: N802  (MPI's name)
            """End the cell on this rank."""
            raise MpiAbortError(
                f"comm.Abort({errorcode}) would end all ranks of the session with their variables; it ends this cell "
                "alone, and other ranks that wait are released; %dist_shutdown ends all ranks"
            )

    return Intracomm


def hidden(mpi: Any, comm: Any) -> Iterator[Any]:
    """Find the communicators that are attached to one: mpi4py reduces Python objects in a duplicate of its own.

    What an attribute points to is a communicator if it begins as one, with a pointer to Open MPI's class of them.
    """
    kind = _word(comm.handle)
    for key in range(MOST_ATTRIBUTES):
        try:
            value = comm.Get_attr(key)
        except mpi.Exception:
            continue  # there is no such attribute
        handle = _word(value) if isinstance(value, int) and value > 0 else 0
        if handle and kind and _word(handle) == kind:
            yield mpi.Comm.fromhandle(handle)


def all_comms(mpi: Any) -> Iterator[Any]:
    """Find the communicators of this process that can still be used, those within windows and files too.

    Each has a number for Fortran, counted from the world's, which is 0.
    """
    gaps = 0
    for number in range(MOST_COMMS):
        try:
            comm = mpi.Comm.f2py(number)
        except mpi.Exception:  # none has this number any more, or yet
            gaps += 1
            if gaps > MOST_GAPS:
                return
            continue
        gaps = 0
        if comm in (mpi.COMM_NULL, mpi.COMM_SELF):
            continue
        words = _words(comm.handle)
        if all(words[at] > PAST_NUMBERS for at in pointers_of_comm(mpi)) and not comm.Is_revoked():
            yield comm


@cache
def pointers_of_comm(mpi: Any) -> list[int]:
    """Return which words of Open MPI's communicators are pointers in every one that is finished.

    One that is still being made, in the call at hand, lacks some; to revoke that would be a crash.
    """
    made = [mpi.COMM_SELF.Dup(), mpi.COMM_SELF.Split(0), mpi.COMM_SELF.Create(mpi.COMM_SELF.Get_group())]
    finished = [_words(comm.handle) for comm in (*made, mpi.COMM_SELF, mpi.Comm.f2py(0))]
    for comm in made:
        comm.Free()
    return [at for at in range(MOST_WORDS) if all(words[at] > PAST_NUMBERS for words in finished)]


def comm_within(mpi: Any, owner: Any) -> Any:
    """Return the communicator that a request or file of Open MPI points to; None if none is found."""
    comms = {comm.handle: comm for comm in all_comms(mpi)}
    return next((comms[word] for word in _words(owner.handle) if word in comms), None)


def receive_all(mpi: Any) -> Iterator[tuple[Any, bytearray]]:
    """Begin to receive what was sent to this rank; yields the requests, and where it comes to."""
    for comm in all_comms(mpi):
        status = mpi.Status()
        try:
            while (message := comm.Improbe(status=status)) is not None:
                place = bytearray(status.Get_count(mpi.BYTE))
                yield message.Irecv(place), place
        except mpi.Exception:
            continue  # it was revoked meanwhile


def is_received(mpi: Any, request: Any) -> bool:
    """Whether what was begun to be received is here."""
    try:
        return bool(request.Test())
    except mpi.Exception:
        return False  # MPI may still write to its place


def _word(address: int) -> int:
    """Read a word of this process's memory; 0 where there is none."""
    return _words(address, 1)[0]


def _words(address: int, count: int = MOST_WORDS) -> tuple[int, ...]:
    """Read words of this process's memory; 0 where there are none."""
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        found = os.pread(memory, 8 * count, address)
    except (OSError, OverflowError):
        found = b""
    finally:
        os.close(memory)
    return struct.unpack(f"{count}Q", found.ljust(8 * count, b"\0"))
