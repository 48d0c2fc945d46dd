"""Start and end the processes of one cluster through ipyparallel.

Covers: controller and ranks, a new process for one rank, liveness checks, their output, ending them; what replaces this
for the ranks of a job.
Does not cover: what is sent to the ranks (``launch``), joining a job (``features.batch_jobs.client``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipyparallel
import psutil
from traitlets.config import Config

from ...config.hosts import split_command
from ...errors import LaunchError
from ...launchers import LAUNCHERS
from ...launchers.local import RANK_COMMAND, WELL_ENDED
from ...launchers.rank_environment import forwarded, rank_environment, use_report_s
from ...launchers.ssh import EARLY, rank_command
from ...private_files import write_private
from ...process_table import runs, start_time, stat_fields
from ...protocol.environment import LAUNCHER
from ...protocol.time_limits import KILL_SECONDS, PROCESSES_CHECK_SECONDS, PROCESSES_POLL_SECONDS
from ..transport.controller_process import ControllerProcess, free_ports
from ..transport.ssh_tunnel import split, tunnel_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ...config.cluster import ClusterConfig
    from ...launchers.folders import Folders
    from ...launchers.placement import Placement

Births = dict[str, dict[str, str]]


class Processes:
    """The controller and the rank processes of one cluster.

    ``births`` is the value of :attr:`births` that an earlier notebook saved. With ``before``, the processes of ranks
    that these replace, the controller is taken over.
    """

    def __init__(
        self,
        config: ClusterConfig,
        folders: Folders,
        n: int,
        gpus: list[str],
        births: Births | None = None,
        *,
        placement: Placement,
        before: Processes | None = None,
    ) -> None:
        self._config, self._placement = config, placement
        self._births = births or {}
        self._has_controller = before is not None
        self._gpus = gpus
        self._allocated = placement.allocated
        self.launcher = {"mpi": "mpiexec", "ssh": "ssh"}.get(config.launcher, "the launcher")
        in_allocation = self._allocated is not None and not self._allocated.is_own
        if self._allocated is not None:
            self.launcher = f"job {self._allocated.job_id}" if self._allocated.is_own else self._allocated.starts_with
        log = logging.getLogger("jupyter_disttrain.ipyparallel")
        log.propagate = False
        if not log.handlers:
            log.addHandler(logging.NullHandler())
        self._cluster: Any = ipyparallel.Cluster(
            config=Config(),
            log=log,
            load_profile=False,
            profile_dir=str(folders.profile),
            cluster_id=folders.first_id,
            # Empty: ipyparallel would write the file again when the controller ends and recreate its folder.
            cluster_file="",
            controller=ControllerProcess,
            engines=LAUNCHERS["slurm step" if in_allocation else config.launcher],
            send_engines_connection_env=False,
            shutdown_atexit=False,
        )
        if before is not None:
            self._cluster.controller, self._births = before.give_controller()
        self._owner = 0 if config.keep else os.getpid()
        limit_s = config.idle_timeout_s
        # Allows for the delay with which ranks report their use.
        self._idle_timeout_s = limit_s + 2 * use_report_s(limit_s) if limit_s else limit_s
        self._folders = folders
        self._n = n
        self._reaped: dict[int, int] = {}  # ``_reaped_faults`` by launcher process, before any rank process existed
        self._had_processes = False
        self._next_check = 0.0

    def start(self) -> None:
        """Start the controller, unless there is one, and all ranks at the same moment."""
        if not self._has_controller:
            ports = self._config.controller_ports
            _outside_loop(
                self._cluster.start_controller_sync,
                owner_pid=self._owner,
                idle_timeout_s=self._idle_timeout_s,
                remove_dirs=[str(folder) for folder in self._folders.removable],
                sockets=self._folders.sockets,
                listen=self._placement.listen,
                ports=free_ports(self._placement.listen, *ports) if ports and self._placement.listen else [],
            )
        own = rank_environment(self._config, self._folders, self._n, self._gpus, self._placement)
        places = [(host.name, host.slots) for host in self._placement.hosts]
        environment = (forwarded(os.environ, self._config.forward) if places else dict(os.environ)) | own
        # Ranks that are started later, also by a notebook that joins, get this environment and not their notebook's.
        write_private(self._folders.environment_file, json.dumps(environment))
        options = self._options(self._folders.environment_file, environment, places)
        if places:  # where the ranks are, the rest is read from the file
            options["environment"] = {name: environment[name] for name in EARLY if environment.get(name)} | own
        if places and self._config.has_mpi:
            options["network"] = self._placement.network
        _outside_loop(
            self._cluster.start_engines_sync, self._n, engine_set_id=f"ranks-{time.monotonic_ns()}", **options
        )

    def _options(self, file: Path, environment: dict[str, str], places: list[tuple[str, int | None]]) -> dict[str, Any]:
        """Return the launcher's options; ``file`` has the environment of ranks on other hosts."""
        options: dict[str, Any] = {"environment": environment}
        if places:
            options["environment_file"] = str(file)
        if self._allocated is not None:
            return options | {"allocated": self._allocated}
        return options | ({"hosts": places, "ssh": split_command(self._config.ssh)} if places else {})

    def start_one(self, name: str, host: str = "") -> Callable[[], None]:
        """Start a process for one rank outside the MPI job, which can't grow once it runs.

        ``name`` is the prefix of the id of the engine set; ``host`` is empty for this machine. The returned function
        raises a LaunchError if the process has ended.
        """
        before = self._cluster.engine_launcher_class
        self._cluster.engine_launcher_class = LAUNCHERS["slurm step" if self._allocated else "ssh" if host else "local"]
        file = self._folders.environment_file
        environment = json.loads(file.read_text()) | {LAUNCHER: "local"}
        if host:
            file = file.with_suffix(".local.json")
            write_private(file, json.dumps(environment))
        options = self._options(file, environment, [(host, 1)] if host else [])
        options |= {"folder": self._placement.folder} | ({"host": host} if self._allocated else {})
        set_id = f"{name}-{time.monotonic_ns()}"
        try:
            _outside_loop(self._cluster.start_engines_sync, 1, engine_set_id=set_id, **options)
        except FileNotFoundError as error:  # of the folder, which may have been removed since the start
            raise LaunchError(f"no process could be started: {error.strerror}: {error.filename}") from error
        finally:
            self._cluster.engine_launcher_class = before
        engines = self._cluster.engines[set_id]

        def check() -> None:
            if not engines.alive():
                raise LaunchError(
                    f"no process could be started{f' on {host}' if host else ''}{output_end(engines.get_output())}"
                )

        return check

    @property
    def command(self) -> list[str]:
        """The command that starts one rank within the MPI job."""
        return rank_command(str(self._folders.environment_file)) if self._placement.hosts else RANK_COMMAND

    @property
    def mpi_heals(self) -> bool:
        """Whether the ranks are an MPI job that can be repaired after a rank's death."""
        return any(getattr(engines, "heals", False) for engines in self._engines)

    def check(self) -> None:
        """Raise a LaunchError if the controller, or what starts the ranks, has ended."""
        controller = self._cluster.controller
        if controller is not None and not controller.alive():
            raise LaunchError(f"while starting, the controller on {socket.gethostname()} {_end_of(controller)}")
        if controller is None and self._has_controller and not self._inherited("controller"):
            raise LaunchError(f"while starting, the controller on {socket.gethostname()} has ended")
        self._check_troubles()
        for engines in self._engines:
            if not engines.alive():
                if fate := getattr(engines, "fate", ""):
                    raise LaunchError(f"{fate}{output_end(engines.get_output())}")
                raise LaunchError(f"before all ranks had started, {self.launcher} {_end_of(engines)}")
        self._check_rank_processes()

    def _check_troubles(self) -> None:
        """Raise a LaunchError with what processes have written to the profile's folder before they ended."""
        troubles = sorted({path.read_text() for path in self._folders.profile.glob("trouble-*.txt")})
        if troubles:
            raise LaunchError("; ".join(troubles))

    def _check_rank_processes(self) -> None:
        """Raise a LaunchError if a rank's process ended before it could report: mpiexec would wait for the other ranks.

        A launcher may take any time to start its processes, so a missing one may be late or have ended. What shows that
        one has ended is that the process which starts them has reaped a child since there were none. Processes on other
        hosts are not visible from here.
        """
        now = time.monotonic()
        is_here = self._config.launcher == "mpi" and not self._placement.hosts
        if now < self._next_check or not is_here:
            return
        self._next_check = now + PROCESSES_CHECK_SECONDS
        there = self.rank_processes()
        reaped = {pid: _reaped_faults(pid) for pid in set(map(_parent_of, there)) or self._launching()}
        if not there and not self._had_processes:
            self._reaped = reaped
        elif len(there) < self._n and any(faults > self._reaped.get(pid, 0) for pid, faults in reaped.items()):
            self._check_troubles()  # it may have written the cause since they were last read
            output = self.output
            text = f":\n{tail(output)}" if output.strip() else ""
            raise LaunchError(
                f"a rank's process on {socket.gethostname()} ended while starting, before it could report, "
                f"probably by SIGKILL, e.g. of the kernel's out-of-memory killer, or another signal{text}"
            )
        self._had_processes = self._had_processes or bool(there)

    def rank_processes(self) -> list[psutil.Process]:
        """Return the processes that mpiexec has started on this machine, each for one rank."""
        started = [each for process in self._starters() for each in _below(process)]
        found = {each.pid: each for each in started if _is_rank(each)}
        return [each for each in found.values() if _parent_of(each) not in found]

    def _starters(self) -> Iterator[psutil.Process]:
        """Yield the launcher processes whose descendants on this machine are for ranks."""
        for engines in self._engines:
            if isinstance(engines, LAUNCHERS["mpi"]):
                yield engines.process

    def _launching(self) -> set[int]:
        """Return the processes that may start ranks: launchers and their descendants."""
        return {each.pid for process in self._starters() for each in (process, *_below(process))}

    @property
    def controller_fate(self) -> str:
        """How the controller ended, as text; empty while it runs, or if an earlier notebook started it."""
        controller = self._cluster.controller
        return "" if controller is None else str(controller.fate)

    def mpiexec_end(self, *, is_dying: bool = False) -> str:
        """How mpiexec ended, as text; empty while it runs, where there is none, and where it ended with its ranks.

        ``is_dying``: wait for its end for a moment, as deaths of ranks on other hosts may be seen before it.
        """
        has_hosts = bool(self._placement.hosts)
        effect = "the ranks on other hosts ended with it" if has_hosts else "MPI can't start processes without it"
        for engines in self._engines:
            if isinstance(engines, LAUNCHERS["mpi"]) and engines.process is not None:
                text = engines.exit_text if is_dying or not engines.alive() else ""
                text = text or ("" if engines.alive() else "has ended")
                if text and text != WELL_ENDED:
                    return f"mpiexec (process {engines.process.pid}) {text}; {effect}"
        if "launcher" in self._births and self._config.launcher == "mpi" and not self._inherited("launcher"):
            return f"mpiexec has ended; {effect}"
        return ""

    @property
    def mpiexec_was_killed(self) -> bool:
        """Whether mpiexec was ended by a signal; where a host is lost, it exits by itself."""
        return "was killed by" in self.mpiexec_end()

    @property
    def births(self) -> Births:
        """Start time of each process: by role, then by pid. A later notebook ends the processes that still run."""
        started = {
            "controller": [self._cluster.controller] if self._cluster.controller else [],
            "launcher": [each for one in self._engines for each in getattr(one, "launchers", {"": one}).values()],
        }
        found: Births = {}
        for role, launchers in started.items():
            processes = [each.process for each in launchers if each.process] + self._inherited(role)
            times = [(each, start_time(each.pid)) for each in processes]
            # ``is_running`` compares start times as well: another process may have the pid of one that has ended.
            found[role] = {str(each.pid): at for each, at in times if at and runs(each.pid, at) and each.is_running()}
        return found

    def _inherited(self, role: str) -> list[psutil.Process]:
        """Return the processes of an earlier notebook that still run."""
        found = []
        for pid, started in self._births.get(role, {}).items():
            with contextlib.suppress(psutil.NoSuchProcess):
                if runs(int(pid), started):
                    found.append(psutil.Process(int(pid)))
        return found

    @property
    def _engines(self) -> list[Any]:
        """The launchers; a copy, as another thread may start an engine set meanwhile."""
        return list(self._cluster.engines.values())

    @property
    def output(self) -> str:
        """The output of all launchers."""
        return "".join(engines.get_output() for engines in self._engines)

    def give_controller(self) -> tuple[Any, Births]:
        """Leave the controller to other processes; return it, and the births of an earlier notebook's."""
        controller, self._cluster.controller = self._cluster.controller, None
        return controller, {"controller": inherited} if (inherited := self._births.pop("controller", {})) else {}

    @property
    def has_controller(self) -> bool:
        """Whether the controller runs."""
        controller = self._cluster.controller
        return bool(self._inherited("controller")) if controller is None else bool(controller.alive())

    def end(self, patience_s: float) -> None:
        """End all processes, after waiting ``patience_s`` seconds for the ranks to end by themselves."""
        deadline = time.monotonic() + patience_s
        try:
            while time.monotonic() < deadline and any(engines.runs for engines in self._engines):
                time.sleep(PROCESSES_POLL_SECONDS)
            psutil.wait_procs(self._inherited("launcher"), max(0.0, deadline - time.monotonic()))
        finally:  # an interrupt only skips the wait
            # Local children of mpiexec may outlive it, as an ssh to a host that is lost does.
            ssh = [each for one in self._engines for each in _below(one.process)] if self._placement.hosts else []
            _outside_loop(self._cluster.stop_cluster_sync)
            _end([*ssh, *self._inherited("launcher"), *self._inherited("controller")])


class JobProcesses:
    """The interface of :class:`Processes` for a job, whose processes the job's launcher started and watches."""

    mpiexec_was_killed = False
    output = controller_fate = ""
    births: Births = {}  # noqa: RUF012  (always empty)

    def __init__(self, config: ClusterConfig, profile: Path) -> None:
        self._tunnel = tunnel_of(profile)
        # The path that is removed with the job; if another process has the tunnel, that is its folder on this host.
        self._there = profile if split(config.job_file) else Path(config.job_file)
        self.launcher = config.job

    def mpiexec_end(self, *, is_dying: bool = False) -> str:  # noqa: ARG002
        """Return an empty text: an mpiexec belongs to the job."""
        return ""

    def check(self) -> None:
        """Do nothing."""

    def end(self, patience_s: float) -> None:
        """Wait up to ``patience_s`` seconds for the job's controller to end, with which its file is removed."""
        if self._tunnel is not None:
            self._tunnel.wait_for_end(patience_s)
            return
        deadline = time.monotonic() + patience_s
        while self._there.exists() and time.monotonic() < deadline:
            time.sleep(PROCESSES_POLL_SECONDS)


def _is_rank(process: psutil.Process) -> bool:
    try:
        return bool(process.cmdline()[: len(RANK_COMMAND)] == RANK_COMMAND)  # an ended process has no command line
    except psutil.NoSuchProcess:
        return False


def _below(process: psutil.Process | None) -> list[psutil.Process]:
    try:
        return [] if process is None else list(process.children(recursive=True))
    except psutil.NoSuchProcess:  # it has ended
        return []


def _reaped_faults(pid: int) -> int:
    """Return the page faults of the children that a process has reaped: Linux does not count reaped children."""
    fields = stat_fields(pid)
    return int(fields[8]) if fields else 0


def _parent_of(process: psutil.Process) -> int:
    fields = stat_fields(process.pid)
    return int(fields[1]) if fields else 0


def _end_of(launcher: Any) -> str:
    """Describe how a process ended unexpectedly, with its last output."""
    text, output = getattr(launcher, "exit_text", "") or "ended", launcher.get_output()
    return text if text.startswith("was killed") and not output.strip() else f"{text}{output_end(output)}"


def _end(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        if process.is_running():
            process.terminate()
    _, left = psutil.wait_procs(processes, KILL_SECONDS)
    for process in left:
        process.kill()
    psutil.wait_procs(left, KILL_SECONDS)


def _outside_loop(call: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Call ipyparallel where no event loop runs: beside a kernel's loop each call would leave a thread behind."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        call(*args, **options)  # during interpreter shutdown no thread can be started, so call directly
        return
    with ThreadPoolExecutor(1, thread_name_prefix="disttrain launch") as executor:
        executor.submit(call, *args, **options).result()


def output_end(text: str) -> str:
    """Return the end of a message: the last output of a process, or what to run if there was none."""
    return f":\n{tail(text)}" if text.strip() else " (it printed nothing); jupyter disttrain doctor may show why"


def tail(text: str, lines: int = 15) -> str:
    """Return the last lines."""
    return "\n".join(text.strip().splitlines()[-lines:])
