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
from ..errors import LaunchError, StartInterruptedError, UsageError
from ..protocol.ranks import label_ranks
from ..protocol.requests import End
from ..protocol.states import RankState
from ..protocol.time_limits import CLUSTER_END_SECONDS, CLUSTER_SETTLE_SECONDS
from ..sigint import deferred_interrupts, raise_interrupted
from .cells.executor import Cells
from .recovery.remedies import error_text
from .recovery.supervisor import Supervisor
from .registry.cluster_file import CellLog
from .session_messages import SessionMessages
from .startup.job_watch import JobWatch
from .startup.launch import Launch
from .startup.progress import StartProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .session import Session

_open: weakref.WeakSet[Lifecycle] = weakref.WeakSet()  # of the open clusters of this process


class Lifecycle:
    """Starts and ends the ranks of one session, whose launch, recovery and cells it sets.

    ``report`` is that of :class:`jupyter_disttrain.Cluster`.
    """

    def __init__(self, session: Session, report: Callable[[str], None] | None = None) -> None:
        self.session = session
        self.messages = SessionMessages(
            session,
            interrupt=lambda: self._in_background("interrupt", session.interrupt),
            reset=lambda: self.reset_because("it was requested in the side panel"),
            shutdown=self.end_because,
            leave=self.leave_because,
        )
        self._report = report or partial(print, file=sys.stderr, flush=True)
        self._pid = os.getpid()

    # Start

    def start(self, on_start: Callable[[str], None] | None = None) -> None:
        """Start the ranks and watch them.

        Raises a LaunchError or a UsageError if they can't be started; nothing is left running then.
        """
        self._start(self._new_launch(on_start))
        self.keep_until_exit()

    def keep_until_exit(self) -> None:
        """End the ranks with this process, unless they are configured to outlive it."""
        _open.add(self)

    def _new_launch(self, on_start: Callable[[str], None] | None, before: Launch | None = None) -> Launch:
        config = self.session.config
        progress = StartProgress(config, self._report, on_start or (lambda _text: None))
        return Launch(config, progress=progress, before=before)

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
                launch.dispatcher.open(self.messages)
        except BaseException as error:  # also a KeyboardInterrupt, wherever it is raised
            if is_up:
                self.stop_watching()
            launch.stop()
            raise_interrupted(error)
            raise

    def watch(self) -> None:
        """Start to watch the ranks of the session's launch, and accept cells for them."""
        session, launch = self.session, self.session.launch
        remarks = session.telemetry.remarks
        session.supervisor = Supervisor(launch, remarks, self.reset_because, self.end_because)
        cell_log = CellLog(launch.folders.cell_log if session.config.keep else None)
        count = cell_log.last if session.cells is None else session.cells.count
        session.cells = Cells(launch, session.supervisor, session.telemetry, cell_log, count, session.interrupt)
        allocated = launch.state.placement.allocated
        watch = JobWatch(allocated, session.supervisor.note, self._on_job_over) if allocated else None
        session.job_watch = watch
        remarks.of_job = list if watch is None else lambda: watch.standing

    def stop_watching(self) -> None:
        """Stop to watch the ranks, before they are ended or left."""
        if self.session.job_watch is not None:
            self.session.job_watch.close()
        self.session.supervisor.close()

    # Restart

    def reset(self, on_start: Callable[[str], None] | None = None) -> list[str]:
        """End all ranks and start as many new ones; see :meth:`jupyter_disttrain.Cluster.reset`."""
        self._check_restartable()
        session = self.session
        with session.restarting:
            session.check_not_closed()
            before = session.launch
            follows = before.can_be_followed
            fresh, is_gone = self._new_launch(on_start, before if follows else None), False
            try:
                if session.config.hosts or follows:
                    fresh.decide()
                is_gone = True
                session.debugger.on_end_of_all()
                session.abandon_cells(f"the cluster {session.config.name!r} was reset while the cell ran; run it again")
                self.stop_watching()
                if follows and before.registration.awaits_rank:  # a rank has died meanwhile
                    follows = False
                    fresh.stop()
                    fresh = self._new_launch(on_start)
                if follows:
                    for entry in before.table:
                        session.telemetry.end_rank(entry.info.rank, expected=True)
                else:
                    before.stop()
                notes = [*session.supervisor.take_notes(), *before.killed]
                try:
                    self._start(fresh)
                except (LaunchError, OSError):
                    if not follows:
                        raise
                    fresh = self._new_launch(on_start)  # what the old ranks had left may have been the reason
                    self._start(fresh)
                notes += fresh.registration.killed.values()
            except BaseException as error:  # also a KeyboardInterrupt: without ranks the cluster is closed
                fresh.stop()
                if is_gone:
                    before.stop()  # what has not been taken over
                    self._close()
                    why = f"has ended, because its ranks could not be started again: {error_text(error)}"
                    session.launch.state.closed_because = why
                    if isinstance(error, KeyboardInterrupt):
                        message = "the reset was interrupted, and the cluster has ended; start another with %dist_init"
                        raise StartInterruptedError(message) from None
                raise
        return notes

    def reset_because(self, reason: str) -> None:
        """End all ranks and start new ones on a thread of its own; the next cell shows the reason and other notes."""
        session, launch = self.session, self.session.launch

        def reset() -> None:
            with session.restarting:
                if session.launch is launch:  # else its ranks were reset meanwhile
                    for note in (*self.reset(), f"all ranks were started again, with fresh variables: {reason}"):
                        session.supervisor.note(note)

        self._in_background("reset", reset)

    def replace(self, ranks: Iterable[int]) -> list[str]:
        """End the processes of some ranks and start new ones; see :meth:`jupyter_disttrain.Cluster.replace`."""
        self._check_restartable()
        launch, supervisor = self.session.launch, self.session.supervisor
        chosen = parse_ranks(ranks, len(launch.table))
        launch.replacer.spare_hosts.try_all_again(launch.open_link)
        gone = [launch.table[rank].pid_gone for rank in chosen]
        for rank in chosen:
            with supervisor.changing() as state:
                state.on_asked(rank)
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

    def shutdown(self, reason: str = "was shut down") -> None:
        """End every process of the cluster, whose later calls get the reason; a second call does nothing."""
        session = self.session
        if self._pid != os.getpid():  # a forked child must not end its parent's ranks
            return
        with session.restarting:
            if session.is_closed:
                return
            state = session.launch.state
            state.closed_because = reason
            self._close()
            try:
                self._end_ranks(str(state.closed_error()))
            except Exception as error:
                state.closed_because += f", and not all its processes could be ended: {error_text(error)}"
                raise

    def _end_ranks(self, reason: str) -> None:
        """End the wait for cells with the reason, and then the ranks."""
        self.session.abandon_cells(reason)  # first, or the end of the ranks would be reported as their death
        self.stop_watching()
        self.session.launch.stop()

    def leave(self, because: str) -> None:
        """Close the cluster in this process and leave its ranks running."""
        with self.session.restarting:
            self.session.debugger.detach()
            self._close()
            self.stop_watching()
            self.session.launch.leave(because)

    def _close(self) -> None:
        self.session.is_closed = True
        _open.discard(self)

    def end_because(self, reason: str) -> None:
        """End the wait for cells at once, and the ranks on a thread of its own."""
        self.session.abandon_cells(str(self.session.launch.state.closed_error(reason)))
        self._in_background("end", lambda: self.shutdown(reason))

    def leave_because(self, reason: str) -> None:
        """End the wait for cells at once; leave the ranks, which are out of reach, on a thread of its own."""

        def leave() -> None:
            with self.session.restarting:
                if not self.session.is_closed:  # else it was closed meanwhile, for another reason
                    self.leave(f"is unreachable: {reason}")

        self.session.abandon_cells(reason)
        self._in_background("leave", leave)

    def _in_background(self, what: str, call: Callable[[], object]) -> None:
        """Call a function on a thread of its own, which may join the calling one.

        An error is shown with the next cell. If the cluster is closed by then, its reason explains the error.
        """

        def run() -> None:
            try:
                call()
            except Exception as error:  # noqa: BLE001  (any error must reach the user)
                if not self.session.is_closed:
                    with self.session.supervisor.changing() as state:
                        state.on_end_failed()
                    self.session.supervisor.note(f"{what} failed: {error_text(error)}")

        threading.Thread(target=run, name=f"disttrain {what}").start()

    def _on_job_over(self, reason: str) -> None:
        """End the cluster with its job, unless the job ended because the controller was lost.

        If the job ends while the ranks are being identified, the start fails by itself.
        """
        if not self.session.launch.lost_because:
            self.end_because(f"has lost its nodes: {reason}")


@atexit.register
def _shutdown_all() -> None:
    for lifecycle in list(_open):
        if lifecycle.session.config.keep:
            lifecycle.session.debugger.detach()  # else the ranks would stop with no client that lets them go on
        else:
            lifecycle.shutdown()
