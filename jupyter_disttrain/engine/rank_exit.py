"""Do at a rank's end what Python does at a program's, within a limit.

Covers: threads that are no daemons, ``atexit`` functions, files that are still open.
Does not cover: MPI and the process itself (``app``), the end of a script (``script_end``).

Python's own end can't be left to run: MPI, process groups and sockets would wait there for ranks that are gone. Nothing
here waits for another rank, unless the user's code does, and then the limit ends the process.
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

END_SECONDS = 2.0  # less than a nanny's patience


class RankExit:
    """What was there before any code of the user's ran."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._files = _files_written()

    def run(self) -> None:
        """Do what is left to do; a process that takes longer than the limit is ended by SIGALRM."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # in C code, too
        signal.setitimer(signal.ITIMER_REAL, END_SECONDS)
        for function in reversed(getattr(threading, "_threading_atexits", ())):  # thread pools
            function()
        for thread in set(threading.enumerate()) - self._threads - {threading.current_thread()}:
            if not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()  # noqa: SLF001
        if _files_written() - self._files:  # to look for them takes 0.1 s
            _close_files()
        signal.setitimer(signal.ITIMER_REAL, 0)


def _files_written() -> set[tuple[int, int]]:
    """Return the regular files that this process may have open for writing."""
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (a Path for each takes longer)
        with suppress(OSError):  # the folder itself has been closed
            about = os.fstat(int(name))
            if stat.S_ISREG(about.st_mode) and fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                found.add((about.st_dev, about.st_ino))
    return found


def _close_files() -> None:
    """Close what can be written to, the outermost first: a compressed file's last bytes go into the file below it.

    Before that, text and buffers are flushed, as they may themselves be written into a compressed file.
    """
    own = {id(stream) for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)}
    layers: dict[type, int] = {}
    found: list[tuple[int, Any]] = []
    for each in gc.get_objects():
        kind = type(each)
        if kind not in layers:
            layers[kind] = _layer(kind)
        if layers[kind] and id(each) not in own:
            found.append((layers[kind], each))
    found.sort(key=lambda pair: pair[0])
    flushes = [("flush", file) for layer, file in found if layer > 1]
    for method, file in flushes + [("close", file) for _, file in found]:
        try:
            if method == "close" or not file.closed:
                getattr(file, method)()
        except Exception:  # noqa: BLE001  (a disk may be full; the other files are closed all the same)
            traceback.print_exc()


def _layer(kind: type) -> int:
    """Return when files of this type are closed; 0: never, as it is no file, or nothing of it is lost."""
    own = str(kind.__module__).startswith("jupyter_disttrain.")  # of Cython's function type it is no string
    if own or issubclass(kind, (io.RawIOBase, io.BytesIO, io.StringIO)):
        return 0
    if issubclass(kind, io.TextIOWrapper):
        return 2
    if issubclass(kind, (io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)):
        return 3
    if issubclass(kind, io.BufferedReader):
        return 0
    return int(issubclass(kind, (io.IOBase, zipfile.ZipFile, tempfile._TemporaryFileWrapper)))  # noqa: SLF001
