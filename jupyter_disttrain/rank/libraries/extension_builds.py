"""Recover builds of C++ extensions that a framework compiles on first use, e.g. DeepSpeed.

Covers: a build whose process died or that was interrupted; a message that a build runs.
Does not cover: the build, which torch leaves to one process of a host while the others wait.

The others wait until a lock file is removed. A process that was killed does not remove it: without this module, no
process on this host could build that extension any more, and no message would give the reason. An interrupt has the
same effect between the creation of the file and the ``try`` that removes it; an interrupt that arrives while the code
below runs is raised there. Also, torch treats an extension as built as soon as the process has started to build it or
to wait for it: after an interrupt the next attempt would load an extension that was never built.
"""

from __future__ import annotations

import fcntl
import functools
import os
import socket
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from .import_hooks import on_import

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_held: dict[int, Callable[[], None]] = {}  # id of a baton that the main thread holds: function that releases it


def watch_builds() -> None:
    """Patch torch to sign its lock files, remove those of dead processes, and rebuild what was not built completely."""
    on_import("torch.utils.file_baton", _watch)
    on_import("torch.utils._cpp_extension_versioner", _watch_versions)


def _watch(module: Any) -> None:
    original_release: Callable[[Any], None] = module.FileBaton.release

    @functools.wraps(module.FileBaton.try_acquire)
    def try_acquire(baton: Any) -> bool:
        lock = Path(baton.lock_file_path)
        with _alone(lock.parent):
            if _is_abandoned(lock):
                lock.unlink(missing_ok=True)
            builds = _create_signed(lock)
            if builds and threading.current_thread() is threading.main_thread():
                _held[id(baton)] = functools.partial(original_release, baton)
        if builds and not any(lock.parent.glob("*.so")):
            sys.stderr.write(
                f"{lock.parent.name} is being compiled, once for this host; this takes up to a few minutes\n"
            )
        return builds

    @functools.wraps(original_release)
    def release(baton: Any) -> None:
        _held.pop(id(baton), None)
        original_release(baton)

    module.FileBaton.try_acquire, module.FileBaton.release = try_acquire, release


def give_back_files() -> None:
    """Remove, after a cell, the lock files of builds that were interrupted before they began."""
    while _held:
        _, release = _held.popitem()
        with suppress(FileNotFoundError):  # the cell has removed the file
            release()


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


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder, so that only one rank at a time checks the lock file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            text = (
                f"its file system does not support locks ({error.strerror}); set TORCH_EXTENSIONS_DIR to another folder"
            )
            raise OSError(error.errno, text, str(folder)) from error
        yield
    finally:
        os.close(descriptor)


def _create_signed(lock: Path) -> bool:
    """Create the lock file with its signature in one step; return False if it exists.

    A process that was killed between the two would leave a file without a signature, which no other process may remove.
    """
    descriptor, draft = tempfile.mkstemp(prefix="lock-", dir=lock.parent)
    try:
        os.write(descriptor, _signature(psutil.Process()).encode())
        os.link(draft, lock)
    except FileExistsError:
        return False
    finally:
        os.close(descriptor)
        Path(draft).unlink()
    return True


def _signature(process: psutil.Process) -> str:
    return f"{socket.gethostname()} {process.pid} {process.create_time()}"


def _is_abandoned(lock: Path) -> bool:
    """Whether the file was signed by a rank of this host that has died; unknown, so False, for other hosts' files."""
    try:
        signature = lock.read_text()  # once: the process that builds may finish and remove it meanwhile
        host, pid, _ = signature.split()
    except (OSError, ValueError):
        return False
    if host != socket.gethostname():
        return False
    try:
        return _signature(psutil.Process(int(pid))) != signature
    except psutil.NoSuchProcess:
        return True
