"""Recover builds of C++ extensions that a framework compiles on first use, e.g. DeepSpeed.

Covers: a build whose process died or that was interrupted; a message that a build runs.
Does not cover: the build, which torch leaves to one process of a host while the others wait.

The others wait until a lock file is removed, which a process that was killed does not do: no process on this host could
build that extension any more, and no message would give the reason. So ranks lock the folder, which ends with the
process. The lock file remains for other programs and other hosts, where a folder's lock may have no effect; a rank's
is a symbolic link to a file with its host's name, so that the next rank on that host knows whose it is.

An interrupt between the creation of the file and the ``try`` that removes it has the same effect; an interrupt that
arrives while the code below runs is raised there. Also, torch treats an extension as built as soon as the process has
started to build it or to wait for it: after an interrupt the next attempt would load an extension that was never built.
"""

from __future__ import annotations

import fcntl
import functools
import os
import socket
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .import_hooks import on_import

if TYPE_CHECKING:
    from collections.abc import Callable

_held: set[Any] = set()  # batons that the main thread holds


def watch_builds() -> None:
    """Patch torch so that its locks end with their process, and that it rebuilds what was not built completely."""
    on_import("torch.utils.file_baton", _watch)
    on_import("torch.utils._cpp_extension_versioner", _watch_versions)


def _watch(module: Any) -> None:
    wait_for_file: Callable[[Any], None] = module.FileBaton.wait

    def wait_for_build(baton: Any) -> None:
        lock = Path(baton.lock_file_path)
        folder = os.open(lock.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            _remove_left(lock)
        finally:
            os.close(folder)
        wait_for_file(baton)  # of another program

    module.FileBaton.try_acquire, module.FileBaton.release = _try_acquire, _release
    module.FileBaton.wait = wait_for_build


def _try_acquire(baton: Any) -> bool:
    lock = Path(baton.lock_file_path)
    with ExitStack() as stack:
        baton.fd = os.open(lock.parent, os.O_RDONLY)
        stack.callback(os.close, baton.fd)
        try:
            fcntl.flock(baton.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_left(lock)
            (lock.parent / _target()).touch()
            lock.symlink_to(_target())
        except (BlockingIOError, FileExistsError):
            return False
        except OSError as error:
            text = f"can't be locked ({error.strerror}); set TORCH_EXTENSIONS_DIR to a folder on another file system"
            raise OSError(error.errno, text, str(lock.parent)) from error
        stack.pop_all()
    if threading.current_thread() is threading.main_thread():
        _held.add(baton)
    if not any(lock.parent.glob("*.so")):
        sys.stderr.write(f"{lock.parent.name} is being compiled, once for this host; this takes up to a few minutes\n")
    return True


def _target() -> str:
    return f"lock-of-{socket.gethostname()}"


def _remove_left(lock: Path) -> None:
    """Remove the link of a rank on this host that has died; call it with the folder locked."""
    if lock.is_symlink() and str(lock.readlink()) == _target():
        lock.unlink()


def _release(baton: Any) -> None:
    _held.discard(baton)
    lock = Path(baton.lock_file_path)
    for each in (lock, lock.parent / _target()):
        each.unlink(missing_ok=True)  # the cell may have removed it
    os.close(baton.fd)


def give_back_files() -> None:
    """Remove, after a cell, the lock files of builds that were interrupted before they began."""
    for baton in list(_held):
        _release(baton)


def _watch_versions(module: Any) -> None:
    versioner = module.ExtensionVersioner
    get, bump = versioner.get_version, versioner.bump_version_if_changed
    folders: dict[str, Path] = {}  # by the extension's name

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
    """Whether there is a library of that name that ninja has finished."""
    try:
        log = (folder / ".ninja_log").read_text()
    except FileNotFoundError:
        return False
    return any(f"\t{library.name}\t" in log for library in folder.glob(f"{name}*.so"))
