"""Expose the read-only properties of a cluster.

Covers: its name, its ranks and their states, the time since its last use.
Does not cover: sending anything but queries (``cluster``).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..protocol.ranks import label_ranks
from ..protocol.states import RankState

if TYPE_CHECKING:
    from ..config.cluster import ClusterConfig
    from ..features.telemetry.client import Telemetry
    from ..features.telemetry.metrics_table import MetricsTable
    from .recovery.supervisor import Guardian
    from .startup.job_watch import JobWatch
    from .startup.launch import Launch
    from .startup.rank_table import RankEntry


class Overview:
    """The read-only part of a cluster."""

    config: ClusterConfig
    telemetry: Telemetry
    _launch: Launch
    _guardian: Guardian
    _closed: bool
    _job_watch: JobWatch | None  # present if the ranks run in a Slurm job
    _last_use: float  # time of a monotonic clock

    @property
    def name(self) -> str:
        """The name that distinguishes it from other clusters."""
        return self.config.name

    @property
    def cluster_id(self) -> str:
        """The unique id of the cluster."""
        return self._launch.folders.cluster_id

    @property
    def mpi_lost(self) -> str:
        """Why MPI has no world of all ranks, so that ``comm`` is unusable; empty if it has one, or there is no MPI."""
        return self._launch.mpi_lost

    @property
    def network(self) -> str:
        """The network of its hosts, as text; empty where all ranks are on the notebook's machine."""
        return self._launch.placement.description

    @property
    def note_of_devices(self) -> str:
        """Why ranks use the CPU although there is an accelerator, as text; empty if there is nothing to report."""
        return self._launch.note_of_devices

    @property
    def job(self) -> str:
        """The Slurm job that the ranks run in and its end time, as text; empty where there is none."""
        return "" if self._job_watch is None else self._job_watch.text

    @property
    def lost_because(self) -> str:
        """Why its ranks are no longer reachable, and what to do; empty while they are."""
        return self._launch.lost_because

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._launch.table)

    @property
    def table(self) -> tuple[RankEntry, ...]:
        """The identity and the state of each rank."""
        return tuple(self._launch.table)

    @property
    def metrics(self) -> MetricsTable:
        """Values that cells logged with ``log_metrics``."""
        return self.telemetry.metrics

    @property
    def closed(self) -> bool:
        """Whether it was shut down."""
        return self._closed

    def check_open(self) -> None:
        """Raise a ClusterClosedError with the reason if the cluster has ended."""
        self._launch.check_open()

    @property
    def started_s(self) -> float:
        """When it was started, in seconds since the epoch."""
        return self._launch.started_s

    @property
    def hang(self) -> list[str]:
        """Which ranks wait for which, once that takes longer than it should; else empty."""
        return [] if self._closed else self._guardian.hang()

    @property
    def log_folder(self) -> str:
        """The folder with one log per rank."""
        return str(self._launch.folders.run)

    def __repr__(self) -> str:
        """Return the cluster's name, the number of ranks and their hosts."""
        hosts = ", ".join(dict.fromkeys(entry.info.host for entry in self.table))
        state = "closed" if self._closed else f"{label_ranks(range(self.world_size))} on {hosts}"
        return f"<Cluster {self.name!r}: {state}>"

    @property
    def idle_s(self) -> float:
        """Seconds since a rank was last used, as far as this process observed."""
        busy = any(entry.state == RankState.RUNNING for entry in self.table)
        return 0.0 if busy else time.monotonic() - self._last_use

    def where(self, timeout_s: float = 1.0) -> list[str]:
        """Describe what each rank is doing now, also while a cell runs; ranks that do the same share a line."""
        dead = [entry.info.rank for entry in self.table if entry.state == RankState.DEAD]
        lines = self._guardian.where(timeout_s)
        return [*lines, f"{label_ranks(dead)}: dead"] if dead else lines
