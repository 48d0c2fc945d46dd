"""What can be read off a cluster.

Covers: its name, its ranks and what they do, how long nobody has used it.
Does not cover: sending anything but questions (``cluster``).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..ranks import label_ranks

if TYPE_CHECKING:
    from ..config import ClusterConfig
    from .guardian import Guardian
    from .job_watch import JobWatch
    from .metrics_table import MetricsTable
    from .rank_table import RankEntry
    from .start import Launch
    from .telemetry import Telemetry


class Overview:
    """The part of a cluster that only tells."""

    config: ClusterConfig
    telemetry: Telemetry
    _launch: Launch
    _guardian: Guardian
    _closed: bool
    _job_watch: JobWatch | None  # where the ranks run in a Slurm job
    _last_use: float  # of a clock that never goes back

    @property
    def name(self) -> str:
        """The name by which several clusters are told apart."""
        return self.config.name

    @property
    def cluster_id(self) -> str:
        """What tells it from every other cluster."""
        return self._launch.folders.cluster_id

    @property
    def mpi_lost(self) -> str:
        """Why MPI has no world of all ranks, so that ``comm`` is of no use; empty if it has one, or there is no MPI."""
        return self._launch.mpi_lost

    @property
    def network(self) -> str:
        """The network of its hosts, in words; empty where all ranks are on the notebook's machine."""
        return self._launch.placement.words

    @property
    def note_of_devices(self) -> str:
        """Why ranks use the CPU although there is an accelerator, in words; empty if there is nothing to say."""
        return self._launch.note_of_devices

    @property
    def job(self) -> str:
        """The Slurm job that the ranks run in, and until when, in words; empty where there is none."""
        return "" if self._job_watch is None else self._job_watch.text

    @property
    def lost_because(self) -> str:
        """Why its ranks can't be reached any more, and what to do; empty while they can."""
        return self._launch.lost_because

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._launch.table)

    @property
    def table(self) -> tuple[RankEntry, ...]:
        """Each rank: who it is and what state it is in."""
        return tuple(self._launch.table)

    @property
    def metrics(self) -> MetricsTable:
        """What cells logged with ``log_metrics``."""
        return self.telemetry.metrics

    @property
    def closed(self) -> bool:
        """Whether it was shut down."""
        return self._closed

    def check_open(self) -> None:
        """Raise a ClusterClosedError that says why the cluster ended, if it did."""
        self._launch.check_open()

    @property
    def started_s(self) -> float:
        """When it was started, in seconds since the epoch."""
        return self._launch.started_s

    @property
    def hang(self) -> list[str]:
        """Who waits for whom, once that takes longer than it should; else empty."""
        return [] if self._closed else self._guardian.hang()

    @property
    def log_folder(self) -> str:
        """The folder with one log per rank."""
        return str(self._launch.folders.run)

    def __repr__(self) -> str:
        """Say how many ranks there are, and where."""
        hosts = ", ".join(dict.fromkeys(entry.info.host for entry in self.table))
        state = "closed" if self._closed else f"{label_ranks(range(self.world_size))} on {hosts}"
        return f"<Cluster {self.name!r}: {state}>"

    @property
    def idle_s(self) -> float:
        """Seconds since a rank was used, as far as is known here."""
        busy = any(entry.state == "running" for entry in self.table)
        return 0.0 if busy else time.monotonic() - self._last_use

    def where(self, timeout_s: float = 1.0) -> list[str]:
        """Say what each rank is doing at this moment, one line for ranks that do the same; also while a cell runs."""
        dead = [entry.info.rank for entry in self.table if entry.state == "dead"]
        lines = self._guardian.where(timeout_s)
        return [*lines, f"{label_ranks(dead)}: dead"] if dead else lines
