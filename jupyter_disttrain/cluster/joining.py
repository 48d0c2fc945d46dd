"""Join a cluster that runs already, and leave it to itself.

Covers: one that outlived its notebook, a job's ranks, by their file and through ssh.
Does not cover: how that is done (``attach``, ``job``).
"""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import LaunchError, UsageError
from . import attach, job
from .folders import BROUGHT_METRICS
from .hearing import Hearing
from .interrupts import deferred_interrupts
from .registry import ClusterFile, find
from .tunnel import tunnel_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

    from ..config import ClusterConfig
    from ..job_file import JobFile
    from .cell_run import CellRun
    from .cells import Cells

open_clusters: weakref.WeakSet[Any] = weakref.WeakSet()  # of this process


class Joining(Hearing):
    """The part of a cluster that joins and leaves."""

    missed: list[CellRun]
    is_met: bool  # it is a job whose ranks no notebook had joined before
    start_seconds: float

    @abstractmethod
    def _prepare(self, config: ClusterConfig) -> None:
        """Be ready for ranks."""

    @abstractmethod
    def _stop_looking(self) -> None:
        """Look after ranks no longer."""

    @abstractmethod
    def _look_after(self) -> None:
        """Begin to look after ranks that are there."""

    @property
    @abstractmethod
    def _open_cells(self) -> Cells:
        """The cells."""

    @classmethod
    def attach(
        cls, which: str | None = None, *, ssh: str = "ssh", unless: Callable[[str], None] = lambda _name: None
    ) -> Self:
        """Join a cluster that outlived the notebook which held it.

        Parameters
        ----------
        which
            Its name or id; or a job's ``FILE``, or ``HOST:FILE`` to go through ssh; None where there is only one.
        ssh
            The command, with its options.
        unless
            Called with its name before it is joined; raises an error if that must not be.

        Returns
        -------
        Cluster
            With its variables; in :attr:`missed` the cells whose end nobody saw, which may still run.

        Raises
        ------
        UsageError
            If there is none, or a process that runs holds it.
        """
        is_job = which is not None and job.is_file(which)
        there = job.find(str(which), ssh) if is_job else find(which, free=True)
        self = cls.__new__(cls)
        try:
            unless(there.name)
            if isinstance(there, ClusterFile):
                self._prepare(there.load_config())
                self._join(there)
            else:
                self._prepare(job.config_of(there, job.full_path(str(which))))
                self._meet(there)
        except BaseException:  # an interrupt too leaves no tunnel
            job.let_go(there)
            raise
        open_clusters.add(self)
        return self

    def _meet(self, told: JobFile) -> None:
        started = time.monotonic()
        self._launch = job.JobLaunch(told, self.config, self._on_message, self._on_lost)
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
        """Look after the ranks from now on, unless what is done meanwhile fails."""
        try:
            with deferred_interrupts():
                self._look_after()
            yield
        except BaseException:  # an interrupt too: the cluster must be there for the next who asks
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
        """Leave the ranks to themselves, with all that runs on them, until somebody attaches to them.

        Raises
        ------
        UsageError
            If the cluster was not started to be kept: it would end with this process.
        """
        if not self.config.keep:
            raise UsageError(f"the cluster {self.name!r} ends with its notebook; start it with %dist_init --keep")
        self._launch.check_open()
        try:
            self._closed = True
            self._stop_looking()
            attach.let_begin(self._launch)
        finally:  # an interrupt too: half left, nobody could take it up, and not even end it
            self._drop("was left to itself")
            self._open_cells.abandon("the cluster was left to itself while the cell ran; %dist_attach takes it up")

    def _drop(self, because: str) -> None:
        """Close the cluster and leave its ranks to themselves."""
        self._closed = True
        open_clusters.discard(self)
        self._stop_looking()
        self._launch.leave(because)

    def _check_own(self) -> None:
        """Refuse to start ranks anew that were started by somebody else: they would only end."""
        if self.config.job:
            raise UsageError(
                f"the ranks of {self.config.job_file} are a job's own; %dist_shutdown ends it, and only where it was "
                "started it can be started anew"
            )
