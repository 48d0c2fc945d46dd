"""The processes of one cluster, as ipyparallel starts them.

Covers: controller and ranks, a new process for one rank, whether they run, what they said, ending them.
Does not cover: what the ranks are told (``start``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ipyparallel
from traitlets.config import Config

from ..errors import LaunchError
from .controller_launcher import ControllerProcess
from .launchers import LAUNCHERS
from .rank_environment import rank_environment

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..config import ClusterConfig
    from .folders import Folders

POLL_SECONDS = 0.005


class Processes:
    """A controller and the processes of the ranks."""

    def __init__(self, config: ClusterConfig, folders: Folders, n: int, gpus: list[str]) -> None:
        self._environment = rank_environment(config, folders, n, gpus)
        self.launcher = "mpiexec" if config.launcher == "mpi" else "the launcher"
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
            cluster_file=str(folders.profile / "security" / "cluster.json"),
            controller=ControllerProcess,
            engines=LAUNCHERS[config.launcher],
            send_engines_connection_env=False,
            shutdown_atexit=False,
        )
        self._owner = 0 if config.keep else os.getpid()
        self._folders = folders
        self._n = n

    def start(self) -> None:
        """Start them all at the same moment."""
        removable = os.pathsep.join(map(str, self._folders.removable))
        start_controller, start_engines = self._cluster.start_controller_sync, self._cluster.start_engines_sync
        _outside_loop(start_controller, owner_pid=self._owner, remove_dirs=removable, sockets=self._folders.sockets)
        _outside_loop(start_engines, self._n, environment=self._environment)

    def start_one(self, name: str) -> None:
        """Start a process for one rank, outside the MPI job: nobody can join that once it runs."""
        before, self._cluster.engine_launcher_class = self._cluster.engine_launcher_class, LAUNCHERS["local"]
        environment = self._environment | {"DISTTRAIN_LAUNCHER": "local"}
        set_id = f"{name}-{time.monotonic_ns()}"
        try:
            _outside_loop(self._cluster.start_engines_sync, 1, engine_set_id=set_id, environment=environment)
        finally:
            self._cluster.engine_launcher_class = before

    def check(self) -> None:
        """Raise a LaunchError if the controller, or what starts the ranks, has ended."""
        controller = self._cluster.controller
        if controller is not None and not controller.alive():
            raise LaunchError(f"the controller ended while starting{said(controller.get_output())}")
        for engines in self._cluster.engines.values():
            if not engines.alive():
                raise LaunchError(f"{self.launcher} ended before the ranks were up{said(engines.get_output())}")

    @property
    def output(self) -> str:
        """What those that start the ranks have said."""
        return "".join(engines.get_output() for engines in self._cluster.engines.values())

    def end(self, patience_s: float) -> None:
        """End all, after ``patience_s`` for the ranks to end by themselves."""
        deadline = time.monotonic() + patience_s
        try:
            while time.monotonic() < deadline and any(engines.alive() for engines in self._cluster.engines.values()):
                time.sleep(POLL_SECONDS)
        finally:  # who interrupts it only doesn't want to wait
            _outside_loop(self._cluster.stop_cluster_sync)


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
