"""Join the ranks of a job that somebody else has started, by the file that it wrote.

Covers: reading the file, telling the ranks who they are when the first notebook comes, what can't be done to a job.
Does not cover: the job's side (``engine.join``), joining for the second time (``attach``), tunnels (``tunnel``).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ..config import ClusterConfig
from ..errors import LaunchError, UsageError
from ..hosts import HostSlots, split_command
from ..job_file import JobFile, can_end_calls, check_beside
from ..private_files import read_own
from ..ranks import counted
from ..shelf import NOTEBOOK
from .devices import check_nccl, note_of_devices
from .folders import Folders
from .placement import Placement
from .processes import POLL_SECONDS
from .rank_table import decide, tell_apart
from .registry import VERSION, ClusterFile, Hold
from .start import Launch
from .tunnel import Tunnel, split, tunnel_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import psutil

    from ..messages import NannyHello, RankHello
    from ..ranks import RankInfo
    from .link import Message
    from .processes import Births

MEET_SECONDS = 60.0  # for all ranks to come


def is_file(which: str) -> bool:
    """Whether this means a job's file, here or as ``HOST:FILE``, and no cluster's name or id."""
    return split(which) is not None or "/" in which or Path(which).is_file()


def find(which: str, ssh: str) -> JobFile | ClusterFile:
    """Return the cluster whose ranks a job's file names: as a notebook has left it, or as the job has started it.

    Through a tunnel, which is open then and which :func:`let_go` closes again, if the file is on another host.

    Raises
    ------
    UsageError
        If it can't be joined; the message says why and what to do.
    LaunchError
        If ssh fails.
    """
    remote = split(which)
    if remote is not None:
        told = Tunnel(*remote, split_command(ssh)).told
        return left_by_notebook(told, which) or told
    path = full_path(which)
    told = read(Path(path))
    _check_reached(told, path)
    there = left_by_notebook(told, path)
    if there is None:
        return told
    if there.is_held:
        raise UsageError(
            f"the ranks of {path} are held by {there.holder} on {there.host}, which still runs; use them there, or "
            "shut that kernel down or restart it first"
        )
    return there


def read(path: Path) -> JobFile:
    """Read the file.

    Raises
    ------
    UsageError
        If that can't be; the message says what to do.
    """
    try:
        told = parse(read_own(path), str(path))
    except FileNotFoundError:
        raise UsageError(
            f"there is no {path}: the job has not begun, has ended, or wrote its file elsewhere; it is what rank 0 "
            "names when it starts with --join"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; only the user whose job it is may join it") from error
    # The same folder, wherever its file system is mounted here.
    return replace(told, profile=str(path.with_name(Path(told.profile).name)))


def parse(text: str, path: str) -> JobFile:
    """Return what is in a job's file.

    Raises
    ------
    UsageError
        If it is something else, or of another version.
    """
    try:
        return JobFile.parse(text)
    except ValueError as error:
        version = str(error) if type(error) is ValueError else ""
        if version:
            raise UsageError(
                f"{path} was written by version {version} of jupyter_disttrain, and here is {VERSION}; install "
                "the same one here and there"
            ) from error
        raise UsageError(f"{path} is no file of a job that was started with --join") from error


def full_path(which: str) -> str:
    """Return a job's file as messages name it."""
    return which if split(which) else str(Path(which).expanduser().absolute())


def let_go(there: JobFile | ClusterFile) -> None:
    """Close the tunnel to a cluster that is not joined after all."""
    tunnel = tunnel_of(Path(there.profile))
    if tunnel is not None:
        tunnel.close()


def _check_reached(told: JobFile, path: str) -> None:
    outside = f"%dist_attach {told.host}:{path} goes through ssh"
    if ipaddress.ip_address(told.address).is_loopback and told.host != socket.gethostname():
        raise UsageError(
            f"the job of {path} is reached on {told.host} alone, at {told.address}; {outside}, or start it with "
            "--interface"
        )
    answer = told.answer()
    if answer == "refused":
        raise UsageError(f"the job that wrote {path} has ended; start it again, and remove that file")
    if answer != "there":
        raise UsageError(
            f"{told.host} does not answer at {told.address} ({answer}): the network does not let this machine through; "
            f"{outside}"
        )
    if not Path(told.profile).is_dir():
        raise UsageError(
            f"{path} is there, and the folder {told.profile} beside it is not; copy no file out of a job's file "
            f"system: {outside}"
        )
    try:
        check_beside(Path(told.profile), Path(path))
    except OSError as error:
        raise UsageError(
            f"the folder {told.profile} beside {path} can't be used: {error.strerror}; start the job with its file in "
            "a folder where no other user may write"
        ) from error


def left_by_notebook(told: JobFile, path: str) -> ClusterFile | None:
    """Return what an earlier notebook wrote of the cluster, with the paths of here; None if there was none."""
    profile = Path(told.profile)
    try:
        there = ClusterFile.read(profile)
    except FileNotFoundError:
        return None
    config = there.config | {"job_file": path}
    return replace(there, profile=str(profile), local=str(_own_part(profile)), config=config)


def _own_part(profile: Path) -> Path:
    """Return the folder of what is a client's own: no host's, because the next notebook may be on another."""
    return profile if tunnel_of(profile) else profile / "client"


def config_of(told: JobFile, path: str) -> ClusterConfig:
    """Return the configuration of a cluster that a job is."""
    return ClusterConfig(
        n=told.world_size,
        launcher="mpi" if told.has_mpi else "local",
        backend=told.backend,
        name=told.name,
        keep=True,
        start_timeout_s=MEET_SECONDS,
        job=told.launcher,
        job_file=path,
    )


class JobProcesses:
    """What stands in the place of ``Processes``: those of a job are its own."""

    mpi_heals = False
    lost_job = output = controller_fate = ""
    births: Births = {}  # noqa: RUF012  (never any)
    command: tuple[str, ...] = ()

    def __init__(self, config: ClusterConfig, profile: Path) -> None:
        self._tunnel = tunnel_of(profile)
        # Of a tunnel that another process has, its folder here is what goes with the job.
        self._there = profile if split(config.job_file) else Path(config.job_file)
        self._config = config
        self.launcher = config.job

    def start(self) -> None:
        """Do nothing: they run."""

    def rank_processes(self) -> list[psutil.Process]:
        """Return none: they are the job's."""
        return []

    def check(self) -> None:
        """Do nothing: a job's processes are its launcher's business."""

    def start_one(self, _name: str, _host: str = "") -> NoReturn:
        """Refuse.

        Raises
        ------
        LaunchError
            In any case.
        """
        raise LaunchError(f"nothing can be started within a job of {self._config.job} from outside")

    def end(self, patience_s: float) -> None:
        """Wait until the job's controller has gone with the last rank, and with it the file."""
        if self._tunnel is not None:
            self._tunnel.wait_for_end(patience_s)
            return
        deadline = time.monotonic() + patience_s
        while self._there.exists() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


class JobLaunch(Launch):
    """The ranks of a job that nobody has told yet who they are."""

    def __init__(
        self,
        told: JobFile,
        config: ClusterConfig,
        on_message: Callable[[str, Message], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._told = told
        super().__init__(config, on_message, on_lost)

    def _make_folders(self) -> Folders:
        told = self._told
        profile = Path(told.profile)
        # Not in shared memory, so that large values travel as messages.
        local = _own_part(profile)
        local.mkdir(mode=0o700, exist_ok=True)
        (local / NOTEBOOK).write_text(os.urandom(16).hex())
        return Folders(profile=profile, run=Path(told.run), local=local, cluster_id=told.cluster_id)

    def decide(self) -> None:
        """Take what the job's file says."""
        self.folders = self._make_folders()
        self._taken.callback(self.folders.remove)
        self.started_s = self._told.started_s
        self.placement = Placement(listen=self._told.address, network=self._told.network)
        self.gpus = []
        self.n, self.address = self._told.world_size, self._told.address
        self.is_decided = True

    def start(self) -> None:
        """Tell all ranks who they are; when it returns, they have joined their process group.

        Raises
        ------
        LaunchError
            If not all of them come, or one can't join; the job goes on.
        UsageError
            If another notebook was faster.
        """
        self._processes = self._make_processes()
        try:
            self._hold = Hold(self.folders.profile)
        except BlockingIOError as error:
            raise UsageError(f"the ranks of {self.config.job_file} were just taken by another notebook") from error
        try:
            self._connect(self._wait_for_connection(), self.folders.cluster_id)
            self._introduce(self._hear_from_ranks())
        except BaseException:  # an interrupt too: the job is there for the next who asks
            if self.table:  # the ranks know who they are, and say hello no more
                for entry in self.table:
                    entry.group = "broken"
                self.write()
            self.leave()
            raise
        self._started = True
        self.write()
        self._show()

    def _hear_from_ranks(self) -> list[tuple[RankInfo, RankHello, NannyHello]]:
        hellos, nannies = self._arrivals.hear_from_all(self.n, self._check_time)
        hellos = tell_apart(sorted(hellos, key=lambda hello: hello.launch_rank or 0))
        names = [hello.launch_host for hello in hellos]
        self.placement = Placement(
            hosts=tuple(HostSlots(name=name, slots=names.count(name)) for name in dict.fromkeys(names)),
            listen=self._told.address,
            network=self._told.network,
            addresses={self._told.host: self._told.address},
            words=f"network {self._told.network}",
        )
        self.mpi_heals = self._told.frees_mpi and all(can_end_calls(hello.mpi or "") for hello in hellos)
        backend = self._backend(hellos)
        count = min(hello.cuda_devices for hello in hellos) if backend != "gloo" else 0
        check_nccl(backend, hellos, count)
        self.note_of_devices = note_of_devices(self.config, hellos, {})
        self.gpus = [str(gpu) for gpu in range(count)]
        decided = decide(hellos, backend, count, list(dict.fromkeys(names)))
        return [(info, hello, nannies[hello.engine]) for info, hello in decided]

    def _backend(self, hellos: Sequence[RankHello]) -> str:
        if self.config.backend != "auto":
            return self.config.backend
        count = min(hello.cuda_devices for hello in hellos)
        # A launcher may give each process a GPU of its own, of which it then has one.
        seen = {(hello.launch_host, hello.visible_gpus) for hello in hellos}
        has_own = count and (count >= (self.placement.most or 1) or len(seen) == len(hellos))
        return "nccl" if has_own else "gloo"

    def _check_time(self, heard: int = 0) -> None:
        if time.monotonic() > self._deadline:
            raise LaunchError(
                f"{heard} of {counted(self.n, 'rank')} of {self.config.job_file} came within "
                f"{self.config.start_timeout_s:g} s; the job's own output tells what keeps the others, and "
                "%dist_attach can be tried again"
            )
