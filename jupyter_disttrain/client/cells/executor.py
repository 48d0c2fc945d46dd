"""Send cells to ranks, and route replies and output to the cells.

Covers: sending a cell to its ranks, passing replies, output and deaths to the cells, refusing dead or busy ranks.
Does not cover: the state of one cell (``cell_run``), recovery of ranks (``client.recovery.supervisor``).
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ...errors import ClusterClosedError
from ...protocol.messages import OPTIONS
from ...protocol.ranks import label_ranks
from ...protocol.states import RankState
from ...protocol.time_limits import GIVE_UP_SECONDS, SPACE_SECONDS
from ...sigint import PATIENT_INTERRUPTS, held_interrupts
from ..recovery.remedies import remedy
from ..startup.rank_table import check_idle
from .cell_run import CellRun, Listener, not_back
from .events import Died, OutputEnded, Replied
from .history import CellEntry, MagicEntry, Origin
from .push_pull import with_value

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ...features.telemetry.client import Telemetry
    from ...protocol.requests import AnswerQuestion
    from ..recovery.supervisor import Supervisor
    from ..registry.cluster_file import CellLog
    from ..startup.launch import Launch
    from ..startup.rank_table import RankEntry
    from ..transport.link import Message
    from .events import Event

LATE_CELLS = 100  # ended cells whose threads can still print into their output
LATE_LIMIT = 1000  # events kept for the next cell, from threads that earlier cells left running


class _ToRanks:
    """Sends what a cell has for its ranks; ``cell_of`` returns the cell that a rank runs, and the rank."""

    run: CellRun

    def __init__(
        self,
        launch: Launch,
        interrupt: Callable[..., None],
        cell_of: Callable[[int], tuple[CellRun, int] | None],
    ) -> None:
        self._launch, self._interrupt, self._cell_of = launch, interrupt, cell_of

    def interrupt(self, ranks: Collection[int], *, forced: bool) -> None:
        """Interrupt those of the ranks that run this cell: one that has ended it may run the next."""
        own = [rank for rank in ranks if self._cell_of(rank) == (self.run, rank)]
        if own:
            self._interrupt(own, forced=forced)

    def answer(self, rank: int, answer: AnswerQuestion) -> None:
        """Answer a question of a rank."""
        with suppress(ClusterClosedError):  # the wait for the cell reports it
            self._launch.open_link.request(self._launch.table[rank].engine, answer)


class Cells:
    """The cells that run on the ranks of one launch."""

    def __init__(
        self,
        launch: Launch,
        supervisor: Supervisor,
        telemetry: Telemetry,
        cell_log: CellLog,
        count: int,
        interrupt: Callable[..., None],
    ) -> None:
        self._launch = launch
        self._supervisor = supervisor
        self._telemetry = telemetry
        self._interrupt = interrupt
        self.cell_log = cell_log
        self._lock = threading.RLock()
        self._cells: dict[str, tuple[CellRun, int]] = {}  # cell and rank by the message ID of the request
        self._late: list[Event] = []
        self._ended: dict[str, Listener] = {}  # listeners of ended cells by message ID of the request, the latest last
        self.count = count  # number of cells sent so far

    def check_free(self, ranks: Sequence[int]) -> None:
        """Raise a UsageError for ranks that have died or still run a cell, which may never end."""
        with self._lock:
            self._launch.check_open()
            config = self._launch.config
            dead = [rank for rank in ranks if self._launch.table[rank].state == RankState.DEAD]
            helps = self._launch.replacer.spare_hosts.why_lost or remedy(config, dead)
            last_resort = "%dist_shutdown, which ends the job" if config.job else "%dist_reset"
            check_idle(self._launch.table, ranks, helps, last_resort)
            for msg_id, (run, _) in list(self._cells.items()):
                if run.done and run.number < self.count:  # the wait for the last one may not have ended
                    del self._cells[msg_id]
                    if run.listener is not None:
                        self._ended[msg_id] = run.listener
            for msg_id in list(self._ended)[: -LATE_CELLS * len(self._launch.table)]:
                del self._ended[msg_id]

    @property
    def running(self) -> list[CellRun]:
        """The cells that have not ended on all their ranks, in the order in which they were sent."""
        return list(dict.fromkeys(run for run, _ in list(self._cells.values()) if not run.done))

    def interrupt_and_wait(self, ranks: Collection[int]) -> list[str]:
        """Interrupt the cells of these ranks and wait until they end; return messages on the outcome.

        A SIGINT during the wait is one more interrupt for the ranks, as during the wait for a cell.
        """
        entries = [self._launch.table[rank] for rank in ranks]  # a rank that dies may be replaced meanwhile
        cells = {entry.info.rank: entry.cell or 0 for entry in entries if entry.state == RankState.RUNNING}
        if not cells:
            return [f"{label_ranks(ranks)} {'runs' if len(ranks) == 1 else 'run'} no cell"]
        deadline = time.monotonic() + GIVE_UP_SECONDS
        with held_interrupts() as held:
            self._interrupt(cells)
            pressed = 1
            while not self._supervisor.wait_until_idle(cells, SPACE_SECONDS) and time.monotonic() < deadline:
                held.mark_checked()
                if held.waiting and pressed < PATIENT_INTERRUPTS:
                    held.obeyed += 1
                    pressed += 1
                    self._interrupt(cells)
            held.obeyed = held.pressed
        states = {entry.info.rank: entry.state for entry in entries}
        lines = []
        for number in sorted(set(cells.values())):
            own = [rank for rank in cells if cells[rank] == number]
            dead = [rank for rank in own if states[rank] == RankState.DEAD]
            ended = [rank for rank in own if states[rank] == RankState.IDLE]
            if ended:
                lines.append(f"{label_ranks(ended)} {'has' if len(ended) == 1 else 'have'} ended cell {number}")
            if dead:
                lines.append(f"{label_ranks(dead)} died in cell {number}")
        left = [rank for rank in cells if states[rank] == RankState.RUNNING]
        return [*lines, *([not_back(left, self._launch.stuck_remedy(left))] if left else [])]

    def send(
        self,
        code: str,
        ranks: tuple[int, ...],
        *,
        values: bool,
        listener: Listener | None,
        origin: Origin,
        stop_at_error: bool = False,
    ) -> CellRun:
        """Send a cell to its ranks."""
        with self._lock:
            self.check_free(ranks)
            self.count += 1
            run = self._open(self.count, ranks, listener)
            run.runs_program = origin.runs_program
            for event in self._late:
                run.put(event)
            self._late.clear()
            options = {
                "cell": self.count,
                "value": values,
                "execution_count": origin.execution_count or self.count,
                "is_cell": origin.is_cell,
                "pdb": stop_at_error,
            }
            content = {
                "code": code,
                "silent": False,
                "store_history": True,
                "allow_stdin": False,
                "stop_on_error": False,
            }
            link = self._launch.open_link
            packed = link.session.pack(content)
            messages = {rank: link.make("execute_request", packed, {OPTIONS: options}) for rank in ranks}
            self._log_cell(run, options["execution_count"], messages)
            self._launch.steps.sent(ranks)
            if origin.is_cell:
                entry = CellEntry(
                    number=run.number,
                    execution_count=options["execution_count"],
                    cell_id=origin.cell_id,
                    code=code,
                    ranks=ranks,
                )
                self._launch.journal.add(entry)
            elif origin.magic:
                self._launch.journal.add(MagicEntry(magic=origin.magic))
            for rank, message in messages.items():
                entry_of_rank = self._launch.table[rank]
                on_reply = self._begin(run, entry_of_rank, message["header"]["msg_id"], options["execution_count"])
                link.post(entry_of_rank.engine, message, on_reply=on_reply)
        return run

    def _log_cell(self, run: CellRun, execution_count: int, messages: Mapping[int, Message]) -> None:
        """Add the cell to the cell log before it is sent, so that a later notebook finds it in any case."""
        requests = {rank: message["header"]["msg_id"] for rank, message in messages.items()}
        cell = {
            "number": run.number,
            "started_s": run.started_s,
            "execution_count": execution_count,
            "requests": requests,
        }
        self._try_cell_log(lambda: self.cell_log.add(cell))

    def _try_cell_log(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._supervisor.note(f"%dist_attach could not resume this cell: {error}")

    def _open(self, number: int, ranks: tuple[int, ...], listener: Listener | None) -> CellRun:
        hosts = {entry.info.rank: entry.info.host for entry in self._launch.table}
        to_ranks = _ToRanks(self._launch, self._interrupt, self._cell_of)
        stuck_remedy = self._launch.stuck_remedy
        run = CellRun(number, ranks, hosts, to_ranks, self._supervisor, listener, stuck_remedy, self._on_done)
        to_ranks.run = run
        return run

    def _cell_of(self, rank: int) -> tuple[CellRun, int] | None:
        return self._cells.get(self._launch.table[rank].request)

    def adopt(self, cell: Message) -> CellRun:
        """Take over a cell that an earlier notebook sent, from that notebook's cell log."""
        requests = {int(rank): msg_id for rank, msg_id in cell["requests"].items()}
        with self._lock:
            run = self._open(cell["number"], tuple(sorted(requests)), None)
            run.started_s = cell["started_s"]
            self.count = max(self.count, run.number)
            self._launch.steps.sent(requests)
            for rank, msg_id in requests.items():
                on_reply = self._begin(run, self._launch.table[rank], msg_id, cell["execution_count"])
                self._launch.open_link.expect(msg_id, on_reply)
        return run

    def _begin(self, run: CellRun, entry: RankEntry, request: str, execution_count: int) -> Callable[[Message], None]:
        """Record that a rank runs a cell; return the handler of its reply."""
        rank = entry.info.rank
        entry.state, entry.cell, entry.request = RankState.RUNNING, execution_count, request
        self._cells[request] = (run, rank)
        self._supervisor.on_sent(rank, run.number, program=run.runs_program)

        def on_reply(message: Message) -> None:
            options = message["metadata"].get(OPTIONS, {})
            content, buffers = with_value(self._launch.folders.shelf_name, message["content"], message["buffers"])
            quiet = options.get("quiet", True)
            event = Replied(rank=rank, time_s=time.time(), content=content, buffers=buffers, quiet=quiet)
            entry.group = options.get("group", entry.group)
            entry.failure = "" if content["status"] == "ok" else f"{content['ename']}: {content['evalue']}"
            if entry.state == RankState.RUNNING:
                entry.state = RankState.IDLE
            self._telemetry.end_cell(rank)  # what the rank reported last is not shown as the next cell's
            self._supervisor.on_reply(entry, content)
            run.put(event)  # after the supervisor: the wait for the cell then checks whether the session settled

        return on_reply

    def take(self, entry: RankEntry, message: Message, event: Event) -> None:
        """Pass an event of a rank to its cell; called on the link's thread."""
        if isinstance(event, Died):
            self._on_death(entry, event)
            return
        run, _ = self._cells.get(message["parent_header"].get("msg_id", ""), (None, entry.info.rank))
        with self._lock:
            if run is not None and run.put(event):
                return
            if isinstance(event, OutputEnded):
                return  # no thread waits for its cell any more
            listener = self._ended.get(message["parent_header"].get("msg_id", "")) if run is None else run.listener
            following = event if listener is None else listener.on_late(event)
            if following is None:
                return
            # If its own output area was removed, it is shown in the cell that was sent last, or in the next one.
            last = next((run for run, _ in reversed(list(self._cells.values())) if run.number == self.count), None)
            if not (last is not None and last.put(following)) and len(self._late) < LATE_LIMIT:
                self._late.append(following)

    def _on_death(self, entry: RankEntry, event: Died) -> None:
        with self._lock:  # a cell that is being sent must get the event too
            entry.state, entry.failure = RankState.DEAD, event.record.cause
            # Before the cells: the wait for a cell then checks whether the session has settled.
            self._supervisor.on_death(entry, event.record)
            runs = [run for run, rank in list(self._cells.values()) if rank == entry.info.rank]
            for run in runs:
                run.put(event)
            if not runs and event.record.host_silent_s:
                self._supervisor.note(f"rank {entry.info.rank} was {event.record.cause}")  # shown with the next cell
        entry.pid_gone.set()

    def _on_done(self, run: CellRun) -> None:
        """Record that a cell has ended on every rank; note ranks that ended it late."""
        # Ranks that ended the cell after the wait for them was given up.
        back = sorted(rank for rank in run.given_up if self._launch.table[rank].state != RankState.DEAD)
        run.given_up = set()
        if back:
            has, their = ("has", "its") if len(back) == 1 else ("have", "their")
            number = self._launch.table[back[0]].cell
            self._supervisor.note(f"{label_ranks(back)} {has} ended cell {number} and kept {their} variables")
        self._launch.journal.ended(run.number, {failure.ename for failure in run.state.failures.values()})
        self._try_cell_log(lambda: self.cell_log.remove(run.number))

    def abandon(self, reason: str) -> None:
        """End the wait for every cell with a :class:`ClusterClosedError`: the ranks can't be reached any more."""
        with self._lock:
            for run, _ in list(self._cells.values()):
                run.abandon(reason)
            self._cells.clear()
