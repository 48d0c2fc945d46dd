"""C++ parts that a framework compiles when it first needs them, as DeepSpeed does.

Covers: a build that its process did not live to end, or that was cut off; saying that one goes on.
Does not cover: the build, which torch leaves to one process of a host while the others wait.

They wait for a file to go away, and a process that was killed takes none away: without this, nobody on this host could
build that part any more, nor be told why. An interrupt can do the same, between the making of the file and the ``try``
that removes it: that is where one ends up that came while the code below ran. And torch takes who has begun to build a
part, or to wait for it, for one who has it: after an interrupt the next attempt would load what was never built.
"""

from __future__ import annotations

import fcntl
import functools
import os
import socket
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from .on_import import on_import

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_held: dict[int, Callable[[], None]] = {}  # by the file's object: how to give it back; those of the main thread


def watch_builds() -> None:
    """From now on sign the file that others wait for, remove one whose process has ended, build what is not there."""
    on_import("torch.utils.file_baton", _watch)
    on_import("torch.utils._cpp_extension_versioner", _watch_versions)


def _watch(module: Any) -> None:
    original: Callable[[Any], bool] = module.FileBaton.try_acquire
    original_release: Callable[[Any], None] = module.FileBaton.release

    @functools.wraps(original)
    def try_acquire(baton: Any) -> bool:
        lock = Path(baton.lock_file_path)
        with _alone(lock.parent):
            if _is_abandoned(lock):
                lock.unlink(missing_ok=True)
            builds = original(baton)
            if builds and threading.current_thread() is threading.main_thread():
                _held[id(baton)] = functools.partial(original_release, baton)
            if builds:
                lock.write_text(_signature(psutil.Process()))
        if builds and not any(lock.parent.glob("*.so")):
            sys.stderr.write(f"{lock.parent.name} is compiled now, once for this host; this takes up to some minutes\n")
        return builds

    @functools.wraps(original_release)
    def release(baton: Any) -> None:
        _held.pop(id(baton), None)
        original_release(baton)

    module.FileBaton.try_acquire, module.FileBaton.release = try_acquire, release


def give_back_files() -> None:
    """Take away, after a cell, the files of builds that were cut off before they had begun."""
    while _held:
        _, release = _held.popitem()
        with suppress(FileNotFoundError):  # the cell has removed it
            release()


def _watch_versions(module: Any) -> None:
    versioner = module.ExtensionVersioner
    get, bump = versioner.get_version, versioner.bump_version_if_changed
    folders: dict[str, Path] = {}  # by the part's name

    @functools.wraps(get)
    def get_version(self: Any, name: str) -> int | None:
        folder = folders.get(name)
        version: int | None = get(self, name)
        return version if folder is None or _is_built(folder, name) else None

    @functools.wraps(bump)
    def bump_version_if_changed(self: Any, name: str, *args: Any, build_directory: str, **kwargs: Any) -> int:
        folders[name] = Path(build_directory)
        return bump(self, name, *args, build_directory=build_directory, **kwargs)  # type: ignore[no-any-return]

    versioner.get_version, versioner.bump_version_if_changed = get_version, bump_version_if_changed


def _is_built(folder: Path, name: str) -> bool:
    """Whether there is a library of that name which ninja has written to its end."""
    try:
        log = (folder / ".ninja_log").read_text()
    except FileNotFoundError:
        return False
    return any(f"\t{library.name}\t" in log for library in folder.glob(f"{name}*.so"))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Have no other rank look at the file while this one does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            words = f"its file system knows no locks ({error.strerror}); name another folder with TORCH_EXTENSIONS_DIR"
            raise OSError(error.errno, words, str(folder)) from error
        yield
    finally:
        os.close(descriptor)


def _signature(process: psutil.Process) -> str:
    return f"{socket.gethostname()} {process.pid} {process.create_time()}"


def _is_abandoned(lock: Path) -> bool:
    """Whether a rank of this host has begun to build and is no more; other hosts' and programs' can't be told."""
    try:
        signature = lock.read_text()  # once: whoever built may end, and remove it, at this moment
        host, pid, _ = signature.split()
    except (OSError, ValueError):
        return False
    if host != socket.gethostname():
        return False
    try:
        return _signature(psutil.Process(int(pid))) != signature
    except psutil.NoSuchProcess:
        return True
