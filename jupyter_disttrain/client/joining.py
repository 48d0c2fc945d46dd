"""Attach to a running cluster and detach from it.

Covers: clusters that outlived their notebook, and ranks of a job, by its file or through ssh.
Does not cover: the steps of attaching (``attach``, ``features.batch_jobs.client``).
"""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import LaunchError, UsageError
from ..features.batch_jobs import client
from ..launchers.folders import BROUGHT_METRICS
from ..sigint import deferred_interrupts
from . import attach
from .registry.cluster_file import ClusterFile, find
from .transport.dispatch import Hearing
from .transport.ssh_tunnel import tunnel_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

    from ..config.cluster import ClusterConfig
    from ..protocol.connection_file import JobFile
    from .cells.cell_run import CellRun
    from .cells.executor import Cells

open_clusters: weakref.WeakSet[Any] = weakref.WeakSet()  # open clusters of this process


class Joining(Hearing):
    """The part of a cluster that attaches and detaches."""

    missed: list[CellRun]
    is_met: bool  # whether this is a job whose ranks no notebook had joined before
    start_seconds: float

    @abstractmethod
    def _prepare(self, config: ClusterConfig) -> None:
        """Initialize the attributes that need no ranks."""

    @abstractmethod
    def _stop_looking(self) -> None:
        """Stop watching the ranks."""

    @abstractmethod
    def _look_after(self) -> None:
        """Start watching the ranks of the launch."""

    @property
    @abstractmethod
    def _open_cells(self) -> Cells:
        """The cells of the started cluster."""

    @classmethod
    def attach(
        cls, which: str | None = None, *, ssh: str = "ssh", unless: Callable[[str], None] = lambda _name: None
    ) -> Self:
        """Attach to a cluster that outlived its notebook.

        Parameters
        ----------
        which
            Name or ID of the cluster; or a job's ``FILE``, or ``HOST:FILE`` to connect through ssh; None if there is
            only one cluster.
        ssh
            The ssh command, with its options.
        unless
            Called with the cluster's name before attaching; raises an error to prevent it.

        Returns
        -------
        Cluster
            The cluster, whose ranks have kept their variables. Its :attr:`missed` lists the cells that had not ended
            when the earlier notebook left; they may still run.

        Raises
        ------
        UsageError
            If there is no such cluster, or another running process holds it.
        """
        is_job = which is not None and client.is_file(which)
        there = client.find(str(which), ssh) if is_job else find(which, free=True)
        self = cls.__new__(cls)
        try:
            unless(there.name)
            if isinstance(there, ClusterFile):
                self._prepare(there.load_config())
                self._join(there)
            else:
                self._prepare(client.config_of(there, client.full_path(str(which))))
                self._meet(there)
        except BaseException:  # also a KeyboardInterrupt must leave no tunnel open
            client.let_go(there)
            raise
        open_clusters.add(self)
        return self

    def _meet(self, told: JobFile) -> None:
        started = time.monotonic()
        self._launch = client.JobLaunch(told, self.config, self._on_message, self._on_lost)
        self._launch.decide()
        self._launch.start()
        with self._looked_after():
            self.is_met = True
            self.start_seconds = time.monotonic() - started

    def _join(self, there: ClusterFile) -> None:
        started = time.monotonic()
        gate = attach.Gate(self._on_message)
        self._launch = attach.join(there, gate, self._on_lost)
        with self._looked_after():
            self._read_metrics()
            self.missed = attach.take_up(self._launch, self._guardian, self._open_cells, gate, self.interrupt)
            self.start_seconds = time.monotonic() - started

    @contextmanager
    def _looked_after(self) -> Iterator[None]:
        """Start watching the ranks; if the block fails, stop that and leave the cluster."""
        try:
            with deferred_interrupts():
                self._look_after()
            yield
        except BaseException:  # also a KeyboardInterrupt: the cluster must be left so that others can attach
            self._stop_looking()
            self._launch.leave()
            raise

    def _read_metrics(self) -> None:
        folders = self._launch.folders
        tunnel = tunnel_of(folders.profile)
        if tunnel is not None:
            try:
                tunnel.bring_metrics(str(folders.run), folders.profile / BROUGHT_METRICS)
            except LaunchError as error:
                self._guardian.note(str(error))
        if any(folders.metrics.glob("*.metrics.jsonl")):
            self.metrics.read(folders.metrics)

    def detach(self) -> None:
        """Close the cluster here and leave its ranks and their cells running, to be attached to later.

        Raises
        ------
        UsageError
            If the cluster was not started with ``keep``: it would end with this process.
        """
        if not self.config.keep:
            raise UsageError(f"the cluster {self.name!r} ends with its notebook; start it with %dist_init --keep")
        self._launch.check_open()
        try:
            self._closed = True
            self._stop_looking()
            attach.let_begin(self._launch)
        finally:  # also after a KeyboardInterrupt: a half detached cluster could be neither attached to nor ended
            self._drop("was left to itself")
            self._open_cells.abandon("the cluster was left to itself while the cell ran; %dist_attach takes it up")

    def _drop(self, because: str) -> None:
        """Close the cluster and leave its ranks running."""
        self._closed = True
        open_clusters.discard(self)
        self._stop_looking()
        self._launch.leave(because)

    def _check_own(self) -> None:
        """Refuse to restart ranks that a job's launcher has started: they would only end."""
        if self.config.job:
            raise UsageError(
                f"the ranks of {self.config.job_file} are a job's own; %dist_shutdown ends it, and only where it was "
                "started it can be started anew"
            )
