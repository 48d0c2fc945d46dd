"""Run the warm process: import what ranks need, then fork nannies and programs from it on request.

Covers: the imports, why it can't serve, forking, reporting the ends of its children, its own end.
Does not cover: which starts it serves (``start_label``), the state of a forked process (``forked``).

It has no CUDA context, no MPI, no ZeroMQ context and no threads but those of the BLAS library, which handles forks.
What it has imported is hidden from Python's garbage collector, so the forks share that memory.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from ...process_table import start_time
from ...protocol.environment import WITHOUT_TORCH
from ...protocol.time_limits import WARM_IDLE_SECONDS, WARM_REQUEST_SECONDS
from ...rank_sessions import family, kill
from ..cold_nannies import signal_all
from ..nanny.process_tree import adopt_orphans
from ..process_group.object_replacement import freeze
from . import channel
from .forked import become
from .start import PROGRAM
from .start_label import preloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Imported by ranks at their start, or soon after it; the package's own modules import most of what they need.
_FOR_RANKS = (
    *("IPython.core.completerlib", "IPython.core.logger", "IPython.core.magics", "IPython.core.oinspect"),
    *("IPython.core.ultratb", "encodings.idna", "numpy", "psutil", "tornado.platform.asyncio"),
)
_WITH_TORCH = (
    *("torch", "torch.distributed", "torch.distributed.distributed_c10d", "torch.nn.parallel.distributed"),
    *("torch.utils._device", "jupyter_disttrain.rank.process_group.group"),
)


class WarmProcess:
    """Serves the starts of one label."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{address}")  # fails if another process has it
        self._listener.listen(socket.SOMAXCONN)
        self._starts: dict[int, socket.socket] = {}  # connections, by descriptor
        self._children: dict[int, socket.socket] = {}  # by pid of a fork: the connection on which it was requested
        self._programs: dict[socket.socket, dict[int, str]] = {}  # pids and start times of programs, by connection
        self._reason = ""  # why it can't fork; empty if it can
        self._wake_read, self._wake_write = socket.socketpair()
        self._poll = select.poll()

    def load(self) -> None:
        """Import what ranks need."""
        own = [] if os.environ.get(WITHOUT_TORCH) else [*_WITH_TORCH]
        for name in (*_FOR_RANKS, *own):
            with suppress(ImportError):  # the rank itself reports what is missing, and the remedy
                importlib.import_module(name)

    def preload(self) -> None:
        """Import the user's modules, and get ready to fork; record why forks would not work, if so."""
        threads = _threads()  # those of OpenBLAS end before a fork, and start again after it
        for name in preloaded(os.environ):
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001  (any module of the user's)
                self._reason = f"{name} can't be preloaded: {type(error).__name__}: {error}"
                traceback.print_exc()
                return
            if _threads() > threads or threading.active_count() > 1:
                self._reason = f"{name} can't be preloaded: it starts a thread when it is imported"
                return
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            self._reason = "a preloaded module has initialized CUDA, which can't be used after a fork"
        freeze()

    def serve(self, roles: Mapping[str, Callable[[Mapping[str, int]], None]]) -> None:
        """Fork on request until nothing needs this process any more.

        Each fork calls the function of its role, with the descriptors that the request names. It ends as a Python
        program whose code this function is would end.
        """
        self._roles = roles
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        adopt_orphans()  # else the ranks of killed nannies become children of process 1, which may never reap them
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write.fileno())
        self._poll.register(self._listener, select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)
        idle_at = time.monotonic()
        while True:
            ready = [descriptor for descriptor, _ in self._poll.poll(1000 * WARM_IDLE_SECONDS)]
            for descriptor in ready:
                if descriptor == self._listener.fileno():
                    self._accept()
                elif descriptor == self._wake_read.fileno():
                    self._wake_read.recv(4096)
                else:
                    self._serve_start(self._starts[descriptor])
            self._reap()
            if self._starts or self._children:
                idle_at = time.monotonic()
            elif time.monotonic() - idle_at >= WARM_IDLE_SECONDS and not ready:
                return

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        if not channel.belongs_to_us(sock):
            sock.close()
            return
        sock.settimeout(WARM_REQUEST_SECONDS)  # a start that is stopped in the middle must not block the others
        self._starts[sock.fileno()] = sock
        self._poll.register(sock, select.POLLIN)

    def _serve_start(self, sock: socket.socket) -> None:
        request, descriptors = channel.receive(sock)
        if request is None:
            self._forget(sock)
            return
        own = {each.fileno() for each in self._sockets()}
        others = set(request["numbers"][3:]) - own - set(descriptors)
        taken = any(os.path.lexists(f"/proc/self/fd/{number}") for number in others)
        reason = self._reason or ("its file descriptors are in use in the warm process" if taken else "")
        forked: dict[int, str] = {}
        while not reason and len(forked) < request["count"]:
            try:
                pid = os.fork()
            except OSError as error:  # no more processes are allowed, or there is no memory
                reason = f"it can't fork: {error.strerror}"
                break
            if pid == 0:
                self._become(request, descriptors)
            self._children[pid] = sock
            forked[pid] = start_time(pid)
        channel.close_all(descriptors)
        if reason:
            signal_all(list(forked), signal.SIGKILL)
            self._reply(sock, {"reason": reason})
            return
        if request["what"] == PROGRAM:
            self._programs.setdefault(sock, {}).update(forked)
        self._reply(sock, {"forked": forked})

    def _become(self, request: dict[str, Any], descriptors: list[int]) -> NoReturn:
        """Run the forked process; whatever happens ends the loop that forked it, and the interpreter with it."""
        for sock in self._sockets():
            sock.close()
        try:
            self._roles[request["what"]](become(request, descriptors))
        except KeyboardInterrupt:  # before the script of the process has begun, or after it
            sys.exit(128 + signal.SIGINT)
        sys.exit()

    def _sockets(self) -> list[socket.socket]:
        return [self._listener, self._wake_read, self._wake_write, *self._starts.values()]

    def _reap(self) -> None:
        """Report the ends of forks to the processes that asked for them; reap orphans of those that were killed."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._children:  # else an orphan
                self._reply(self._children.pop(pid), {"ended": pid, "status": status})

    def _reply(self, sock: socket.socket, message: dict[str, Any]) -> None:
        if sock.fileno() == -1:
            return  # it has ended
        try:
            channel.send(sock, message)
        except OSError:  # it was killed
            self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        """Forget a connection that has ended; kill what is left of its programs and of what they have started."""
        self._poll.unregister(sock)
        del self._starts[sock.fileno()]
        sock.close()
        for pid, started in self._programs.pop(sock, {}).items():
            kill(partial(family, pid, started))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208
