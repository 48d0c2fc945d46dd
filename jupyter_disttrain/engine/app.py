"""The rank's process: ipyparallel's engine, with our kernel and our wire.

Covers: imports in the right order, sockets, registration, saying hello, ending.
Does not cover: being told who it is (``bootstrap``), running cells (``kernel``).
"""

from __future__ import annotations

import atexit
import contextlib
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

from ..framework_variables import accelerator_of
from ..job_file import can_end_calls
from ..messages import RankHello, encrypt, is_ipv6
from .bootstrap import Bootstrap
from .cell_threads import watch_threads
from .connection import (
    CLIENT_IDENTITY,
    CONNECTION_FILE,
    LAUNCH_RANK,
    LAUNCHER,
    LOCAL_DIR,
    MPI_HEALS,
    PROFILE_DIR,
    WITHOUT_TORCH,
    Connection,
)
from .crash_reports import begin_reports
from .escapes import escaping
from .hellos import Hellos
from .kernel import RankKernel, ignore_signal
from .loopback import hide_listeners, is_held_to
from .mpi_world import finalize, join_starters
from .on_import import on_import
from .process_group import RendezvousError
from .publisher import Publisher
from .rank_exit import RankExit
from .setup import HOST, NETWORK
from .shell import RankProfile
from .streams import Descriptors, Turns, flush_all, open_streams
from .user_profile import ProfileApp, UserProfile
from .wire import IDENTITY, RankEnd, Wire, reserve_descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from traitlets.config import Config

FINALIZE_SECONDS = 2.7  # after a rank was asked to end; less than a nanny's patience
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MUX_IDENTITY = b"mux_out"  # the name of the controller's socket that routes to engines


class RankEngine(IPEngine):
    """An ipyparallel engine that belongs to a nanny and is told its rank."""

    max_heartbeat_misses = 0  # the nanny watches the controller

    def attach(
        self,
        wire: Wire,
        turns: Turns,
        hello: RankHello,
        connection: Connection,
        profile: UserProfile,
        reserved: list[int],
    ) -> None:
        """Take what :func:`run_rank` prepared."""
        self._turns = turns
        self._descriptors, self._reserved = Descriptors(wire), reserved
        self._rank_end = RankEnd(wire)
        self._hello = hello
        self._connection = connection
        self._profile = profile
        self._hellos = Hellos()
        self.session.metadata = {"engine": self.ident}  # on every message: whose it is
        self.session.pack = escaping(self.session.pack)

    async def complete_registration(self, msg: list[bytes], *_tunnels: Any) -> None:
        """Open the channels, start the kernel and keep saying hello until the client answers."""
        _, frames = self.session.feed_identities(msg)
        content = self.session.deserialize(frames)["content"]
        self.id = content["id"]
        self._rank_end.send(IDENTITY, [self.session.pack({"engine": self.ident, "hub_id": self.id})])
        self.shell_socket = self._open(zmq.ROUTER, "mux")
        self.control_socket = self._open(zmq.ROUTER, "control")
        self.kernel = self._make_kernel()
        self.init_signal()
        self.kernel.start()
        self._start_heart()
        self._say_hello()

    def _start_heart(self) -> None:
        """Answer the controller's heartbeats, in a thread of the heart's own."""
        info = self._connection.info
        keys = {name: getattr(self, name) for name in ("curve_serverkey", "curve_publickey", "curve_secretkey")}
        urls = [self._connection.url(name) for name in ("hb_ping", "hb_pong")]
        heart = Heart(*urls, heart_id=self.bident, **keys)
        if is_ipv6(info):
            heart.device.setsockopt_in(zmq.IPV6, 1)
            heart.device.setsockopt_out(zmq.IPV6, 1)
        heart.start()

    def _open(self, kind: int, channel: str) -> zmq.Socket[bytes]:
        sock = self.context.socket(kind)
        return self._connection.connect(sock, channel, IDENTITY=self.bident, SNDHWM=0, RCVHWM=0, LINGER=1000)

    def _make_kernel(self) -> RankKernel:
        control_thread = ControlThread(daemon=True)
        control_thread.start()
        publisher = Publisher(self._rank_end, self._turns)
        self._turns.send_late = lambda header, stream, data: publisher.send_late(
            self.session.pack(header), stream, data
        )
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
        # Libraries ask for this singleton to find out that they run in a Jupyter kernel.
        app = ProfileApp(parent=self, shell=kernel.shell, kernel=kernel, log=self.log)  # type: ignore[no-untyped-call]
        IPKernelApp._instance = app  # type: ignore[assignment]  # noqa: SLF001
        global _exit  # noqa: PLW0603  (of this process)
        atexit.unregister(kernel.shell.atexit_operations)  # it deletes variables, and some would wait for other ranks
        _exit = RankExit()
        bootstrap = Bootstrap(self._rank_end, self.session, self.ident, lambda: kernel.cell, self._hellos)
        bootstrap.begin_session = lambda: self._profile.run(app, kernel.shell)
        kernel.take_charge(bootstrap, publisher, self._descriptors, self._reserved)
        return kernel

    def _say_hello(self) -> None:
        if self._hellos.is_known:
            return
        if self._hellos.is_due():
            client = os.environ[CLIENT_IDENTITY].encode()
            content = self._hello.to_content() | {"engine": self.ident}
            # Through the stream: sending on its socket would take the event that tells it of an arrived request.
            stream = self.kernel.shell_stream
            self.session.send(stream, RankHello.msg_type, content, ident=[MUX_IDENTITY, client])
        self.loop.call_later(max(0.0, self._hellos.next_at - time.monotonic()), self._say_hello)

    def init_signal(self) -> None:
        """SIGINT means something only while a cell runs; SIGTERM ends the process."""
        signal.signal(signal.SIGINT, ignore_signal)
        signal.signal(signal.SIGTERM, _end)


_exit: RankExit | None = None  # None until the rank's kernel is there


def _end(number: int, _frame: Any) -> None:
    signal.signal(signal.SIGTERM, ignore_signal)  # it ends already; a launcher may ask, too
    signal.signal(signal.SIGINT, ignore_signal)
    began = time.monotonic()
    _flush()
    if _exit is not None:
        try:
            _exit.run()
        except BaseException:  # noqa: BLE001  (of the user's code; the process ends all the same)
            traceback.print_exc()
        flush_all(sys.stdout, sys.stderr)
    # Neither MPI_Finalize nor a process group's destruction: both wait for ranks that may be gone or stuck. Only an
    # mpirun of somebody else's takes a rank that ends without it for a failure of the whole job.
    if os.environ.get(LAUNCH_RANK):
        finalize(FINALIZE_SECONDS - (time.monotonic() - began))
    # The signal's own effect: a rank that somebody else ends is told of as what it is.
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _free_children_of_end() -> None:
    """Let SIGTERM end a forked child as it ends a script's, e.g. by ``Process.terminate()``, however early it comes."""
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
    """Have multiprocessing make its sockets in the cluster's folder, and TensorFlow the code that it generates.

    A rank, its DataLoaders' workers and its pools may be ended by a signal, and then nobody would remove what they made
    in a folder of their own; this one goes with the cluster.
    """
    folder = os.environ.get(LOCAL_DIR)
    if not folder or not Path(folder).is_dir():
        return
    multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]  # noqa: SLF001

    def place_code(module: Any) -> None:
        named = functools.partial(tempfile.NamedTemporaryFile, dir=folder)
        module.tempfile = SimpleNamespace(NamedTemporaryFile=named)  # all that it takes of tempfile

    on_import("tensorflow.python.autograph.pyct.loader", place_code)


def run_rank(wire: Wire) -> None:
    """Be a rank; returns never."""
    reserved = reserve_descriptors()
    turns = Turns(wire)
    stdout, stderr = open_streams(turns)
    watch_threads()
    sys.stdout = sys.__stdout__ = stdout  # type: ignore[misc,assignment]
    sys.stderr = sys.__stderr__ = stderr  # type: ignore[misc,assignment]
    begin_reports(wire)
    signal.signal(signal.SIGINT, ignore_signal)
    signal.signal(signal.SIGTERM, _end)
    _free_children_of_end()
    _place_temporary_files()
    # IPython's advice after sys.exit(), which would be wrong here.
    warnings.filterwarnings("ignore", message="To exit: use 'exit', 'quit', or Ctrl-D")
    sys.argv = [""]
    sys.path.insert(0, "")
    hello = _prepare()
    connection = Connection.wait(os.environ[CONNECTION_FILE])
    profile = UserProfile()
    engine = RankEngine.instance(config=_config(profile.config), log_level=logging.ERROR)
    # Its handler has a level too, but there records are made only to be dropped.
    engine.log.setLevel(logging.ERROR)
    # The files that cells are compiled from get one name on all ranks, so that warnings which name them are alike.
    ipykernel.compiler.get_tmp_directory = lambda: f"{tempfile.gettempdir()}/ipykernel_{_number(connection)}"
    # Our addresses need no such look, which relies on assertions; PYTHONOPTIMIZE leaves these out.
    ipyparallel.engine.app.disambiguate_url = lambda url, _location=None: url
    engine.connection_info = connection.info
    engine.registration_url = connection.url("registration")
    if is_ipv6(connection.info):
        engine.context.set(zmq.IPV6, 1)
    encrypt(engine, connection.info)  # it has traits of the same names as sockets have options
    engine.config.Session.key = connection.key
    engine.config.Session.signature_scheme = connection.signature_scheme
    engine.id = hello.launch_rank
    engine.attach(wire, turns, hello, connection, profile, reserved)
    engine.start()
    sys.stderr.write("the loop that serves this rank's cells has ended, which is a fault of jupyter_disttrain\n")
    _flush()
    os._exit(os.EX_SOFTWARE)


def _number(connection: Connection) -> int:
    """Return a number that the ranks of one cluster share, in place of the process's."""
    return int(hashlib.sha256(connection.key).hexdigest()[:8], 16)


def _config(config: Config) -> Config:
    """Return the user's configuration with what a rank needs."""
    config.IPEngine.enable_nanny = False
    config.IPEngine.timeout = 60.0
    config.HistoryManager.enabled = False
    config.InteractiveShell.separate_in = ""
    config.IPKernelApp.setdefault("ignore_cwd", False)  # libraries look for this section to tell a kernel
    return config


def _prepare() -> RankHello:
    """Import MPI before torch, so that it owns MPI's start, and say what was found."""
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
        launch_rank=_launch_rank(),
        launcher=os.environ[LAUNCHER],
        launch_host=os.environ.get(HOST, ""),
        boot=_boot(),
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        mpi=mpi,
        torch=torch_version,
        cuda_devices=cuda_devices,
        accelerator=accelerator,
        failure=failure,
    )


def _launch_rank() -> int | None:
    if os.environ.get(LAUNCH_RANK):
        return int(os.environ[LAUNCH_RANK])
    if os.environ[LAUNCHER] != "mpi":
        return None  # such variables are of the job that Jupyter itself runs in, and say the same to every rank
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
    return next((int(os.environ[name]) for name in names if os.environ.get(name)), None)


@contextlib.contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    """Have MPI put its files where they go with the cluster: without its mpiexec it begins a job of its own.

    By a descriptor, which stays open: where the folder is gone already, nothing makes it anew.
    """
    before = os.environ.get("TMPDIR")
    try:
        opened = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    except FileNotFoundError:
        _give_up("the cluster has ended")
    os.environ["TMPDIR"] = f"/proc/self/fd/{opened}"
    yield
    if before is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before


def _init_mpi() -> str:
    with _temporary_files_in(os.environ[LOCAL_DIR]):
        from mpi4py import MPI  # noqa: PLC0415

    if MPI.COMM_WORLD.size != int(os.environ.get("OMPI_COMM_WORLD_SIZE", MPI.COMM_WORLD.size)):
        _give_up("mpiexec has ended")
    version = str(MPI.Get_library_version()).split(",")[0].split("\n")[0].strip()
    if os.environ.get(LAUNCH_RANK):  # a job's listeners are its own
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
    """End this process: nobody else would. Not by the interpreter: MPI's own end would wait for the others."""
    sys.stderr.write(f"this process can't join the MPI job: {why}\n")
    os._exit(1)


def _boot() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
