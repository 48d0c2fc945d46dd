"""Run the actions that recover a session.

Covers: the actions that ``state_machine`` decides on: releasing ranks, replacing dead ones, forming the group.
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
from typing import TYPE_CHECKING, Any

from ...errors import ClusterClosedError, HostLostError, IrreplaceableError, LaunchError
from ...protocol.ranks import label_ranks
from ...protocol.requests import Release, Signal
from ...protocol.states import RankState
from ...protocol.time_limits import RECOVERY_CHECK_SECONDS, RELEASE_SECONDS, SUPERVISOR_FORM_SECONDS
from . import memory_shortage
from .explanations import error_text, remedy
from .hang_detection import HangReport, waited_for, waits_in_mpi
from .notes import Notes
from .stack_collection import StackCollector
from .state_machine import Do, Phase, Recovery

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from concurrent.futures import Future

    from ...features.telemetry.warnings import Remarks
    from ...protocol.messages import RankDeath
    from ...protocol.ranks import RankInfo
    from ..startup.launch import Launch
    from ..startup.rank_table import RankEntry
    from ..transport.link import Message
    from .state_machine import Action, Rules


log = logging.getLogger(__name__)


class Supervisor:
    """The recovery thread of one started cluster; runs until it is closed.

    Parameters
    ----------
    launch
        The ranks.
    rules
        The settings of recovery.
    remarks
        The remarks on the ranks' figures, for the cells.
    reset, stop
        Called with the reason after a rank's death, as configured; must not wait for the ranks.
    """

    def __init__(
        self, launch: Launch, rules: Rules, remarks: Remarks, reset: Callable[[str], None], stop: Callable[[str], None]
    ) -> None:
        self._launch = launch
        launch.state.on_note = self.note
        self.remarks = remarks
        self._reset, self._stop = reset, stop
        self._state = Recovery(len(launch.table), rules)
        self._changed = threading.Condition()
        self._closed = False
        self._sleeps_long = True  # whether the thread waits without a timeout
        self._notes = Notes()
        self._start_errors: dict[int, Exception] = {}  # by rank: why its last new process did not start
        self.stacks = StackCollector(launch, self._state, self._changed, self._notes)
        self._helpers: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._run, name="disttrain supervisor", daemon=True)
        self._thread.start()

    # Events

    def on_sent(self, rank: int, cell: int) -> None:
        """Record that a cell is sent to a rank."""
        with self._changed:
            self._state.on_sent(rank, time.monotonic(), cell)
            self._wake_if(self._sleeps_long)

    def on_reply(self, entry: RankEntry, content: Mapping[str, Any]) -> None:
        """Record that a rank has ended its cell, and what the reply shows about its memory, device and groups."""
        rank, failed = entry.info.rank, content["status"] != "ok"
        if memory_shortage.is_shortage(content):
            self.note(memory_shortage.held(self._launch.table))
        if memory_shortage.is_shortage_of_gpu(content):
            self.note(memory_shortage.held_on_gpus(self.remarks.vitals))
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
        rank = entry.info.rank
        self._launch.steps.died(rank)
        if memory_shortage.may_be_shortage(death):
            peaks = {rank: death.peak_bytes} if death.peak_bytes else None
            self.note(memory_shortage.held(self._launch.table, peaks))
        self._apply(lambda state, now: state.on_death(rank, now))

    def on_interrupt(self, ranks: Collection[int] | None, *, forced: bool) -> None:
        """Record that the user has interrupted the cells of ``ranks``; None means all ranks."""
        self._apply(lambda state, now: state.on_interrupt(now, forced=forced, ranks=ranks))

    def on_asked(self, rank: int) -> None:
        """Record that the user has requested a new process for a rank."""
        self._apply(lambda state, _now: state.on_asked(rank))

    def on_end_failed(self) -> None:
        """Record that a reset or stop, if one was begun after a death, has failed: the ranks stay as they are."""
        self._apply(lambda state, _now: state.on_end_failed())

    def on_group_ended(self) -> None:
        """Record that the process group of the ranks is unusable."""
        self._apply(lambda state, _now: state.on_group_ended())

    def change(self, rules: Rules) -> None:
        """Apply other rules from now on."""
        self._apply(lambda state, _now: state.change(rules))

    def form(self) -> None:
        """Have all ranks form a process group in place of the one that cells have ended, and wait for it.

        Raises
        ------
        LaunchError
            If the group can't be formed.
        """
        self.on_group_ended()
        self.wait_until_settled(SUPERVISOR_FORM_SECONDS)
        if self._state.phase is not Phase.FORMED:
            raise LaunchError("; ".join(self.take_notes()) or "the process group could not be formed again")

    def _wake_if(self, needed: bool) -> None:
        """Wake the thread only if it has something to do: cells that end without an error should cost nothing."""
        if needed:
            self._sleeps_long = False
            self._changed.notify_all()

    def _apply(self, event: Callable[[Recovery, float], None]) -> None:
        with self._changed:
            event(self._state, time.monotonic())
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
        """Keep a message for the user."""
        with self._changed:
            self._notes.add(text)

    def take_notes(self) -> list[str]:
        """Return the messages for the user since the last call."""
        with self._changed:
            return self._notes.take(self._launch.replacer.why_hosts_lost, self._launch.replacer.ranks_of_lost_hosts)

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
        elif action.do is Do.RELEASE:
            self.release(forced=action.forced)
        elif self._launch.is_being_stopped:
            return
        elif action.do is Do.KILL:
            assert action.rank is not None
            self._kill(action.rank)
        elif action.do is Do.REPLACE:
            assert action.rank is not None
            self._help(self._replace, action.rank)
        elif action.do is Do.FORM:
            self._help(self._form)
        elif action.do is Do.RESET:
            self._reset(f"{self._deaths} (--on-rank-death reset)")
        elif action.do is Do.STOP:
            self._stop(f"was ended, because {self._deaths} (--on-rank-death stop)")

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

        The request states for all ranks whether one waits in MPI ("one", or "many" if for several requests at once),
        because all take part in the release then.
        """
        with self._changed:
            mpi = waits_in_mpi(report.reply for report in self.stacks.fresh().values() if report.reply is not None)
        request = Release(generation=self._launch.state.generation, forced=forced, mpi=mpi)
        for entry in self._launch.table:
            if entry.state != RankState.DEAD:
                future = self._launch.open_link.request(entry.engine, request)
                future.add_done_callback(functools.partial(self._on_released, entry.info))

    def _on_released(self, info: RankInfo, done: Future[Message]) -> None:
        content = {"status": "ok"} if done.exception() is not None else done.result()["content"]
        if content["status"] != "ok":
            why = f"{content['ename']}: {content['evalue']}"
            rank = info.rank
            self.note(f"rank {rank} on {info.host} could not be released: {why}; {self._launch.stuck_remedy([rank])}")

    def _kill(self, rank: int) -> None:
        """Kill a rank that does not return from an MPI call; recovery continues as after any death."""
        entry, reply = self._launch.table[rank], self.stacks.reports[rank].reply or {}
        self.note(
            f"rank {rank} on {entry.info.host} was in {reply.get('call', 'MPI')}, which does not end when its "
            "communicator is revoked; its process was killed after three interrupts"
        )
        self._launch.open_link.request(entry.nanny, Signal(number=signal.SIGKILL))

    def _help(self, work: Callable[..., None], *args: Any) -> None:
        helper = threading.Thread(target=work, args=args, name="disttrain recovery", daemon=True)
        try:
            helper.start()
        except RuntimeError:  # no more threads are allowed: run it in this thread, where a failure is reported too
            log.exception("a recovery action runs in the supervisor's own thread")
            work(*args)
            return
        self._helpers = [*(each for each in self._helpers if each.is_alive()), helper]

    def _replace(self, rank: int) -> None:
        host = self._launch.table[rank].info.host
        try:
            self._launch.replacer.replace(rank)
        except Exception as error:  # noqa: BLE001  (any failure must be reported to threads that wait for the session)
            self._on_not_replaced(rank, error)
            return
        self._write_down()
        with self._changed:
            self._start_errors.pop(rank, None)
            self.stacks.reports[rank] = HangReport(asked_at=-1.0)  # no request was sent to the new process yet
        where = "" if (now := self._launch.table[rank].info.host) == host else f" on {now}"
        note = f"rank {rank} was replaced by a new process{where} without its variables"
        if (source := self._state.survivor) is not None:
            note += f"; %dist_copy --from {source} --to {rank} NAME... restores them"
        table = self._launch.table
        self._finish(lambda state, _now: state.on_replaced(rank, well=table[rank].state != RankState.DEAD), note)

    def _on_not_replaced(self, rank: int, error: Exception) -> None:
        """Keep the error of a failed start; it is a note for the user once no further attempt follows."""
        with self._changed:
            self._start_errors[rank] = error
            self._state.on_replaced(rank, well=False, for_good=isinstance(error, IrreplaceableError))
            for lost in self._state.given_up & self._start_errors.keys():
                why = self._start_errors.pop(lost)
                if isinstance(why, HostLostError):
                    self._notes.add_lost(lost)
                elif isinstance(why, IrreplaceableError):  # its message includes the remedy
                    self._notes.add_not_replaced(lost, str(why))
                else:
                    self._notes.add_not_replaced(lost, f"{error_text(why)}; {remedy(self._launch.config, [lost])}")
            self._changed.notify_all()

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
            with self._changed:
                self._state.on_formed(well=False)
                if self._state.phase is Phase.LOST and not died:  # else it is tried again
                    self._notes.add(text)
                self._changed.notify_all()
            return
        self._write_down()
        notes = [f"lost with the old process group on {label_ranks(ranks)}: {line}" for line, ranks in lost.items()]
        self._finish(lambda state, _now: state.on_formed(well=True), *notes)

    def _release_who_forms(self) -> None:
        """Release ranks that wait for one which failed to join; repeat it, as a release may fall between two waits."""
        deadline = time.monotonic() + RELEASE_SECONDS
        while not self._closed and time.monotonic() < deadline:
            asked = [entry.forming for entry in self._launch.table if entry.state != RankState.DEAD]
            pending = [future for future in asked if future is not None and not future.done()]
            if not pending:
                return
            self.release()
            wait(pending, RECOVERY_CHECK_SECONDS)
        for entry in self._launch.table:
            if (
                entry.state != RankState.DEAD
                and entry.forming is not None
                and not entry.forming.done()
                and not self._closed
            ):
                what = f"rank {entry.info.rank} on {entry.info.host} is stuck in forming the process group"
                self.end_process(entry, f"{what}, and was not released within {RELEASE_SECONDS:g} s")

    def end_process(self, entry: RankEntry, why: str) -> None:
        """Kill a rank that can't be used any more, so that it is replaced like one that died; a job's is only noted."""
        if self._launch.config.job:
            self.note(f"{why}; {remedy(self._launch.config)}")
            return
        self.note(f"{why}; its process is ended")
        rank = entry.info.rank
        self._apply(lambda state, _now: state.on_ending(rank))
        self._launch.open_link.request(entry.nanny, Signal(number=signal.SIGKILL))

    def _write_down(self) -> None:
        try:
            self._launch.write()
        except OSError as error:
            self.note(
                f"the cluster file could not be written, so %dist_attach would not find the current ranks: {error}"
            )

    def _finish(self, event: Callable[[Recovery, float], None], *notes: str) -> None:
        with self._changed:
            self._notes.add(*notes)
        self._apply(event)

    def close(self) -> None:
        """End the thread; do not wait for actions that are in progress."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
