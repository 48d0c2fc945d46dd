"""Run the actions that recover a session.

Covers: the actions that ``state_machine`` decides on: releasing ranks, replacing dead ones, forming the group; notes on
them for the user.
Does not cover: the decisions (``state_machine``), requesting the state of ranks (``stack_collection``), starting
processes (``client.startup.launch``).

One thread per cluster. Events are passed to it from any thread, and it never waits for a rank itself: replies arrive
as events, and long actions run in threads of their own.
"""

from __future__ import annotations

import functools
import logging
import signal
import threading
import time
from concurrent.futures import wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...errors import ClusterClosedError, HostLostError, IrreplaceableError, LaunchError
from ...protocol.ranks import label_ranks
from ...protocol.requests import EndProgram, Release, Signal
from ...protocol.states import RankState
from ...protocol.time_limits import RECOVERY_CHECK_SECONDS, RELEASE_SECONDS, SUPERVISOR_FORM_SECONDS
from . import memory_shortage
from .hang_explanation import HangReport, waited_for, waits_in_mpi
from .remedies import error_text, remedy
from .stack_collection import StackCollector
from .state_machine import Do, Phase, Recovery

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from concurrent.futures import Future

    from ...features.telemetry.warnings import Remarks
    from ...protocol.rank_death import RankDeath
    from ...protocol.ranks import RankInfo
    from ..startup.launch import Launch
    from ..startup.rank_table import RankEntry
    from ..transport.link import Message
    from .state_machine import Action


log = logging.getLogger(__name__)


class Supervisor:
    """The recovery thread of one started cluster; runs until it is closed.

    It calls ``reset`` or ``stop`` with the reason after a rank's death, as configured; they must not wait for ranks.
    """

    def __init__(
        self, launch: Launch, remarks: Remarks, reset: Callable[[str], None], stop: Callable[[str], None]
    ) -> None:
        self._launch = launch
        self.remarks = remarks
        self._reset, self._stop = reset, stop
        self._state = Recovery(len(launch.table), launch.config)
        self._changed = threading.Condition()
        self._closed = False
        self._sleeps_long = True  # whether the thread waits without a timeout
        self._notes: list[str] = []  # for the user, in order of arrival
        self._start_errors: dict[int, Exception] = {}  # by rank: why its last new process did not start
        self.stacks = StackCollector(launch, self._state, self._changed, self.note)
        launch.state.on_note = self.note
        self._thread = threading.Thread(target=self._run, name="disttrain supervisor", daemon=True)
        self._thread.start()

    # Events

    def on_sent(self, rank: int, cell: int, *, program: bool = False) -> None:
        """Record that a cell, of which ranks may run a program, is sent to a rank."""
        with self._changed:
            self._state.on_sent(rank, time.monotonic(), cell, program=program)
            self._wake_if(self._sleeps_long)

    def on_reply(self, entry: RankEntry, content: Mapping[str, Any]) -> None:
        """Record that a rank has ended its cell, and what the reply shows about its memory, device and groups."""
        rank, failed = entry.info.rank, content["status"] != "ok"
        if failed:
            self.note(memory_shortage.after_failure(content, self._launch.table, lambda: self.remarks.vitals))
        if content.get("device_lost"):
            self.end_process(
                entry, f"rank {rank} on {entry.info.host} lost its GPU's context: {content['evalue']:.120}"
            )
        # A cell that fails between the end of one group and the creation of the next leaves none.
        broken = entry.group == "broken" or (failed and not entry.group) or bool(content.get("step_cut_off"))
        broken |= self._launch.steps.replied(rank, entry.group, content, failed=failed)
        if content.get("mpi_revoked"):
            self._launch.state.mpi_revoked = broken = True
        with self._changed:
            self._state.on_reply(rank, time.monotonic(), failed=failed, broken=broken)
            self._wake_if(not self._state.is_calm)

    def on_death(self, entry: RankEntry, death: RankDeath) -> None:
        """Record that a rank's process has ended."""
        self._launch.steps.died(entry.info.rank)
        self.note(memory_shortage.after_death(death, self._launch.table))
        with self.changing() as state:
            state.on_death(entry.info.rank, time.monotonic())

    @contextmanager
    def changing(self) -> Iterator[Recovery]:
        """Give the block sole access to the state machine, for other events; then act on what has changed."""
        with self._changed:
            yield self._state
            self._changed.notify_all()

    def form(self) -> None:
        """Have all ranks form a process group in place of the one that cells have ended, and wait for it.

        Raises
        ------
        LaunchError
            If the group can't be formed.
        """
        with self.changing() as state:
            state.on_group_ended()
        self.wait_until_settled(SUPERVISOR_FORM_SECONDS)
        if self._state.phase is not Phase.FORMED:
            raise LaunchError("; ".join(self.take_notes()) or "the process group could not be formed again")

    def _wake_if(self, needed: bool) -> None:
        """Wake the thread only if it has something to do: cells that end without an error should cost nothing."""
        if needed:
            self._sleeps_long = False
            self._changed.notify_all()

    # Queries

    def wait_until_settled(self, timeout_s: float) -> bool:
        """Wait until no recovery action is left that can be taken now; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or self._state.settled, timeout_s)

    def wait_until_idle(self, ranks: Collection[int], timeout_s: float) -> bool:
        """Wait until none of these ranks runs a cell any more; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or not self._state.running & set(ranks), timeout_s)

    @property
    def after_death(self) -> str:
        """What follows for the other ranks from the deaths so far, as text; empty if no other rank is left."""
        with self._changed:
            return self._state.after_death

    @property
    def doing(self) -> str:
        """A text on the recovery that is in progress; empty if none is."""
        with self._changed:
            replacing = [rank for rank, member in enumerate(self._state.members) if member.replacing]
            if replacing:
                return f"starting a new process for {label_ranks(replacing)}"
            return "forming the process group again" if self._state.phase is Phase.FORMING else ""

    @property
    def waits_for(self) -> str:
        """A text on what has to happen before the process group can be formed again; empty if nothing has to."""
        with self._changed:
            running = self._state.running
            if self._state.phase is not Phase.BROKEN or not running:
                return ""
            verb = "ends its cell" if len(running) == 1 else "end their cell"
            return f"the process group is formed again once {label_ranks(running)} {verb}"

    def note(self, text: str) -> None:
        """Keep a message for the user, unless it is empty or known already."""
        with self._changed:
            if text and text not in self._notes:
                self._notes.append(text)

    def take_notes(self) -> list[str]:
        """Return the messages for the user since the last call, and why ranks can't be replaced."""
        with self._changed:
            notes, self._notes = self._notes, []
            reasons: dict[str, set[int]] = {}
            for rank in sorted(self._state.given_up & self._start_errors.keys()):
                reason, ranks = self._why_not_replaced(rank, self._start_errors.pop(rank))
                if reason:
                    reasons.setdefault(reason, set()).update(ranks)
            return notes + [f"{label_ranks(ranks)} can't be replaced: {reason}" for reason, ranks in reasons.items()]

    def _why_not_replaced(self, rank: int, error: Exception) -> tuple[str, list[int]]:
        """Return why a rank can't be replaced, with the remedy, and all ranks for which that is so."""
        if isinstance(error, HostLostError):  # more hosts may be lost by now, or all of them are back
            spare_hosts = self._launch.replacer.spare_hosts
            return spare_hosts.why_lost, [rank, *spare_hosts.lost_ranks]
        if isinstance(error, IrreplaceableError):  # its message includes the remedy
            return str(error), [rank]
        return f"{error_text(error)}; {remedy(self._launch.config, [rank])}", [rank]

    def out_of_step(self) -> list[str]:
        """Return messages on ranks that have called more collectives than others, except those returned before."""
        return self._launch.steps.notes()

    # The thread

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                actions = self._state.actions(now)
                if not actions:
                    due = self._state.next_time(now)
                    self._sleeps_long = due is None
                    self._changed.wait(None if due is None else max(0.0, due - now))
                    continue
            for action in actions:
                try:
                    self._do(action)
                except ClusterClosedError:
                    log.debug("the cluster was closed meanwhile", exc_info=True)
                except Exception:  # without this thread the session would never recover again
                    log.exception("the recovery action %s failed", action.do.name)

    def _do(self, action: Action) -> None:
        if action.do is Do.INSPECT:
            with self._changed:
                ranks = self._state.running
                reports = self.stacks.reports
                if waited_for(reports[rank] for rank in ranks if rank in reports):
                    ranks = set(range(len(self._launch.table))) - self._state.dead  # which collectives did they call?
                self.stacks.request(ranks)
        elif action.do in (Do.RELEASE, Do.END_PROGRAMS):
            self._end_waits(action)
        elif self._launch.is_being_stopped:
            return
        elif action.do is Do.KILL:
            entry, reply = self._launch.table[action.rank], self.stacks.reports[action.rank].reply or {}
            is_partitioned = reply.get("mpi") == "partitioned"
            interrupted = "Open MPI can't interrupt in partitioned communication"
            cause = interrupted if is_partitioned else "does not end when its communicator is revoked"
            what = f"rank {action.rank} on {entry.info.host} was in {reply.get('call', 'MPI')}"
            self.end_process(entry, f"{what}, which {cause}, and was interrupted three times")
        elif action.do is Do.REPLACE:
            self._help(self._replace, action.rank)
        elif action.do is Do.FORM:
            self._help(self._form)
        elif action.do is Do.RESET:
            self._reset(f"{self._deaths} (--on-rank-death reset)")
        elif action.do is Do.STOP:
            self._stop(f"was ended, because {self._deaths} (--on-rank-death stop)")

    def _end_waits(self, action: Action) -> None:
        if action.do is Do.RELEASE:
            self.release(forced=action.forced)
            return
        with self._changed:
            ranks = [rank for rank, member in enumerate(self._state.members) if member.cell == action.cell]
        request = EndProgram(cell=action.cell, because="the program of another rank failed")
        for rank in ranks:
            self._launch.open_link.request(self._launch.table[rank].engine, request)

    @property
    def _deaths(self) -> str:
        """Which ranks died where, and how."""
        with self._changed:
            dead = self._state.dead
        by_cause: dict[tuple[str, str], list[int]] = {}
        for entry in self._launch.table:
            if entry.info.rank in dead:
                by_cause.setdefault((entry.info.host, entry.failure), []).append(entry.info.rank)
        return "; ".join(f"{label_ranks(ranks)} on {host} died: {cause}" for (host, cause), ranks in by_cause.items())

    def release(self, *, forced: bool = False) -> None:
        """Make ranks that wait in a collective, or for the group to be formed, fail with an error.

        The request states for all ranks in which kind of MPI call one waits, because all take part in the release then.
        """
        with self._changed:
            mpi = waits_in_mpi(report.reply for report in self.stacks.fresh().values() if report.reply is not None)
        request = Release(generation=self._launch.state.generation, forced=forced, mpi=mpi)
        for entry in self._launch.table:
            if entry.state != RankState.DEAD:
                future = self._launch.open_link.request(entry.engine, request)
                future.add_done_callback(functools.partial(self._on_released, entry.info))

    def _on_released(self, info: RankInfo, done: Future[Message]) -> None:
        if done.exception() is None and (content := done.result()["content"])["status"] != "ok":
            rank, why = info.rank, f"{content['ename']}: {content['evalue']}"
            self.note(f"rank {rank} on {info.host} could not be released: {why}; {self._launch.stuck_remedy([rank])}")

    def _help(self, work: Callable[..., None], *args: Any) -> None:
        helper = threading.Thread(target=work, args=args, name="disttrain recovery", daemon=True)
        try:
            helper.start()
        except RuntimeError:  # no more threads are allowed: run it in this thread, where a failure is reported too
            log.exception("a recovery action runs in the supervisor's own thread")
            work(*args)

    def _replace(self, rank: int) -> None:
        host = self._launch.table[rank].info.host
        try:
            self._launch.replacer.replace(rank)
        except Exception as error:  # noqa: BLE001  (any failure must be reported to threads that wait for the session)
            with self.changing() as state:
                self._start_errors[rank] = error  # a note for the user once no further attempt follows
                state.on_replaced(rank, well=False, for_good=isinstance(error, IrreplaceableError))
            return
        self._write_down()
        entry = self._launch.table[rank]
        where = "" if entry.info.host == host else f" on {entry.info.host}"
        with self.changing() as state:
            self._start_errors.pop(rank, None)
            self.stacks.reports[rank] = HangReport(asked_at=-1.0)  # no request was sent to the new process yet
            source = state.survivor
            restore = (
                "" if source is None else f"; run their cells again, or %dist_copy --from {source} --to {rank} NAME..."
            )
            self.note(f"rank {rank} was replaced by a new process{where} without its variables{restore}")
            state.on_replaced(rank, well=entry.state != RankState.DEAD)

    def _form(self) -> None:
        try:
            lost = self._launch.assignment.form()
        except Exception as error:  # noqa: BLE001  (as above)
            with self._changed:
                died = bool(self._state.dead)
            text = f"the process group can't be formed again: {error_text(error)}; {remedy(self._launch.config)}"
            try:
                self._release_who_forms()
            except ClusterClosedError:
                log.debug("the cluster was closed meanwhile", exc_info=True)
            with self.changing() as state:
                state.on_formed(well=False)
                if state.phase is Phase.LOST and not died:  # else it is tried again
                    self.note(text)
            return
        self._write_down()
        with self.changing() as state:
            for line, ranks in lost.items():
                self.note(f"lost with the old process group on {label_ranks(ranks)}: {line}")
            state.on_formed(well=True)

    def _release_who_forms(self) -> None:
        """Release ranks that wait for one which failed to join; repeat it, as a release may fall between two waits."""
        deadline = time.monotonic() + RELEASE_SECONDS
        while not self._closed:
            alive = [entry for entry in self._launch.table if entry.state != RankState.DEAD]
            stuck = {entry.forming: entry for entry in alive if entry.forming is not None and not entry.forming.done()}
            if not stuck:
                return
            if time.monotonic() >= deadline:
                for entry in stuck.values():
                    what = f"rank {entry.info.rank} on {entry.info.host} is stuck in forming the process group"
                    self.end_process(entry, f"{what}, and was not released within {RELEASE_SECONDS:g} s")
                return
            self.release()
            wait(stuck, RECOVERY_CHECK_SECONDS)

    def end_process(self, entry: RankEntry, why: str) -> None:
        """Kill a rank that can't be used any more, so that it is replaced like one that died; a job's is only noted."""
        if self._launch.config.job:
            self.note(f"{why}; {remedy(self._launch.config)}")
            return
        self.note(f"{why}; its process is ended")
        with self.changing() as state:
            state.on_ending(entry.info.rank)
        self._launch.open_link.request(entry.nanny, Signal(number=signal.SIGKILL))

    def _write_down(self) -> None:
        try:
            self._launch.write()
        except OSError as error:
            self.note(
                f"the cluster file could not be written, so %dist_attach would not find the current ranks: {error}"
            )

    def close(self) -> None:
        """End the thread; do not wait for actions that are in progress."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
