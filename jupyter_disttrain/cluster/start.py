"""Bring a cluster up, and down.

Covers: the folders, controller and ranks as processes, hearing from each rank, telling each who it is.
Does not cover: running cells (``cluster``).

Controller and ranks are started at the same moment: while the controller comes up, the ranks import torch.
"""

from __future__ import annotations

import json
import queue
import signal
import socket
import threading
import time
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil

from ..errors import ClusterClosedError, LaunchError, StartInterruptedError
from ..messages import NANNY_REQUEST, RANK_REQUEST, NannyHello, RankDeath, RankHello
from ..ranks import RankInfo, label_ranks
from .devices import choose_gpus
from .folders import Folders
from .link import Link, Message
from .processes import POLL_SECONDS, Processes, said, tail
from .rank_environment import session_environment
from .rank_table import RankEntry, decide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from ..config import ClusterConfig

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
        self.generation = 0  # of the process group: how often it was formed
        self._arrivals: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._started = False
        self._awaits_rank = False  # a new process for a rank that died
        self._one_at_a_time = threading.Lock()  # a process does not know for which rank it was started
        self._processes: Processes | None = None
        self.table: list[RankEntry] = []
        self.replaced: set[int] = set()  # ranks that have a process of their own since a death
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
        self._processes = Processes(self.config, self.folders, self.n, self.gpus)
        try:
            with _interrupts_deferred():  # ipyparallel's event loop would lose one
                self._processes.start()
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

    def _wait_for_connection(self) -> dict[str, Any]:
        while True:
            try:
                info: dict[str, Any] = json.loads(self.folders.client_file.read_text())
            except (FileNotFoundError, json.JSONDecodeError):
                self._check_time()
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
                self._check_time(len(hellos))
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
        """Tell each rank who it is, and have all form the process group."""
        self.table = [
            RankEntry(info=info, engine=hello.engine, nanny=nanny, nanny_pid=hello.nanny_pid)
            for info, hello, nanny in entries
        ]
        self.address = self.config.address or "127.0.0.1"
        told = [self._identify(entry) for entry in self.table]
        for entry, future in zip(self.table, told, strict=True):
            entry.sees_shelf = self._wait(future, entry, "answer")["sees_shelf"]
        self.form()

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
            "timeout_s": self.config.timeout_s,
            "shelf": self.shelf_folder,
        }
        return self.open_link.request(entry.engine, RANK_REQUEST, request)

    def form(self) -> dict[str, list[int]]:
        """Have all ranks form a process group, over a store that rank 0 opens on a new port.

        Returns
        -------
        dict of str to list of int
            What of earlier groups could not be made anew: the lines that made it, and the ranks where it is gone.

        Raises
        ------
        LaunchError
            If a rank does not join.
        """
        self.generation += 1
        place = {"address": self.address, "port": self.config.port if self.generation == 1 else 0}
        opened = self.open_link.request(self.table[0].engine, RANK_REQUEST, {"do": "open_store", **place})
        place["port"] = self._wait(opened, self.table[0], "open the store")["port"]
        # MPI has no world with a process that was started later.
        outside_mpi = sorted(self.replaced) if self.config.launcher == "mpi" else []
        request = {"do": "form", **place, "generation": self.generation, "outside_mpi": outside_mpi}
        futures = [self.open_link.request(entry.engine, RANK_REQUEST, request) for entry in self.table]
        lost: dict[str, list[int]] = {}
        for entry, future in zip(self.table, futures, strict=True):
            for line in self._wait(future, entry, "join its process group")["lost"]:
                lost.setdefault(line, []).append(entry.info.rank)
            entry.group = "none" if self.config.backend == "none" else f"session/{self.generation}"
        return lost

    def _wait(self, future: Future[Message], entry: RankEntry, what: str) -> dict[str, Any]:
        info = entry.info
        deadline = time.monotonic() + self.config.start_timeout_s if self._started else self._deadline
        while not wait([future], 0.01 if self._started else 0.002).done:
            if not self._started:
                self._heed_deaths()
            if entry.state == "dead":
                raise LaunchError(f"rank {info.rank} died; %dist_reset starts the ranks anew")
            if time.monotonic() > deadline:
                log = self.folders.rank_log(info.rank)
                said = f"its log may say why: {log}" if log.exists() else "it said nothing"
                raise LaunchError(
                    f"rank {info.rank} on {info.host} (process {info.pid}) did not {what} within "
                    f"{self.config.start_timeout_s:g} s; {said}; give more with --start-timeout, or start anew"
                )
        content: dict[str, Any] = future.result()["content"]
        if content["status"] == "error":
            raise LaunchError(f"rank {info.rank} on {info.host}: {content['evalue'] or content['ename']}")
        return content

    def _heed_deaths(self) -> None:
        """Fail if a rank has died while starting."""
        while not self._arrivals.empty():
            arrival = self._arrivals.get()
            if isinstance(arrival, RankDeath):
                self._fail_dead(arrival)

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

    def replace(self, rank: int) -> None:
        """Start a new process for a rank that died, and tell it who it is; it joins no group yet.

        Raises
        ------
        LaunchError
            If it does not come up.
        """
        with self._one_at_a_time:
            self._awaits_rank = True
            try:
                assert self._processes is not None
                self._processes.start_one(f"replacement-{rank}")
                hello, nanny = self._hear_from_one({entry.engine for entry in self.table})
                old = self.table[rank]
                info = replace(old.info, host=hello.host, pid=hello.pid)
                entry = RankEntry(info=info, engine=hello.engine, nanny=nanny, nanny_pid=hello.nanny_pid)
                entry.sees_shelf = self._wait(self._identify(entry), entry, "answer")["sees_shelf"]
                entry.group = "none" if self.config.backend == "none" else "broken"
                self.table[rank] = entry
                self.replaced.add(rank)
            finally:
                self._awaits_rank = False

    def _hear_from_one(self, known: set[str]) -> tuple[RankHello, str]:
        hello: RankHello | None = None
        nannies: dict[str, str] = {}
        deadline = time.monotonic() + self.config.start_timeout_s
        while hello is None or hello.engine not in nannies:
            try:
                arrival = self._arrivals.get(timeout=0.2)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise LaunchError(f"no new process came up within {self.config.start_timeout_s:g} s") from None
                continue
            if isinstance(arrival, RankHello) and arrival.engine not in known:
                self._check_hello(arrival)
                hello = arrival
            elif isinstance(arrival, NannyHello):
                nannies[arrival.engine] = arrival.nanny
            elif isinstance(arrival, RankDeath) and arrival.engine not in known:
                self._fail_dead(arrival)
        return hello, nannies[hello.engine]

    # What goes wrong on the way

    def _on_controller_lost(self) -> None:
        """Tell the cluster, unless this is how it was ended; called on the link's thread."""
        if self.link is not None and self._started:
            self.link.fail_requests("the controller ended; %dist_reset starts the ranks anew")
            self._on_lost()

    def _on_early_message(self, channel: str, message: Message) -> None:
        """Collect hellos and deaths until every rank has joined; called on the link's thread."""
        if not self._started or self._awaits_rank:
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

    def _check_time(self, heard: int = 0) -> None:
        assert self._processes is not None
        self._processes.check()
        if time.monotonic() > self._deadline:
            words = said(self._processes.output)
            raise LaunchError(
                f"{heard} of {self.n} ranks came up within {self.config.start_timeout_s:g} s; "
                f"give more with --start-timeout, or see what {self._processes.launcher} did{words}"
            )

    def _fail_dead(self, death: RankDeath) -> None:
        known = [entry.info.rank for entry in self.table if entry.engine == death.engine]
        who = label_ranks(known) if known else "a rank"
        words = f"; its last lines on stderr:\n{tail(death.stderr_tail)}" if death.stderr_tail.strip() else ""
        words = words or "; jupyter disttrain doctor may tell why"
        raise LaunchError(f"{who} on {death.host} {death.cause} while starting{words}")

    # Down

    def stop(self) -> None:
        """End every process and remove what must not stay; does nothing the second time."""
        link, self.link = self.link, None
        processes, self._processes = self._processes, None
        try:
            if link is not None:
                self._end_ranks(link)
            if processes is not None:
                processes.end(END_SECONDS if link is not None and self.table else 0.0)
        finally:  # an interrupt here, too
            if link is not None:
                link.close()
            self.folders.remove()

    def _end_ranks(self, link: Link) -> None:
        for entry in self.table:
            if entry.state != "dead":
                link.request(entry.nanny, NANNY_REQUEST, {"do": "end"})


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
