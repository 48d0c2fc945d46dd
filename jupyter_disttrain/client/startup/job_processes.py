"""Replace ``Processes`` where a job's launcher has started the ranks.

Covers: what another process does there, waiting for the end of the job.
Does not cover: joining the job (``features.batch_jobs.client``), starting ranks, which is not possible there.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from ...protocol.time_limits import PROCESSES_POLL_SECONDS
from ..transport.ssh_tunnel import split, tunnel_of

if TYPE_CHECKING:
    from ...config.cluster import ClusterConfig
    from .processes import Births


class JobProcesses:
    """The interface of ``Processes`` for a job, whose processes the job's launcher owns."""

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
        """Do nothing: the job's launcher watches its processes."""

    def end(self, patience_s: float) -> None:
        """Wait up to ``patience_s`` seconds for the job's controller to end, with which its file is removed."""
        if self._tunnel is not None:
            self._tunnel.wait_for_end(patience_s)
            return
        deadline = time.monotonic() + patience_s
        while self._there.exists() and time.monotonic() < deadline:
            time.sleep(PROCESSES_POLL_SECONDS)
