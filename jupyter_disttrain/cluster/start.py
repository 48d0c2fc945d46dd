"""Bring a cluster up, and down.

Covers: the folders, controller and ranks as processes, hearing from each rank, telling each who it is.
Does not cover: running cells (``cluster``).

Controller and ranks are started at the same moment: while the controller comes up, the ranks import torch.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ipyparallel
import psutil
from traitlets.config import Config

from ..errors import ClusterClosedError, LaunchError, StartInterruptedError
from ..messages import NANNY_REQUEST, RANK_REQUEST, NannyHello, RankDeath, RankHello
from ..ranks import RankInfo, label_ranks
from .controller_launcher import ControllerProcess
from .devices import choose_gpus
from .folders import Folders
from .launchers import LAUNCHERS
from .link import Link, Message
from .rank_environment import rank_environment, session_environment
from .rank_table import RankEntry, decide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from ..config import ClusterConfig

POLL_SECONDS = 0.005
MISSED_LOOKS = 3  # for a nanny that is gone: what it said last may be on its way
END_SECONDS = 6.0  # for ranks to end by themselves at a shutdown


class Launch:
    """The processes of one cluster."""

    def __init__(
        self, config: ClusterConfig, on_message: Callable[[str, Message], None], on_lost: Callable[[], None]
    ) -> None:
        self.config = config
        self._on_message = on_message
        self._on_lost = on_lost
        self._generations = 0
        self._arrivals: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._started = False
        self._processes: Any = None
        self.table: list[RankEntry] = []
        self.link: Link | None = None
        self.gpus = choose_gpus(config)
        self.n = config.n or len(self.gpus) or 2
        self.folders = Folders.make(config.name)
        self._deadline = time.monotonic() + config.start_timeout_s

    # Up

    def start(self) -> None:
        """Start everything; when it returns, every rank has joined its process group.

        Raises
        ------
        LaunchError
            If a rank can't be started; what was started has ended by then.
        """
        try:
            with _interrupts_deferred():  # ipyparallel's event loop would lose one
                self._start_processes()
            info = self._wait_for_connection()
            self.link = Link(
                info, self.folders.cluster_id, self._on_early_message, self._on_controller_lost, self._look_for_nannies
            )
            entries = self._hear_from_ranks()
            self._introduce(entries)
        except KeyboardInterrupt:
            self.stop()
            raise StartInterruptedError("the start was interrupted; nothing of it is left running") from None
        except BaseException:  # whatever it was, nothing that was started may stay; it is raised again
            self.stop()
            raise
        self._started = True

    def _start_processes(self) -> None:
        log = logging.getLogger("jupyter_disttrain.ipyparallel")
        log.propagate = False
        if not log.handlers:
            log.addHandler(logging.NullHandler())
        cluster = ipyparallel.Cluster(
            config=Config(),
            log=log,
            load_profile=False,
            profile_dir=str(self.folders.profile),
            cluster_id=self.folders.cluster_id,
            cluster_file=str(self.folders.profile / "security" / "cluster.json"),
            controller=ControllerProcess,
            engines=LAUNCHERS[self.config.launcher],
            send_engines_connection_env=False,
            shutdown_atexit=False,
        )
        self._processes = cluster
        owner = 0 if self.config.keep else os.getpid()
        removable = os.pathsep.join(map(str, self.folders.removable))
        _outside_loop(
            cluster.start_controller_sync, owner_pid=owner, remove_dirs=removable, sockets=self.folders.sockets
        )
        environment = rank_environment(self.config, self.folders, self.n, self.gpus)
        _outside_loop(cluster.start_engines_sync, self.n, environment=environment)

    def _wait_for_connection(self) -> dict[str, Any]:
        while True:
            try:
                info: dict[str, Any] = json.loads(self.folders.client_file.read_text())
            except (FileNotFoundError, json.JSONDecodeError):
                self._check_processes()
                time.sleep(POLL_SECONDS)
            else:
                return info

    def _hear_from_ranks(self) -> list[tuple[RankInfo, RankHello, str]]:
        """Wait for every rank and every nanny to say hello; return who is which rank."""
        hellos: dict[str, RankHello] = {}
        nannies: dict[str, str] = {}
        while not (len(hellos) == self.n and hellos.keys() <= nannies.keys()):
            try:
                arrival = self._arrivals.get(timeout=0.2)
            except queue.Empty:
                self._check_processes(len(hellos))
                continue
            if isinstance(arrival, RankHello):
                self._check_hello(arrival)
                hellos[arrival.engine] = arrival
            elif isinstance(arrival, NannyHello):
                nannies[arrival.engine] = arrival.nanny
            elif isinstance(arrival, RankDeath):
                self._fail_dead(arrival)
        decided = decide(list(hellos.values()), self._backend(hellos), len(self.gpus))
        return [(info, hello, nannies[hello.engine]) for info, hello in decided]

    def _backend(self, hellos: dict[str, RankHello]) -> str:
        if self.config.backend != "auto":
            return self.config.backend
        shared = self.n > len(self.gpus)  # NCCL takes one rank per GPU
        return "nccl" if self.gpus and not shared and all(hello.cuda_devices for hello in hellos.values()) else "gloo"

    def _check_hello(self, hello: RankHello) -> None:
        if hello.failure is None:
            return
        remedies = {
            "torch": "install torch for the Python that runs the notebook, or start without it: --backend none",
            "mpi4py": "install it for the Python that runs the notebook, or start without MPI: --launcher local",
        }
        module = hello.failure.split(" ", 1)[0]
        remedy = remedies.get(module, "jupyter disttrain doctor checks the installation")
        raise LaunchError(f"a rank on {hello.host} can't start: {hello.failure}; {remedy}")

    def _introduce(self, entries: list[tuple[RankInfo, RankHello, str]]) -> None:
        """Tell each rank who it is; rank 0 first, because it chooses the port."""
        self.table = [
            RankEntry(info=info, engine=hello.engine, nanny=nanny, nanny_pid=hello.nanny_pid)
            for info, hello, nanny in entries
        ]
        self.address = self.config.address or "127.0.0.1"
        first = self._identify(self.table[0])
        others = [self._identify(entry) for entry in self.table[1:]]
        told = [self._wait(future, rank, "answer") for rank, future in enumerate([first, *others])]
        self.port = told[0]["port"]
        for entry, reply in zip(self.table, told, strict=True):
            entry.sees_shelf = reply["sees_shelf"]
        self.join()

    @property
    def shelf_folder(self) -> str | None:
        """The folder in shared memory; None without one."""
        return None if self.folders.shelf is None else str(self.folders.shelf)

    def _identify(self, entry: RankEntry) -> Future[Message]:
        request = {
            "do": "identify",
            "info": entry.info.as_dict(),
            "environment": session_environment(entry.info),
            "log_path": str(self.folders.rank_log(entry.info.rank)),
            "address": self.address,
            "port": self.config.port,
            "timeout_s": self.config.timeout_s,
            "shelf": self.shelf_folder,
        }
        return self.open_link.request(entry.engine, RANK_REQUEST, request)

    def join(self) -> None:
        """Have every rank join a new process group over the session's store."""
        if self._started:
            self._deadline = time.monotonic() + self.config.start_timeout_s
        self._generations += 1
        request = {"do": "join", "address": self.address, "port": self.port, "generation": self._generations}
        futures = [self.open_link.request(entry.engine, RANK_REQUEST, request) for entry in self.table]
        for rank, future in enumerate(futures):
            self._wait(future, rank, "join its process group")
            self.table[rank].has_group = True

    def _wait(self, future: Future[Message], rank: int, what: str) -> dict[str, Any]:
        info = self.table[rank].info
        while not future.done():
            try:
                arrival = self._arrivals.get(timeout=0.002)
            except queue.Empty:
                if self.table[rank].state == "dead":
                    raise LaunchError(f"rank {rank} died; %dist_reset starts the ranks anew") from None
                if time.monotonic() > self._deadline:
                    log = self.folders.rank_log(rank)
                    said = f"its log may say why: {log}" if log.exists() else "it said nothing"
                    raise LaunchError(
                        f"rank {rank} on {info.host} (process {info.pid}) did not {what} within "
                        f"{self.config.start_timeout_s:g} s; {said}; give more with --start-timeout, or start anew"
                    ) from None
                continue
            if isinstance(arrival, RankDeath):
                self._fail_dead(arrival)
        content: dict[str, Any] = future.result()["content"]
        if content["status"] == "error":
            raise LaunchError(f"rank {rank} on {info.host}: {content['evalue'] or content['ename']}")
        return content

    @property
    def open_link(self) -> Link:
        """The sockets to the ranks.

        Raises
        ------
        ClusterClosedError
            If the cluster was shut down.
        """
        self.check_open()
        assert self.link is not None
        return self.link

    def check_open(self) -> None:
        """Raise a ClusterClosedError if the cluster was shut down."""
        if self.link is None:
            raise ClusterClosedError(f"the cluster {self.config.name!r} was shut down; start one with %dist_init")

    # What goes wrong on the way

    def _on_controller_lost(self) -> None:
        """Tell the cluster, unless this is how it was ended; called on the link's thread."""
        if self.link is not None and self._started:
            self.link.fail_requests("the controller ended; %dist_reset starts the ranks anew")
            self._on_lost()

    def _on_early_message(self, channel: str, message: Message) -> None:
        """Collect hellos and deaths until every rank has joined; called on the link's thread."""
        if not self._started:
            for record in (RankHello, NannyHello, RankDeath):
                if message["header"]["msg_type"] == record.msg_type:
                    self._arrivals.put(record.from_content(message["content"]))
        self._on_message(channel, message)

    def _look_for_nannies(self) -> None:
        """Tell of ranks whose nanny was killed with them, and so could not tell; called on the link's thread."""
        for entry in self.table:
            info = entry.info
            if entry.state == "dead" or info.host != socket.gethostname() or psutil.pid_exists(entry.nanny_pid):
                entry.nanny_missed = 0
                continue
            entry.nanny_missed += 1
            if entry.nanny_missed < MISSED_LOOKS:
                continue
            death = RankDeath(
                engine=entry.engine,
                pid=info.pid,
                host=info.host,
                exit_code=None,
                signal_number=signal.SIGKILL,
                crash="",
                stderr_tail="",
                expected=False,
            )
            header = {"msg_type": death.msg_type}
            metadata = {"engine": entry.engine}
            told = {"header": header, "parent_header": {}, "metadata": metadata, "content": death.to_content()}
            self._on_early_message("iopub", told)

    def _check_processes(self, heard: int = 0) -> None:
        controller = self._processes.controller
        if controller is not None and not controller.alive():
            raise LaunchError(f"the controller ended while starting{_said(controller.get_output())}")
        for engines in self._processes.engines.values():
            if not engines.alive():
                said = _said(engines.get_output())
                raise LaunchError(f"{self._launcher_name()} ended before the ranks were up{said}")
        if time.monotonic() > self._deadline:
            said = "".join(engines.get_output() for engines in self._processes.engines.values())
            raise LaunchError(
                f"{heard} of {self.n} ranks came up within {self.config.start_timeout_s:g} s; "
                f"give more with --start-timeout, or see what {self._launcher_name()} did{_said(said)}"
            )

    def _launcher_name(self) -> str:
        return "mpiexec" if self.config.launcher == "mpi" else "the launcher"

    def _fail_dead(self, death: RankDeath) -> None:
        known = [entry.info.rank for entry in self.table if entry.engine == death.engine]
        who = label_ranks(known) if known else "a rank"
        said = f"; its last lines on stderr:\n{_tail(death.stderr_tail)}" if death.stderr_tail.strip() else ""
        said = said or "; jupyter disttrain doctor may tell why"
        raise LaunchError(f"{who} on {death.host} {death.cause} while starting{said}")

    # Down

    def stop(self) -> None:
        """End every process and remove what must not stay; does nothing the second time."""
        link, self.link = self.link, None
        processes, self._processes = self._processes, None
        try:
            if link is not None:
                self._end_ranks(link)
            if processes is not None:
                self._end_processes(processes, politely=link is not None)
        finally:  # an interrupt here, too
            if link is not None:
                link.close()
            self.folders.remove()

    def _end_ranks(self, link: Link) -> None:
        for entry in self.table:
            if entry.state != "dead":
                link.request(entry.nanny, NANNY_REQUEST, {"do": "end"})

    def _end_processes(self, processes: Any, *, politely: bool) -> None:
        deadline = time.monotonic() + (END_SECONDS if politely and self.table else 0.0)
        try:
            while time.monotonic() < deadline and any(engines.alive() for engines in processes.engines.values()):
                time.sleep(POLL_SECONDS)
        finally:  # who interrupts it only doesn't want to wait
            _outside_loop(processes.stop_cluster_sync)


def _outside_loop(call: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Call ipyparallel where no event loop runs: beside a kernel's loop it would leave a thread behind each time."""
    with ThreadPoolExecutor(1, thread_name_prefix="disttrain launch") as executor:
        executor.submit(call, *args, **options).result()


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Raise an interrupt that comes meanwhile only at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _said(text: str) -> str:
    """Return the end of a message: what a process said last, or where to look if it said nothing."""
    return f":\n{_tail(text)}" if text.strip() else " (it said nothing); jupyter disttrain doctor may tell why"


def _tail(text: str, lines: int = 15) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])
