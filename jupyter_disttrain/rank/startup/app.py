"""Run a rank's process: ipyparallel's engine with our kernel and our channel to the nanny.

Covers: the order of imports, sockets, registration, the hello message, exit.
Does not cover: the rank's identity (``rank.kernel.requests``), running cells (``rank.kernel.kernel``).
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import ipykernel.compiler
import ipyparallel.engine.app
import zmq
from ipykernel.control import ControlThread
from ipykernel.kernelapp import IPKernelApp
from ipyparallel.controller.heartmonitor import Heart
from ipyparallel.engine.app import IPEngine
from zmq.eventloop.zmqstream import ZMQStream

from ...config.frameworks import accelerator_of
from ...process_table import start_time
from ...protocol.connection_file import can_end_calls
from ...protocol.environment import (
    CLIENT,
    COLD_REASON,
    CONNECTION_FILE,
    HOST,
    LAUNCH_RANK,
    LAUNCHER,
    LOCAL_DIR,
    MPI_HEALS,
    NETWORK,
    PROFILE_DIR,
    WITHOUT_TORCH,
)
from ...protocol.messages import RankHello, encrypt, is_ipv6
from ...protocol.time_limits import FINALIZE_SECONDS
from ...rank_sessions import boot_id
from ..crash_reports import begin_reports
from ..kernel.cell_threads import watch_threads
from ..kernel.error_chain import linked, walk
from ..kernel.kernel import RankKernel, ignore_signal
from ..kernel.requests import RequestHandler
from ..kernel.shell import RankProfile
from ..kernel.tracebacks import is_of_user, plain_lines
from ..libraries.import_hooks import on_import
from ..malloc import keep_freed_memory
from ..mpi.pmix import outlive_mpiexec
from ..mpi.world import finalize, join_starters
from ..nanny.ipc import RankEnd, Wire
from ..output.closed_streams import Descriptors
from ..output.iopub import Publisher, escaping
from ..output.streams import Turns, flush_all, open_streams
from ..process_group.errors import RendezvousError
from ..rank_exit import RankExit
from .connection import Connection, Hellos
from .socket_filter import hide_listeners, is_held_to
from .user_profile import ProfileApp, UserProfile

if TYPE_CHECKING:
    from collections.abc import Callable

    from traitlets.config import Config

    from ..kernel.shell import RankShell

MUX_IDENTITY = b"mux_out"  # the name of the controller's socket that routes to engines


class RankEngine(IPEngine):
    """An ipyparallel engine whose parent is a nanny and whose rank the client assigns."""

    max_heartbeat_misses = 0  # the nanny watches the controller

    def attach(self, wire: Wire, turns: Turns, hello: RankHello, connection: Connection, profile: UserProfile) -> None:
        """Set what :func:`run_rank` has prepared."""
        self._turns = turns
        self._descriptors, self._rank_end = Descriptors(wire), RankEnd(wire)
        self._hello, self._hellos = hello, Hellos()
        self._connection = connection
        self._profile = profile
        self.session.metadata = {"engine": self.ident}  # identifies the sender of every message
        self.session.pack = escaping(self.session.pack)

    async def complete_registration(self, msg: list[bytes], *_tunnels: Any) -> None:
        """Open the channels, start the kernel and send hello until the client replies."""
        _, frames = self.session.feed_identities(msg)
        content = self.session.deserialize(frames)["content"]
        self.id = content["id"]
        self._rank_end.send_identity({"engine": self.ident, "hub_id": self.id})
        self.shell_socket = self._open(zmq.ROUTER, "mux")
        self.control_socket = self._open(zmq.ROUTER, "control")
        self.kernel = self._make_kernel()
        self.kernel.start()
        self._start_heart()
        self._send_hello()

    def _start_heart(self) -> None:
        """Reply to the controller's heartbeats, in a thread of their own."""
        keys = {name: getattr(self, name) for name in ("curve_serverkey", "curve_publickey", "curve_secretkey")}
        urls = [self._connection.url(name) for name in ("hb_ping", "hb_pong")]
        heart = Heart(*urls, heart_id=self.bident, **keys)
        if is_ipv6(self._connection.info):
            heart.device.setsockopt_in(zmq.IPV6, 1)
            heart.device.setsockopt_out(zmq.IPV6, 1)
        heart.start()

    def _open(self, kind: int, channel: str) -> zmq.Socket[bytes]:
        sock = self.context.socket(kind)
        return self._connection.connect(sock, channel, IDENTITY=self.bident, SNDHWM=0, RCVHWM=0, LINGER=1000)

    def _make_kernel(self) -> RankKernel:
        control_thread = ControlThread(daemon=True)
        control_thread.start()
        publisher = Publisher(self._rank_end, self._turns, self.session.pack)
        self._turns.send_late = publisher.send_late
        kernel: RankKernel = RankKernel.instance(
            parent=self,
            engine_id=self.id,
            ident=self.ident,
            session=self.session,
            iopub_socket=publisher,
            user_ns=self.user_ns,
            log=self.log,
            profile_dir=RankProfile(location=os.environ[PROFILE_DIR]),
            control_thread=control_thread,
            control_stream=ZMQStream(self.control_socket, control_thread.io_loop),
            shell_stream=ZMQStream(self.shell_socket),
        )
        # Libraries use this singleton to detect that they run in a Jupyter kernel.
        app = ProfileApp(parent=self, shell=kernel.shell, kernel=kernel, log=self.log)  # type: ignore[no-untyped-call]
        IPKernelApp._instance = app  # type: ignore[assignment]  # noqa: SLF001
        global _exit  # noqa: PLW0603  (one per process)
        atexit.unregister(kernel.shell.atexit_operations)  # deletes variables, some of which would wait for other ranks
        _exit = RankExit()
        kernel.cell_starts.append(publisher.attribute_output)
        request_handler = RequestHandler(
            kernel.shell,
            self._rank_end,
            self._hellos,
            kernel.cell_starts,
            cell=lambda: kernel.cell,
            repeat_reply=kernel.repeat_reply,
            begin_session=functools.partial(self._run_profile, app, kernel.shell),
        )
        kernel.take_charge(request_handler, self._rank_end, self._descriptors)
        return kernel

    def _run_profile(self, app: ProfileApp, shell: RankShell) -> list[str]:
        self._turns.is_muted = True  # its output is not shown, as in an ordinary kernel
        try:
            return self._profile.run(app, shell)
        finally:
            self._turns.is_muted = False

    def _send_hello(self) -> None:
        if self._hellos.is_known:
            return
        if self._hellos.is_due():
            client = os.environ[CLIENT].encode()
            content = self._hello.to_content() | {"engine": self.ident}
            # Through the stream: sending on its socket would consume the event that signals an arrived request.
            stream = self.kernel.shell_stream
            self.session.send(stream, RankHello.msg_type, content, ident=[MUX_IDENTITY, client])
        self.loop.call_later(max(0.0, self._hellos.next_at - time.monotonic()), self._send_hello)


_exit: RankExit | None = None  # None until the rank's kernel exists


def _end(number: int, _frame: Any) -> None:
    signal.signal(signal.SIGTERM, ignore_signal)  # already ending; a launcher may send SIGTERM as well
    signal.signal(signal.SIGINT, ignore_signal)
    began = time.monotonic()
    flush_all(sys.stdout, sys.stderr)
    if _exit is not None:
        try:
            _exit.run()
        except BaseException:  # noqa: BLE001  (from the user's exit handlers; the process ends all the same)
            traceback.print_exc(file=sys.__stderr__)
        flush_all(sys.stdout, sys.stderr)
    # Neither finalize MPI nor destroy the process group: both wait for ranks that may have exited or hang. The
    # exception is a job that was started by the user's own mpirun, which treats a rank that exits without
    # MPI_Finalize as a failure of the whole job.
    if os.environ.get(LAUNCH_RANK):
        finalize(FINALIZE_SECONDS - (time.monotonic() - began))
    # Die of the signal itself, so that a rank that was ended from outside is reported with that signal.
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _free_children_of_end() -> None:
    """Let SIGTERM, e.g. ``Process.terminate()``, end a forked child as in a script, even right after the fork."""
    mask = threading.local()

    def hold() -> None:
        mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask.before)

    def release_child() -> None:
        if signal.getsignal(signal.SIGTERM) is _end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=release_child)


def _place_temporary_files() -> None:
    """Put multiprocessing's sockets and TensorFlow's generated code into the cluster's folder, which is removed.

    A rank that is killed, its DataLoader workers and its pools leave them.
    """
    folder = os.environ[LOCAL_DIR]
    if not Path(folder).is_dir():
        return
    multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]  # noqa: SLF001

    def place_code(module: Any) -> None:
        named = functools.partial(tempfile.NamedTemporaryFile, dir=folder)
        module.tempfile = SimpleNamespace(NamedTemporaryFile=named)  # the only name of tempfile that it uses

    on_import("tensorflow.python.autograph.pyct.loader", place_code)


def run_rank(wire: Wire) -> None:
    """Run a rank in this process; never returns."""
    keep_freed_memory()
    turns = Turns(wire)
    stdout, stderr = open_streams(turns)
    watch_threads()
    sys.stdout = sys.__stdout__ = stdout  # type: ignore[misc,assignment]
    sys.stderr = sys.__stderr__ = stderr  # type: ignore[misc,assignment]
    begin_reports(wire)
    signal.signal(signal.SIGINT, ignore_signal)  # it only has an effect while a cell runs
    signal.signal(signal.SIGTERM, _end)
    _free_children_of_end()
    _place_temporary_files()
    # IPython's advice after sys.exit(), which does not apply to a rank.
    warnings.filterwarnings("ignore", message="To exit: use 'exit', 'quit', or Ctrl-D")
    sys.argv = [""]
    sys.path.insert(0, "")
    hello = _prepare()
    connection = Connection.wait(os.environ[CONNECTION_FILE])
    profile = UserProfile()
    engine = RankEngine.instance(config=_config(profile.config), log_level=logging.ERROR)
    # The level of its handler alone would still have records made, only to drop them.
    engine.log.setLevel(logging.ERROR)
    # Give the files that cells are compiled from the same names on all ranks, so that warnings with them are equal.
    number = int(hashlib.sha256(connection.key).hexdigest()[:8], 16)  # in place of the pid
    ipykernel.compiler.get_tmp_directory = lambda: f"{tempfile.gettempdir()}/ipykernel_{number}"
    # Our addresses need no disambiguation, which relies on assertions that PYTHONOPTIMIZE removes.
    ipyparallel.engine.app.disambiguate_url = lambda url, _location=None: url
    engine.connection_info = connection.info
    engine.registration_url = connection.url("registration")
    if is_ipv6(connection.info):
        engine.context.set(zmq.IPV6, 1)
    encrypt(engine, connection.info)  # the engine's traits have the names of the socket options
    engine.config.Session.key = connection.key
    engine.config.Session.signature_scheme = connection.signature_scheme
    engine.id = hello.launch_rank
    engine.attach(wire, turns, hello, connection, profile)
    _serve(engine)
    stderr.write("the loop that serves this rank's cells has ended, which is a bug in jupyter_disttrain\n")
    flush_all(sys.stdout, stderr)
    os._exit(os.EX_SOFTWARE)


def _serve(engine: RankEngine) -> None:
    """Run the event loop; continue if a signal handler set by a cell raises while no cell runs."""
    run: Callable[[], Any] = functools.partial(engine.loop.run_sync, engine._start)  # noqa: SLF001
    while True:
        try:
            run()
        except (Exception, KeyboardInterrupt) as error:
            if _exit is None:
                raise  # the kernel was not started yet
            frames = [trace for trace in walk(error.__traceback__) if is_of_user(trace.tb_frame.f_code.co_filename)]
            error.__traceback__ = linked(frames)
            lines = plain_lines(error, engine.kernel.shell)
            sys.stderr.write("\n".join(["a signal handler raised this while no cell ran:", *lines, ""]))
            run = engine.loop.start
        else:
            return


def _config(config: Config) -> Config:
    """Return the user's configuration with a rank's settings added."""
    config.IPEngine.enable_nanny = False
    config.IPEngine.timeout = 60.0
    config.HistoryManager.enabled = False
    config.InteractiveShell.separate_in = ""
    config.IPKernelApp.setdefault("ignore_cwd", False)  # libraries detect a kernel by this section
    return config


def _prepare() -> RankHello:
    """Import mpi4py before torch, so that mpi4py initializes MPI; return the hello message with what was found."""
    mpi = torch_version = failure = None
    accelerator = ""
    cuda_devices = 0
    module = "mpi4py"
    try:
        if os.environ[LAUNCHER] == "mpi":
            mpi = _init_mpi()
        module = "torch"
        if not os.environ.get(WITHOUT_TORCH):
            import torch  # noqa: PLC0415
            import torch.distributed  # noqa: PLC0415

            torch_version, accelerator = torch.__version__, accelerator_of(torch)
            cuda_devices = torch.cuda.device_count()
    except Exception as error:  # noqa: BLE001  (a broken installation raises OSError and others as well)
        failure = f"{module} can't be imported: {type(error).__name__}: {error}"
    return RankHello(
        engine="",
        host=socket.gethostname(),
        pid=os.getpid(),
        nanny_pid=os.getppid(),
        nanny_started=start_time(os.getppid()),
        launch_rank=_launch_rank(),
        launcher=os.environ[LAUNCHER],
        launch_host=os.environ.get(HOST, ""),
        boot=boot_id(),
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        mpi=mpi,
        torch=torch_version,
        cuda_devices=cuda_devices,
        accelerator=accelerator,
        failure=failure,
        cold_reason=os.environ.get(COLD_REASON, ""),
    )


def _launch_rank() -> int | None:
    if os.environ.get(LAUNCH_RANK):
        return int(os.environ[LAUNCH_RANK])
    if os.environ[LAUNCHER] != "mpi":
        return None  # such variables belong to the job that Jupyter itself runs in and are equal on every rank
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
    return next((int(os.environ[name]) for name in names if os.environ.get(name)), None)


def _init_mpi() -> str:
    # MPI puts its files where they are removed with the cluster: without its mpiexec it starts a job of its own. TMPDIR
    # names an open descriptor, so that MPI cannot create the folder again if it was removed.
    before = os.environ.get("TMPDIR")
    try:
        folder = os.open(os.environ[LOCAL_DIR], os.O_PATH | os.O_DIRECTORY)
    except FileNotFoundError:
        _give_up("the cluster has ended")
    os.environ["TMPDIR"] = f"/proc/self/fd/{folder}"
    from mpi4py import MPI  # noqa: PLC0415

    os.environ.pop("TMPDIR")
    if before is not None:
        os.environ["TMPDIR"] = before
    if MPI.COMM_WORLD.size != int(os.environ.get("OMPI_COMM_WORLD_SIZE", MPI.COMM_WORLD.size)):
        _give_up("mpiexec has ended")
    outlive_mpiexec()
    version = str(MPI.Get_library_version()).split(",")[0].split("\n")[0].strip()
    if os.environ.get(LAUNCH_RANK):  # a rank of a job that was joined: its listeners are left alone
        if not can_end_calls(version):
            os.environ.pop(MPI_HEALS, None)
    elif os.environ.get(MPI_HEALS) or is_held_to(os.environ.get(NETWORK, ""), os.environ):
        hide_listeners(os.environ.get(NETWORK))
    try:
        join_starters()
    except (RendezvousError, MPI.Exception) as error:
        _give_up(str(error))
    return version


def _give_up(why: str) -> NoReturn:
    """Exit this process, which nothing else would end; skip the interpreter's exit, as MPI's would wait for others."""
    sys.stderr.write(f"this process can't join the MPI job: {why}\n")
    os._exit(1)
