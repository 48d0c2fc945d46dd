"""The processes of one cluster, as ipyparallel starts them.

Covers: controller and ranks, a new process for one rank, whether they run, what they said, ending them.
Does not cover: what the ranks are told (``start``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ipyparallel
import psutil
from traitlets.config import Config

from ..errors import LaunchError
from ..hosts import split_command
from .controller_launcher import ControllerProcess, free_ports
from .launchers import LAUNCHERS
from .launchers.local import RANK_COMMAND
from .launchers.ssh import EARLY, rank_command
from .rank_environment import forwarded, rank_environment, untold_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ..config import ClusterConfig
    from .folders import Folders
    from .placement import Placement

Births = dict[str, dict[str, float]]

POLL_SECONDS = 0.005
FORK_SECONDS = 3.0  # for a launcher to start one more of them
LOOK_SECONDS = 0.2  # between two looks at the processes of ranks that start
BIRTH_SECONDS = 2.0  # by which the clock may have been set meanwhile
KILL_SECONDS = 5.0  # between SIGTERM and SIGKILL


class Processes:
    """A controller and the processes of the ranks.

    Parameters
    ----------
    births
        What :attr:`births` said to an earlier notebook.
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
    ) -> None:
        self._config, self._placement = config, placement
        self._inherited = {role: list(_still_there(found)) for role, found in (births or {}).items()}
        self._environment = rank_environment(config, folders, n, gpus, placement)
        self._grant = placement.grant
        self.launcher = {"mpi": "mpiexec", "ssh": "ssh"}.get(config.launcher, "the launcher")
        if self._grant is not None:
            self.launcher = f"job {self._grant.job_id}" if self._grant.is_own else self._grant.starts_with
        log = logging.getLogger("jupyter_disttrain.ipyparallel")
        log.propagate = False
        if not log.handlers:
            log.addHandler(logging.NullHandler())
        self._cluster: Any = ipyparallel.Cluster(
            config=Config(),
            log=log,
            load_profile=False,
            profile_dir=str(folders.profile),
            cluster_id=folders.cluster_id,
            cluster_file="",  # none: it would be written once more when the controller ends, and its folder made for it
            controller=ControllerProcess,
            engines=LAUNCHERS["slurm allocation" if self._grant and not self._grant.is_own else config.launcher],
            send_engines_connection_env=False,
            shutdown_atexit=False,
        )
        self._owner = 0 if config.keep else os.getpid()
        limit_s = config.idle_timeout_s
        self._idle_timeout_s = limit_s + 2 * untold_s(limit_s) if limit_s else limit_s  # of what the controller hears
        self._folders = folders
        self._n = n
        self._seen: list[psutil.Process] = []  # the ranks' processes, while they start
        self._changed_at = 0.0  # their number
        self._next_look = 0.0

    def start(self) -> None:
        """Start them all at the same moment."""
        ports = self._config.controller_ports
        start_controller, start_engines = self._cluster.start_controller_sync, self._cluster.start_engines_sync
        _outside_loop(
            start_controller,
            owner_pid=self._owner,
            idle_timeout_s=self._idle_timeout_s,
            remove_dirs=[str(folder) for folder in self._folders.removable],
            sockets=self._folders.sockets,
            listen=self._placement.listen,
            ports=free_ports(self._placement.listen, *ports) if ports and self._placement.listen else [],
        )
        places = [(host.name, host.slots) for host in self._placement.hosts]
        _outside_loop(start_engines, self._n, **self._options(places))

    def _options(self, places: list[tuple[str, int | None]], **changed: str) -> dict[str, Any]:
        """Return what launchers want to know; for ranks on other hosts the environment is written into a file."""
        if not places:
            return {"environment": self._environment | changed}
        file = self._folders.environment_file
        if changed:  # what comes later has what came first, also from a notebook that has joined since
            environment = json.loads(file.read_text()) | changed
            file = file.with_suffix(".local.json")
        else:
            environment = forwarded(os.environ, self._config.forward) | self._environment
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as opened:
            json.dump(environment, opened)
        # What -x has changed of that which must be there before the file is read.
        early = {name: environment[name] for name in EARLY if environment.get(name) not in (None, os.environ.get(name))}
        options: dict[str, Any] = {"environment_file": str(file), "environment": early | self._environment | changed}
        if self._config.has_mpi and not changed:
            options["network"] = self._placement.network
        if self._grant is not None:
            return options | {"grant": self._grant}
        return options | {"hosts": places, "ssh": split_command(self._config.ssh)}

    def start_one(self, name: str, host: str = "") -> Callable[[], None]:
        """Start a process for one rank, outside the MPI job: nobody can join that once it runs.

        Parameters
        ----------
        name
            Of the set of processes.
        host
            On which it is started; empty for this machine.

        Returns
        -------
        callable
            Raises a LaunchError once it is known that the process can't come.
        """
        before = self._cluster.engine_launcher_class
        self._cluster.engine_launcher_class = LAUNCHERS["slurm step" if self._grant else "ssh" if host else "local"]
        changed = {"DISTTRAIN_LAUNCHER": "local"}
        options = self._options([(host, 1)] if host else [], **changed)
        options |= {"host": host} if self._grant else {}
        set_id = f"{name}-{time.monotonic_ns()}"
        try:
            _outside_loop(self._cluster.start_engines_sync, 1, engine_set_id=set_id, **options)
        finally:
            self._cluster.engine_launcher_class = before
        engines = self._cluster.engines[set_id]

        def check() -> None:
            if not engines.alive():
                raise LaunchError(
                    f"no process could be started{f' on {host}' if host else ''}{said(engines.get_output())}"
                )

        return check

    @property
    def command(self) -> list[str]:
        """What starts one rank within the MPI job."""
        return rank_command(str(self._folders.environment_file)) if self._placement.hosts else RANK_COMMAND

    @property
    def mpi_heals(self) -> bool:
        """Whether the ranks are an MPI job that can be made whole after a death."""
        return any(getattr(engines, "heals", False) for engines in self._cluster.engines.values())

    def check(self) -> None:
        """Raise a LaunchError if the controller, or what starts the ranks, has ended."""
        controller = self._cluster.controller
        if controller is not None and not controller.alive():
            raise LaunchError(f"while starting, the controller on {socket.gethostname()} {_end_of(controller)}")
        trouble = sorted({path.read_text() for path in self._folders.profile.glob("trouble-*.txt")})
        if trouble:
            raise LaunchError("; ".join(trouble))
        for engines in self._cluster.engines.values():
            if not engines.alive():
                if fate := getattr(engines, "fate", ""):
                    raise LaunchError(f"{fate}{said(engines.get_output())}")
                raise LaunchError(f"before the ranks were up, {self.launcher} {_end_of(engines)}")
        self._check_rank_processes()

    def _check_rank_processes(self) -> None:
        """Raise a LaunchError if a process of a rank has gone that could not report it: mpiexec waits for the others.

        Those of other hosts can't be seen from here.
        """
        now = time.monotonic()
        is_here = self._config.launcher in ("mpi", "local") and not self._placement.hosts
        if now < self._next_look or not is_here:
            return
        self._next_look = now + LOOK_SECONDS
        there = self.rank_processes()
        gone = [f" (process {each.pid})" for each in self._seen if each not in there]
        if len(there) != len(self._seen):
            self._changed_at = now
        if there and len(there) < self._n and now - self._changed_at > FORK_SECONDS:
            gone = gone or [""]
        self._seen = there
        if gone:
            output = self.output
            words = f":\n{tail(output)}" if output.strip() else ""
            raise LaunchError(
                f"a rank's process on {socket.gethostname()}{gone[0]} ended while starting, before it could report: by "
                f"SIGKILL, say of the kernel's out-of-memory killer, or another signal{words}"
            )

    def rank_processes(self) -> list[psutil.Process]:
        """Return the processes that a launcher has started on this machine: each is one rank's nanny."""
        found: dict[int, psutil.Process] = {}
        for engines in self._cluster.engines.values():
            started = [each.process for each in getattr(engines, "launchers", {"": engines}).values()]
            of_this_machine = isinstance(engines, LAUNCHERS["mpi"]) or (
                isinstance(engines, LAUNCHERS["local"]) and engines.n > 1  # one alone is no child
            )
            for process in started if of_this_machine else ():
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                    found |= {each.pid: each for each in process.children(recursive=True) if _is_rank(each)}
        return [each for each in found.values() if _parent_of(each) not in found]

    @property
    def controller_fate(self) -> str:
        """How the controller ended, in words; empty while it runs, or where an earlier notebook has started it."""
        controller = self._cluster.controller
        return "" if controller is None else str(controller.fate)

    @property
    def lost_job(self) -> str:
        """How the MPI job over hosts has ended, in words; empty while its mpiexec runs, and without one."""
        if not self._placement.hosts or self._config.launcher != "mpi":
            return ""
        for engines in self._cluster.engines.values():
            process = getattr(engines, "process", None)
            if isinstance(engines, LAUNCHERS["mpi"]) and process is not None and not process.is_running():
                code = process.wait(0)
                how = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
                return f"mpiexec (process {process.pid}) {how}, and with it ended all ranks of its job"
        return ""

    @property
    def births(self) -> Births:
        """When each process began, in seconds since the epoch: by its role, then by its pid."""
        engines = self._cluster.engines.values()
        started = {
            "controller": [self._cluster.controller] if self._cluster.controller else [],
            "launcher": [each for one in engines for each in getattr(one, "launchers", {"": one}).values()],
        }
        found: Births = {}
        for role, launchers in started.items():
            processes = [each.process for each in launchers if each.process] + self._inherited.get(role, [])
            found[role] = {str(each.pid): each.create_time() for each in processes if each.is_running()}
        return found

    @property
    def output(self) -> str:
        """What those that start the ranks have said."""
        return "".join(engines.get_output() for engines in self._cluster.engines.values())

    def end(self, patience_s: float) -> None:
        """End all, after ``patience_s`` for the ranks to end by themselves."""
        deadline = time.monotonic() + patience_s
        try:
            while time.monotonic() < deadline and any(engines.runs for engines in self._cluster.engines.values()):
                time.sleep(POLL_SECONDS)
            psutil.wait_procs(self._inherited.get("launcher", []), max(0.0, deadline - time.monotonic()))
        finally:  # who interrupts it only doesn't want to wait
            left = list(self._started_by_launchers())
            _outside_loop(self._cluster.stop_cluster_sync)
            _end([*left, *(each for processes in self._inherited.values() for each in processes)])

    def _started_by_launchers(self) -> Iterator[psutil.Process]:
        """Yield what mpiexec has started here, which waits on when that is killed: an ssh to a host that is lost."""
        if not self._placement.hosts:
            return
        for engines in self._cluster.engines.values():
            process = getattr(engines, "process", None)
            if process is not None:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                    yield from process.children(recursive=True)


def _is_rank(process: psutil.Process) -> bool:
    try:
        return bool(process.cmdline()[: len(RANK_COMMAND)] == RANK_COMMAND)  # one that has ended has no command
    except psutil.NoSuchProcess:
        return False


def _parent_of(process: psutil.Process) -> int:
    try:
        return int(process.ppid())
    except psutil.NoSuchProcess:
        return 0


def _end_of(launcher: Any) -> str:
    """Say how a process ended that should not have, and what it said last."""
    words, output = getattr(launcher, "exit_words", "") or "ended", launcher.get_output()
    return words if words.startswith("was killed") and not output.strip() else f"{words}{said(output)}"


def _still_there(births: Mapping[str, float]) -> Iterator[psutil.Process]:
    """Find processes again; one that only has the number of one that ended is another's."""
    for pid, birth in births.items():
        try:
            process = psutil.Process(int(pid))
            if abs(process.create_time() - birth) < BIRTH_SECONDS:
                yield process
        except psutil.NoSuchProcess:
            continue


def _end(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        if process.is_running():
            process.terminate()
    _, left = psutil.wait_procs(processes, KILL_SECONDS)
    for process in left:
        process.kill()
    psutil.wait_procs(left, KILL_SECONDS)


def _outside_loop(call: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Call ipyparallel where no event loop runs: beside a kernel's loop it would leave a thread behind each time."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        call(*args, **options)  # at the interpreter's end this is the only way: no thread can be started then
        return
    with ThreadPoolExecutor(1, thread_name_prefix="disttrain launch") as executor:
        executor.submit(call, *args, **options).result()


def said(text: str) -> str:
    """Return the end of a message: what a process said last, or where to look if it said nothing."""
    return f":\n{tail(text)}" if text.strip() else " (it said nothing); jupyter disttrain doctor may tell why"


def tail(text: str, lines: int = 15) -> str:
    """Return the last lines."""
    return "\n".join(text.strip().splitlines()[-lines:])
