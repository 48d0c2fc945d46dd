"""Make the processes of any job the ranks of a cluster that a notebook joins: ``--join FILE``.

Covers: what the first process does for all of them, what the others wait for, the environment of each.
Does not cover: reading the launcher's variables (``launcher_env``), the notebook's side
(``features.batch_jobs.client``).

The first process starts the controller and stays alive to guard it, apart from the nanny, because the other ranks
must not lose their controller with rank 0. It writes FILE, through which the others and the notebook find the
controller. Only the job's user can read FILE and the folder beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config.frameworks import PCI_ORDER
from ...errors import LaunchError, UsageError
from ...file_lock import check_locks
from ...private_files import read_own
from ...process_table import wait_for_end
from ...protocol.connection_file import JobFile, JobTrace, check_beside, package_version, remove_own
from ...protocol.controller_args import RANK_ENDED, choose_ports, controller_arguments
from ...protocol.environment import (
    CLIENT,
    CONNECTION_FILE,
    HOST,
    KEEP,
    LAUNCH_RANK,
    LAUNCHER,
    LOCAL_DIR,
    MPI_HEALS,
    PROFILE_DIR,
    SAMPLE_SECONDS,
    WITHOUT_TORCH,
)
from ...protocol.ranks import counted
from ...protocol.shared_memory import PREFIX, ROOT
from ...protocol.time_limits import CONTROLLER_SECONDS, FIGURES_SECONDS, JOIN_POLL_SECONDS, OTHERS_SECONDS
from ...rank.startup.connection import CHANNELS, Connection
from ...rank.startup.host_dir import make_private
from ...rank.startup.startup_args import INTERFACE_VARIABLES
from .launcher_env import Launched, interface_towards, launcher_process, network_of, own_address

if TYPE_CHECKING:
    from ...rank.cold_nannies import OwnNannies
    from ...rank.startup.startup_args import Setup
    from ...rank.warm.start import Forks

PORTS = 8  # number of the controller's ports for ranks, and of those for clients
MPI_ENDS = "OMPI_MCA_mpi_ft_enable"  # set by mpirun --with-ft ulfm
_MPI_WAYS = ("OMPI_MCA_pml", "OMPI_MCA_mtl", "OMPI_MCA_btl")
INFINIBAND = Path("/sys/class/infiniband")
CONTROLLER_LOG = "controller.log"  # not in FILE's folder, which NFS could not remove before the controller exits
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


class ControllerGuard:
    """Wait for a job's rank 0 and its controller, and remove their files; end the job if its launcher is killed."""

    def __init__(self, controller: subprocess.Popen[bytes], job_file: JobFile, path: Path) -> None:
        self._controller, self._job_file, self._path = controller, job_file, path
        self._launcher = launcher_process(job_file.launcher)

    def _follow_launcher(self, launcher: int) -> None:
        wait_for_end(launcher)
        self._controller.terminate()  # the nannies of all hosts see its end, and end their ranks

    def stay(self, nannies: OwnNannies | Forks) -> None:
        """Wait for this host's rank 0 and then for the controller, which exits once no rank is left."""

        def pass_on(number: int, _frame: Any) -> None:
            nannies.signal(number)
            if not nannies.pids:
                self._controller.terminate()

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, pass_on)
        if self._launcher is not None:
            threading.Thread(target=self._follow_launcher, args=(self._launcher,), daemon=True).start()
        nannies.wait()
        self._controller.send_signal(RANK_ENDED)  # else it would wait for a rank that ended before it registered
        self._controller.wait()
        # The controller does this itself, unless it was killed, e.g. by the OOM killer.
        remove_own(self._path, self._job_file.cluster_id)
        _remove(Path(self._job_file.run), Path(self._job_file.profile))


def join(setup: Setup) -> ControllerGuard | None:
    """Start the job's cluster in its first process, find it in the others; set this process's environment for it.

    Returns the guard in the first process. If this fails, the message of SystemExit gives the host, the reason and the
    remedy.
    """
    path = Path(setup.join).absolute()
    guard = None
    try:
        launched = Launched.read()
        if launched.rank == 0:
            guard, job_file = _begin(launched, path, setup)
        else:
            job_file = _wait_for(launched, path, setup.join_timeout_s)
    except (LaunchError, UsageError) as error:
        raise SystemExit(str(error)) from error
    os.environ.update(_environment(launched, job_file))
    return guard


# The first process


def _begin(launched: Launched, path: Path, wanted: Setup) -> tuple[ControllerGuard, JobFile]:
    """Start the controller and write the file."""
    _check_free(path)
    address = own_address(wanted.interface)
    name = wanted.name or _NO_NAME.sub("-", path.stem).strip("-._")[:40] or "job"
    cluster_id = f"{name}-{os.getpid()}-{os.urandom(3).hex()}"
    profile = path.with_name(f".{path.name}-{cluster_id}")
    run = path.with_name(f"{path.stem}-logs-{time.strftime('%Y%m%d-%H%M%S')}")  # where all hosts can write
    local = _local(cluster_id)
    _make_folders(path, profile, run, local)
    with ExitStack() as undo:
        undo.callback(_remove, run, profile, local)
        controller = _start_controller(address, profile, cluster_id, local, path)
        undo.callback(controller.wait)
        undo.callback(controller.kill)
        connection = _wait_for_controller(controller, profile, cluster_id)
        job_file = JobFile(
            version=package_version(),
            cluster_id=cluster_id,
            job=launched.job,
            launcher=launched.launcher,
            name=name,
            host=socket.gethostname(),
            address=address,
            network=network_of(address),
            world_size=launched.world_size,
            backend=wanted.backend,
            frees_mpi=launched.launcher == "mpirun" and _frees_mpi(),
            profile=str(profile),
            run=str(run),
            started_s=time.time(),
            connection=connection,
        )
        _check_free(path)  # another job may have written it meanwhile
        try:
            job_file.write(path)
        except OSError as error:
            raise LaunchError(
                f"{socket.gethostname()} can't write {path}: {error.strerror}; name another file"
            ) from error
        undo.pop_all()
    waiting = "1 rank waits" if job_file.world_size == 1 else f"{job_file.world_size} ranks wait"
    print(f"{waiting}; in a notebook: %dist_attach {path}", file=sys.stderr, flush=True)  # noqa: T201
    return ControllerGuard(controller, job_file, path), job_file


def _make_folders(path: Path, profile: Path, run: Path, local: Path) -> None:
    try:
        profile.parent.mkdir(parents=True, exist_ok=True)
        for folder in (profile, *(profile / each for each in ("security", "log", "pid", "startup"))):
            folder.mkdir(mode=0o700)  # without exist_ok: another user may have made an existing one
        with contextlib.suppress(FileExistsError):  # of another job that was started in the same second
            run.mkdir(mode=0o700)
        check_beside(run, profile)
        check_locks(profile)
        make_private(local)
    except OSError as error:
        raise LaunchError(
            f"{socket.gethostname()} can't create {error.filename}: {error.strerror}; put {path.name} into a folder "
            "that this user may write to, on a file system that all hosts of the job share"
        ) from error


def _remove(run: Path, *folders: Path) -> None:
    """Remove the folders of a job, and that of its logs if it is empty."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        run.rmdir()


def _frees_mpi() -> bool:
    """Whether to enable MPI's fault tolerance, with which calls can be ended.

    The job's own setting decides. Without one, enable it if the job selects no transport and the host has no
    InfiniBand: with Open MPI's transport over InfiniBand calls can't be ended, and the job's choice is kept.
    """
    chosen = os.environ.get(MPI_ENDS)
    if chosen is not None:
        return chosen.lower() in ("1", "true", "yes")
    return not any(name in os.environ for name in _MPI_WAYS) and not INFINIBAND.exists()


def _check_free(path: Path) -> None:
    """Refuse a file that no job has written, or that of a job that still runs."""
    deadline = time.monotonic() + OTHERS_SECONDS
    while (text := _text(path)).strip():
        try:
            there = JobTrace.parse(text)
        except ValueError as error:
            raise UsageError(
                f"{path} on {socket.gethostname()} was not written by a job, and would be overwritten; name another "
                "file with --join, or remove that one"
            ) from error
        if there.answer() == "refused":
            return
        if time.monotonic() > deadline:
            raise UsageError(
                f"{path} belongs to another job, which runs on {there.host} ({counted(there.world_size, 'rank')}, by "
                f"{there.launcher}); use another file for this one, or end that one: %dist_attach {path}, then "
                "%dist_shutdown; if its host is permanently lost, remove the file"
            )
        time.sleep(JOIN_POLL_SECONDS)


def _start_controller(address: str, profile: Path, cluster_id: str, local: Path, file: Path) -> subprocess.Popen[bytes]:
    try:
        ports = choose_ports(address, 2 * PORTS)
    except OSError as error:
        raise LaunchError(
            f"{socket.gethostname()} has no free ports for a controller at {address}: {error.strerror or error}; "
            "choose another network with --interface"
        ) from error
    command = controller_arguments(
        sockets=str(local / "s"),
        listen=address,
        engine_ports=",".join(map(str, ports[:PORTS])),
        client_ports=",".join(map(str, ports[PORTS:])),
        owner_pid=os.getpid(),
        follow_ranks=True,
        remove_file=str(file),
        remove_dirs=[profile, local],
    )
    command += [f"--profile-dir={profile}", f"--cluster-id={cluster_id}"]
    with (local / CONTROLLER_LOG).open("wb") as log:
        # In its own session: a signal that ends the job's processes must leave it time to notify the other ranks.
        return subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {"PYTHONSAFEPATH": "1"},
        )


def _wait_for_controller(controller: subprocess.Popen[bytes], profile: Path, cluster_id: str) -> dict[str, Any]:
    """Wait until the controller listens on all ports in its files; return the clients' file."""
    files = [profile / "security" / f"ipcontroller-{cluster_id}-{who}.json" for who in ("engine", "client")]
    deadline = time.monotonic() + CONTROLLER_SECONDS
    while True:
        with contextlib.suppress(OSError, json.JSONDecodeError):
            found = [Connection(file, json.loads(file.read_text())) for file in files]
            for connection in found:
                for channel in connection.info.keys() & CHANNELS:
                    socket.create_connection(connection.place(channel), timeout=1).close()
            return found[1].info
        if controller.poll() is not None or time.monotonic() > deadline:
            log = (_local(cluster_id) / CONTROLLER_LOG).read_text(errors="replace").strip()[-2000:]
            raise LaunchError(f"the controller on {socket.gethostname()} did not start: {log or 'it printed nothing'}")
        time.sleep(JOIN_POLL_SECONDS)


# The others


def _wait_for(launched: Launched, path: Path, timeout_s: float) -> JobFile:
    """Wait until the first process of this job has written the file."""
    deadline = time.monotonic() + timeout_s
    there: JobFile | None = None
    while True:
        with contextlib.suppress(ValueError):  # another version has written it, or it is being written
            there = JobFile.parse(_text(path))
            if there.job == launched.job and there.answer() != "refused":
                break
        if time.monotonic() > deadline:
            who = f"rank {launched.rank} on {socket.gethostname()}"
            if there is not None:
                raise LaunchError(
                    f"{who} found {path} of another job, on {there.host}; rank 0 of its own job did not write the "
                    "file: see the output of that rank"
                )
            raise LaunchError(
                f"{who} did not find {path} within {timeout_s:g} s; rank 0 writes it: name a path on a file system "
                "that all hosts of the job share, or increase --join-timeout"
            )
        time.sleep(JOIN_POLL_SECONDS)
    try:
        check_beside(Path(there.profile), path)  # its files determine where to connect
    except OSError as error:
        raise LaunchError(
            f"{there.profile}, which belongs to {path}, can't be used: {error.strerror}; end the job, and start it "
            "with FILE in a folder where no other user may write"
        ) from error
    return there


def _text(path: Path) -> str:
    try:
        return read_own(path)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise LaunchError(f"{socket.gethostname()} can't read {path}: {error.strerror}; name another file") from error


# All


def _local(cluster_id: str) -> Path:
    return ROOT / f"{PREFIX}{cluster_id}"


def _environment(launched: Launched, job_file: JobFile) -> dict[str, str]:
    """Return the variables that a client would have set for this process; for defaults, the job's own values stay."""
    local = str(_local(job_file.cluster_id))
    environment = {
        CONNECTION_FILE: str(Path(job_file.profile) / "security" / f"ipcontroller-{job_file.cluster_id}-engine.json"),
        CLIENT: job_file.cluster_id,
        PROFILE_DIR: job_file.profile,
        LOCAL_DIR: local,
        LAUNCHER: "mpi" if job_file.has_mpi else "local",
        LAUNCH_RANK: str(launched.rank),
        HOST: socket.gethostname(),
        KEEP: "1",
        SAMPLE_SECONDS: str(FIGURES_SECONDS),
    }
    if job_file.backend == "none":
        environment[WITHOUT_TORCH] = "1"
    interface = interface_towards(job_file.address)
    defaults = {name: sign + interface for name, sign in INTERFACE_VARIABLES.items() if interface}
    defaults["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // launched.on_this_host))
    if job_file.has_mpi:
        defaults["OMPI_MCA_btl_sm_backing_directory"] = local  # removed with the cluster, even if ranks are killed
        defaults["OMPI_MCA_opal_signal"] = ""  # leaves crashes to Python, whose report names the cell's line
    if job_file.frees_mpi:
        defaults[MPI_ENDS] = defaults[MPI_HEALS] = "1"
    defaults |= PCI_ORDER
    return environment | {name: value for name, value in defaults.items() if name not in os.environ}
