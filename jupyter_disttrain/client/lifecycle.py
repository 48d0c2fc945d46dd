"""Start, reset, replace and end the ranks of a session.

Covers: the order in which launch, watching and cells start and end, also after an error or an interrupt; ending all
clusters with this process.
Does not cover: the processes (``client.startup.launch``), attaching and detaching (``client.attach``).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING

from ..config.rank_selection import parse_ranks
from ..errors import LaunchError, UsageError
from ..protocol.ranks import label_ranks
from ..protocol.requests import End
from ..protocol.states import RankState
from ..protocol.time_limits import CLUSTER_END_SECONDS, CLUSTER_SETTLE_SECONDS
from ..sigint import deferred_interrupts, raise_interrupted
from .startup.launch import Launch
from .startup.progress import StartProgress
from .transport.dispatch import MessageDispatcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .session import Session

_open: weakref.WeakSet[Lifecycle] = weakref.WeakSet()  # of the open clusters of this process


class Lifecycle:
    """Starts and ends the ranks of one session.

    Parameters
    ----------
    session
        The session, whose launch, recovery and cells this sets.
    report
        See :class:`jupyter_disttrain.Cluster`.
    """

    def __init__(self, session: Session, report: Callable[[str], None] | None = None) -> None:
        self.session = session
        self.dispatcher = MessageDispatcher(
            session,
            interrupt=session.interrupt,
            reset=self.reset,
            shutdown=self.end_because,
            leave=self.leave_because,
        )
        self.killed: list[str] = []  # messages on ranks killed at the last shutdown or reset: they took too long to end
        self._report = report or partial(print, file=sys.stderr, flush=True)
        self._pid = os.getpid()

    # Start

    def start(self, on_start: Callable[[str], None] | None = None) -> None:
        """Start the ranks and watch them.

        Raises
        ------
        LaunchError, UsageError
            If they can't be started; nothing is left running then.
        """
        self._start(self._new_launch(on_start))
        self.keep_until_exit()

    def keep_until_exit(self) -> None:
        """End the ranks with this process, unless they are configured to outlive it."""
        _open.add(self)

    def _new_launch(self, on_start: Callable[[str], None] | None) -> Launch:
        config = self.session.config
        progress = StartProgress(config, self._report, on_start or (lambda _text: None))
        return Launch(config, self.dispatcher.on_message, self.dispatcher.on_lost, progress=progress)

    def _start(self, launch: Launch) -> None:
        """Start the ranks; decide first where they run, unless that is done."""
        session = self.session
        started = time.monotonic()
        session.launch = launch
        is_up = False
        try:
            if not launch.state.is_decided:
                launch.decide()
            launch.start()
            session.start_seconds = time.monotonic() - started
            with deferred_interrupts():
                self.watch()
                is_up = True
        except BaseException as error:  # also a KeyboardInterrupt, wherever it is raised
            if is_up:
                session.stop_watching()
            launch.stop()
            raise_interrupted(error)
            raise

    def watch(self) -> None:
        """Start to watch the ranks of the session's launch."""
        self.session.watch(reset=self.reset, shutdown=self.shutdown, on_job_over=self._on_job_over)

    # Restart

    def reset(self, on_start: Callable[[str], None] | None = None) -> None:
        """End all ranks and start as many new ones; see :meth:`jupyter_disttrain.Cluster.reset`."""
        self._check_restartable()
        session = self.session
        with session.restarting:
            fresh, is_gone = self._new_launch(on_start), False
            try:
                if session.config.hosts:
                    fresh.decide()
                is_gone = True
                session.stop_watching()
                try:
                    session.launch.stop()
                finally:  # Slurm may refuse to end a job; threads that wait for a cell must be released even then
                    self.killed = session.launch.killed
                    name = session.config.name
                    session.open_cells.abandon(f"the cluster {name!r} was reset while the cell ran; run it again")
                self._start(fresh)
            except BaseException:  # also a KeyboardInterrupt: once the old ranks have ended, the cluster is closed
                fresh.stop()
                if is_gone:
                    self._close()
                raise

    def replace(self, ranks: Iterable[int]) -> list[str]:
        """End the processes of some ranks and start new ones; see :meth:`jupyter_disttrain.Cluster.replace`."""
        self._check_restartable()
        launch, supervisor = self.session.launch, self.session.supervisor
        chosen = parse_ranks(ranks, len(launch.table))
        launch.replacer.try_lost_hosts()
        gone = [launch.table[rank].pid_gone for rank in chosen]
        for rank in chosen:
            supervisor.on_asked(rank)
            if launch.table[rank].state != RankState.DEAD:
                launch.open_link.request(launch.table[rank].nanny, End())
        until = time.monotonic() + CLUSTER_END_SECONDS
        for each in gone:
            each.wait(until - time.monotonic())
        supervisor.wait_until_settled(CLUSTER_SETTLE_SECONDS)
        if left := [rank for rank, each in zip(chosen, gone, strict=True) if not each.is_set()]:
            raise LaunchError(
                f"{label_ranks(left)} did not end: the nanny of a rank, which ends it, does not respond, probably "
                "because it was stopped or its host is unreachable; a new process starts when it responds, and "
                "%dist_reset starts all ranks again"
            )
        notes = supervisor.take_notes()
        if any(launch.table[rank].state == RankState.DEAD for rank in chosen):
            raise LaunchError(
                "; ".join(notes) or f"{label_ranks(chosen)} could not be replaced; %dist_reset starts all ranks again"
            )
        return notes

    def _check_restartable(self) -> None:
        """Refuse to restart ranks that a job's launcher has started: they would only end."""
        config = self.session.config
        if config.job:
            raise UsageError(
                f"the ranks of {config.job_file} belong to a job; end it with %dist_shutdown and start it again with "
                "its launcher"
            )

    # End

    def shutdown(self) -> None:
        """End every process of the cluster; a second call does nothing."""
        session = self.session
        if session.is_closed or self._pid != os.getpid():  # a forked child must not end its parent's ranks
            return
        self._close()
        try:
            with session.restarting:
                session.stop_watching()
                session.launch.stop()
        finally:  # as above
            self.killed = session.launch.killed
            session.open_cells.abandon("the cluster was shut down while the cell ran; start one with %dist_init")

    def leave(self, because: str) -> None:
        """Close the cluster in this process and leave its ranks running."""
        self._close()
        self.session.stop_watching()
        self.session.launch.leave(because)

    def _close(self) -> None:
        self.session.is_closed = True
        _open.discard(self)

    def end_because(self, reason: str) -> None:
        """End the wait for cells at once, and the ranks on a thread of its own."""
        self.session.launch.state.closed_because = reason
        name = self.session.config.name
        self.session.abandon_cells(f"the cluster {name!r} {reason}; start one with %dist_init")
        threading.Thread(target=self.shutdown, name="disttrain end").start()  # it joins the calling thread

    def leave_because(self, reason: str) -> None:
        """End the wait for cells at once; leave the ranks, which are out of reach, on a thread of its own."""
        self.session.abandon_cells(reason)
        because = f"is unreachable: {reason}"
        threading.Thread(target=self.leave, args=(because,), name="disttrain leave").start()  # as above

    def _on_job_over(self, reason: str) -> None:
        """End the cluster with its job, unless the job ended because the controller was lost.

        If the job ends while the ranks are being identified, the start fails by itself.
        """
        if not self.session.launch.lost_because:
            self.end_because(f"has lost its nodes: {reason}")


@atexit.register
def _shutdown_all() -> None:
    for lifecycle in list(_open):
        if not lifecycle.session.config.keep:
            lifecycle.shutdown()
