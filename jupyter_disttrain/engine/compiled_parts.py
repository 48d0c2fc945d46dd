"""C++ parts that a framework compiles when it first needs them, as DeepSpeed does.

Covers: a build that its process did not live to end; saying that one goes on.
Does not cover: the build, which torch leaves to one process of a host while the others wait.

They wait for a file to go away, and a process that was killed takes none away: without this, nobody on this host could
build that part any more, nor be told why.
"""

from __future__ import annotations

import fcntl
import functools
import os
import socket
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from .on_import import on_import

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def watch_builds() -> None:
    """From now on sign the file that others wait for, and remove one whose process has ended."""
    on_import("torch.utils.file_baton", _watch)


def _watch(module: Any) -> None:
    original: Callable[[Any], bool] = module.FileBaton.try_acquire

    @functools.wraps(original)
    def try_acquire(baton: Any) -> bool:
        lock = Path(baton.lock_file_path)
        with _alone(lock.parent):
            if _is_abandoned(lock):
                lock.unlink()
            builds = original(baton)
            if builds:
                lock.write_text(_signature(psutil.Process()))
        if builds and not any(lock.parent.glob("*.so")):
            sys.stderr.write(f"{lock.parent.name} is compiled now, once for this host; this takes up to some minutes\n")
        return builds

    module.FileBaton.try_acquire = try_acquire


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Have no other rank look at the file while this one does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _signature(process: psutil.Process) -> str:
    return f"{socket.gethostname()} {process.pid} {process.create_time()}"


def _is_abandoned(lock: Path) -> bool:
    """Whether a rank of this host has begun to build and is no more; other hosts' and programs' can't be told."""
    try:
        host, pid, _ = lock.read_text().split()
    except (OSError, ValueError):
        return False
    if host != socket.gethostname():
        return False
    try:
        return _signature(psutil.Process(int(pid))) != lock.read_text()
    except psutil.NoSuchProcess:
        return True
