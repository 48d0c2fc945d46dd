"""Replace ``Processes`` where a job's launcher has started the ranks.

Covers: operations that are not possible there, waiting for the end of the job.
Does not cover: joining the job (``features.batch_jobs.client``).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ...errors import LaunchError
from ...protocol.time_limits import PROCESSES_POLL_SECONDS
from ..transport.ssh_tunnel import split, tunnel_of

if TYPE_CHECKING:
    import psutil

    from ...config.cluster import ClusterConfig
    from .processes import Births


class JobProcesses:
    """The interface of ``Processes`` for a job, whose processes the job's launcher owns."""

    mpi_heals = mpiexec_was_killed = False
    output = controller_fate = ""
    births: Births = {}  # noqa: RUF012  (always empty)
    command: tuple[str, ...] = ()

    def __init__(self, config: ClusterConfig, profile: Path) -> None:
        self._tunnel = tunnel_of(profile)
        # The path that is removed with the job; if another process has the tunnel, that is its folder on this host.
        self._there = profile if split(config.job_file) else Path(config.job_file)
        self._config = config
        self.launcher = config.job

    def start(self) -> None:
        """Do nothing: the processes run already."""

    def mpiexec_end(self, *, is_dying: bool = False) -> str:  # noqa: ARG002
        """Return an empty text: an mpiexec belongs to the job."""
        return ""

    def rank_processes(self) -> list[psutil.Process]:
        """Return an empty list: the processes belong to the job."""
        return []

    def check(self) -> None:
        """Do nothing: the job's launcher watches its processes."""

    def start_one(self, _name: str, _host: str = "") -> NoReturn:
        """Refuse to start a process within the job.

        Raises
        ------
        LaunchError
            Always.
        """
        raise LaunchError(f"no process can be added to a running job of {self._config.job}")

    def end(self, patience_s: float) -> None:
        """Wait up to ``patience_s`` seconds for the job's controller to end, with which its file is removed."""
        if self._tunnel is not None:
            self._tunnel.wait_for_end(patience_s)
            return
        deadline = time.monotonic() + patience_s
        while self._there.exists() and time.monotonic() < deadline:
            time.sleep(PROCESSES_POLL_SECONDS)
