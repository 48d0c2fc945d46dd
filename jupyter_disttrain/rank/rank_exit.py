"""Run at a rank's end what Python runs at a program's end, within a time limit.

Covers: non-daemon threads, ``atexit`` functions, files that are still open.
Does not cover: MPI and the process itself (``app``).

Python's own finalization can't run: MPI, process groups and sockets would wait there for ranks that have ended. Nothing
here waits for another rank, unless the user's code does, and then the time limit ends the process.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import io
import os
import signal
import stat
import sys
import tempfile
import threading
import traceback
import zipfile
from contextlib import suppress
from typing import Any

from ..protocol.time_limits import RANK_EXIT_END_SECONDS, THREADS_SECONDS
from .process_group.object_replacement import thaw


class RankExit:
    """Records the threads and files from before any user code ran, and runs the rank's exit."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._files = _files_written()

    def run(self) -> None:
        """Run the exit; SIGALRM ends a process that takes longer than the limit."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process in C code, too
        signal.setitimer(signal.ITIMER_REAL, RANK_EXIT_END_SECONDS)
        if self._has_written():
            _flush(_open_files())  # what follows may take longer than the limit
        self._wait_for_threads()
        atexit._run_exitfuncs()  # noqa: SLF001
        if self._has_written():
            files = _open_files()
            _flush(files)
            for _, file in files:
                _call("close", file)
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _wait_for_threads(self) -> None:
        """Wait for thread pools and non-daemon threads, as long as that leaves time for what follows."""
        left = [each for each in set(threading.enumerate()) - self._threads if not each.daemon]
        left = [each for each in left if each is not threading.current_thread()]

        def end() -> None:
            for function in reversed(getattr(threading, "_threading_atexits", ())):  # thread pools
                function()
            for thread in left:
                thread.join()

        waiter = threading.Thread(target=end, name="disttrain end", daemon=True)  # pools have no timeout
        with suppress(RuntimeError):  # no thread can be started
            waiter.start()
            waiter.join(THREADS_SECONDS)
        if names := sorted(each.name for each in left if each.is_alive()):
            text = f"ended by the rank's exit before they finished: {', '.join(names)}"
            print(text, file=sys.__stderr__)  # a cell may have closed its own

    def _has_written(self) -> bool:
        """Whether files may be open that were not before; searching for the objects takes 0.1 s."""
        return bool(_files_written() - self._files)


def _files_written() -> set[tuple[int, int]]:
    """Return the regular files that this process may have open for writing."""
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (a Path for each takes longer)
        with suppress(OSError):  # the folder's own descriptor is closed by now
            about = os.fstat(int(name))
            if stat.S_ISREG(about.st_mode) and fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                found.add((about.st_dev, about.st_ino))
    return found


def _open_files() -> list[tuple[int, Any]]:
    """Return open writable files, the outermost first: a compressed file's last bytes go into the file below it."""
    own = {id(stream) for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)}
    layers: dict[type, int] = {}
    found: list[tuple[int, Any]] = []
    thaw()
    for each in gc.get_objects():
        kind = type(each)
        if kind not in layers:
            layers[kind] = _layer(kind)
        if layers[kind] and id(each) not in own:
            found.append((layers[kind], each))
    return sorted(found, key=lambda pair: pair[0])


def _flush(files: list[tuple[int, Any]]) -> None:
    """Flush text and buffers, which may themselves be written into a compressed file that is closed first."""
    for layer, file in files:
        if layer > 1:
            _call("flush", file)


def _call(method: str, file: Any) -> None:
    try:
        if method == "close" or not file.closed:
            getattr(file, method)()
    except Exception:  # noqa: BLE001  (a disk may be full; the other files are closed all the same)
        traceback.print_exc(file=sys.__stderr__)


def _layer(kind: type) -> int:
    """Return when files of this type are closed; 0: never, as it is no file, or nothing of it would be lost."""
    own = str(kind.__module__).startswith("jupyter_disttrain.")  # of Cython's function type it is not a string
    if own or issubclass(kind, (io.RawIOBase, io.BytesIO, io.StringIO, io.BufferedReader)):
        return 0
    if issubclass(kind, io.TextIOWrapper):
        return 2
    if issubclass(kind, (io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)):
        return 3
    return int(issubclass(kind, (io.IOBase, zipfile.ZipFile, tempfile._TemporaryFileWrapper)))  # noqa: SLF001
