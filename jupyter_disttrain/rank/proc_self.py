"""Read what Linux shows of this process: files of /proc/self, memory, the system calls of threads.

Covers: reading on threads beside the one that runs cells, whose code may close file descriptors 0, 1 and 2.
Does not cover: other processes (``process_table``).
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# Held while a function of this module has a file open, and while 0, 1 and 2 are restored after a cell. If the cell had
# closed one of these, the file may have its number: restored meanwhile, it would be closed together with the file.
own_files = threading.RLock()


def read_proc_self(name: str) -> bytes:
    """Return the content of a file below /proc/self; raises an OSError if it does not exist or can't be read."""
    with own_files:
        return (Path("/proc/self") / name).read_bytes()


def list_proc_self(name: str) -> list[str]:
    """Return the names in a folder below /proc/self."""
    with own_files:
        return os.listdir(f"/proc/self/{name}")  # noqa: PTH208  (a Path for each takes longer)


def read_memory(start: int, size: int) -> bytes:
    """Return bytes of this process's memory; none if they are not mapped."""
    with own_files, suppress(OSError, OverflowError), Path("/proc/self/mem").open("rb", buffering=0) as memory:
        return os.pread(memory.fileno(), size, start)
    return b""


def system_call(thread: int) -> list[str]:
    """Return the number of the system call that a thread sleeps in, its arguments, stack pointer and program counter.

    The first field is no number if the thread sleeps in none; the list is empty if the thread has ended or Linux does
    not allow reading it.
    """
    try:
        return read_proc_self(f"task/{thread}/syscall").decode().split()
    except OSError:
        return []


def file_of(descriptor: int) -> tuple[int, int] | None:
    """Return what identifies the file of a descriptor; None if it is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def has_standard_files() -> bool:
    """Whether 0, 1 and 2 are open, so that no other file gets one of these numbers."""
    return None not in map(file_of, range(3))


@contextmanager
def open_socket(descriptor: int) -> Iterator[socket.socket]:
    """Open a copy of a socket by its descriptor, and close it; raises an OSError if it is not open, or no socket."""
    with own_files, socket.socket(fileno=os.dup(descriptor)) as sock:
        yield sock
