"""Hold what a running cluster consists of, and run cells once it has settled.

Covers: configuration, launch, recovery, cells and the watch of the Slurm job, which a reset replaces; running and
interrupting cells; when the ranks were last used.
Does not cover: starting, resetting and ending the ranks (``client.lifecycle``), messages that ranks publish
(``client.session_messages``).
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..config.rank_selection import parse_ranks
from ..errors import ClusterClosedError, UsageError
from ..features.debugger.client import Debugger
from ..features.telemetry.client import Telemetry
from ..protocol.requests import Interrupt
from ..protocol.states import RankState
from ..protocol.time_limits import CLUSTER_NANNY_SECONDS, CLUSTER_SETTLE_SECONDS, SETTLE_CHECK_SECONDS
from ..sigint import held_interrupts
from .cells.cell_run import check_timeout
from .cells.history import Origin
from .cells.session_group import restore_group

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future

    from ..config.cluster import ClusterConfig
    from .cells.cell_run import CellRun, Listener
    from .cells.executor import Cells
    from .recovery.supervisor import Supervisor
    from .startup.job_watch import JobWatch
    from .startup.launch import Launch
    from .startup.rank_table import RankEntry
    from .transport.link import Message

CHANGEABLE = frozenset({"grace_s", "hang_after_s", "on_rank_death"})  # fields of the configuration of running ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReport:
    """How the ranks were started, or attached to."""

    started_s: float  # when the ranks were started, in seconds since the epoch
    seconds: float  # how long this process took to start them, or to attach to them
    network: str  # the network of their hosts, as text; empty where all are on the notebook's machine
    notes: tuple[str, ...]  # e.g. why ranks use the CPU although there is an accelerator
    is_first: bool  # whether they are those of a job that no notebook had attached to before


class Session:
    """The state of one cluster, which its collaborators share."""

    launch: Launch  # set before the ranks are started
    supervisor: Supervisor  # set once they are watched

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.telemetry = Telemetry(config.sample_s, self._note)
        self.debugger = Debugger(lambda: self.launch)
        self.cells: Cells | None = None  # None until the ranks are ready
        self.job_watch: JobWatch | None = None  # present if the ranks run in a Slurm job
        self.restarting = threading.RLock()  # held while ranks are started or ended
        self.is_closed = False
        self.start_seconds = 0.0
        self.is_first = False  # see ``StartReport``
        self.missed: list[CellRun] = []  # cells that had not ended when an earlier notebook left
        self._last_use = time.monotonic()
        self._interrupts: list[tuple[RankEntry, Future[Message]]] = []  # those that nannies may not have passed on yet

    def _note(self, text: str) -> None:
        self.supervisor.note(text)

    # Cells

    @property
    def open_cells(self) -> Cells:
        """The cells of the started cluster."""
        assert self.cells is not None  # set when the cluster was started
        return self.cells

    def abandon_cells(self, reason: str) -> None:
        """End the wait for every cell with an error: the ranks can't be reached any more."""
        if self.cells is not None:
            self.cells.abandon(reason)

    def settle(self) -> None:
        """Wait until the session has recovered from earlier failures and interrupts.

        Raises a ClusterClosedError if the cluster has ended.
        """
        self.supervisor.wait_until_settled(CLUSTER_SETTLE_SECONDS)
        with self.restarting:  # a rank's death may have started a reset or a shutdown
            self.launch.check_open()
        self.supervisor.wait_until_settled(CLUSTER_SETTLE_SECONDS)

    def ready(self, ranks: str | int | Iterable[int]) -> tuple[Launch, tuple[int, ...]]:
        """Wait until ranks accept requests; return the launch and the ranks.

        Raises a UsageError if a rank does not exist, has died, or still runs a cell, and a ClusterClosedError if the
        cluster has ended.
        """
        self.settle()
        chosen = parse_ranks(ranks, len(self.launch.table))
        self.open_cells.check_free(chosen)
        self.mark_used()
        return self.launch, chosen

    def run(
        self,
        code: str,
        ranks: str | int | Iterable[int] = "all",
        *,
        timeout_s: float | None = None,
        values: bool = True,
        block: bool = True,
        listener: Listener | None = None,
        origin: Origin | None = None,
        stop_at_error: bool = False,
    ) -> CellRun:
        """Run code on ranks as an IPython cell; see :meth:`jupyter_disttrain.Cluster.run`."""
        if not isinstance(code, str):
            raise UsageError(f"the code of a cell is a string, not of type {type(code).__name__}")
        if timeout_s is not None:
            check_timeout(timeout_s)
        self.settle()
        launch = self.launch
        chosen = parse_ranks(ranks, len(launch.table))
        # An interrupt that a nanny delivers late would hit this cell.
        wait([future for entry, future in self._interrupts if entry.state != RankState.DEAD], CLUSTER_NANNY_SECONDS)
        self._interrupts.clear()
        self.mark_used()
        self.debugger.prepare()
        with held_interrupts() as held:
            restore_group(launch, chosen, self.supervisor.form)
            while not self.restarting.acquire(timeout=SETTLE_CHECK_SECONDS):  # the ranks are being ended
                if held.waiting:
                    raise KeyboardInterrupt
            try:  # under the lock, or ranks could be ended between the check and the sending
                self.launch.check_open()
                if self.launch is not launch:
                    raise ClusterClosedError(
                        f"the cluster {self.config.name!r} was reset before the cell ran; run it again"
                    )
                run = self.open_cells.send(
                    code,
                    chosen,
                    values=values,
                    listener=listener,
                    origin=origin or Origin(),
                    stop_at_error=stop_at_error,
                )
            finally:
                self.restarting.release()
            if timeout_s is not None:
                run.limit(timeout_s)
            return run.wait() if block else run

    def interrupt(self, ranks: Iterable[int] | None = None, *, forced: bool = False) -> None:
        """Interrupt ranks that run a cell, through their nannies; see :meth:`jupyter_disttrain.Cluster.interrupt`."""
        chosen = None if ranks is None else set(ranks)
        running = [entry for entry in self.launch.table if entry.state == RankState.RUNNING]
        cells = [(entry, entry.request) for entry in running if chosen is None or entry.info.rank in chosen]
        if not forced:
            self.supervisor.stacks.note_waits({entry.info.rank for entry in running})
        with self.supervisor.changing() as state:
            state.on_interrupt(time.monotonic(), forced=forced, ranks=chosen)
        for entry, cell in cells:
            if entry.state == RankState.RUNNING and entry.request == cell:  # it may have ended meanwhile
                self._interrupts.append((entry, self.launch.open_link.request(entry.nanny, Interrupt(cell=cell))))

    def interrupt_and_wait(self, ranks: str | int | Iterable[int]) -> list[str]:
        """Interrupt ranks that run a cell, and wait some seconds until they have ended it; return messages on that."""
        chosen = parse_ranks(ranks, len(self.launch.table))
        text = self.open_cells.interrupt_and_wait(chosen)
        self.supervisor.wait_until_settled(CLUSTER_SETTLE_SECONDS)
        return [*text, *self.supervisor.take_notes()]

    # State

    def check_not_closed(self) -> None:
        """Raise a ClusterClosedError with the reason if the cluster was shut down or left; hold ``restarting``."""
        if self.is_closed:
            raise self.launch.state.closed_error()

    def change(self, **rules: float | str) -> None:
        """Change fields of the configuration while ranks run; see :meth:`jupyter_disttrain.Cluster.change`."""
        self.launch.check_open()
        settled = rules.keys() - CHANGEABLE
        if settled:
            raise UsageError(f"{', '.join(sorted(settled))} can't be changed while ranks run; start another cluster")
        self.config = self.launch.state.config = replace(self.config, **rules)  # type: ignore[arg-type]  # see above
        self.launch.write()
        with self.supervisor.changing() as state:
            state.change(self.config)

    def mark_used(self) -> None:
        """Record that the ranks are used now."""
        self._last_use = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since a rank was last used, as far as this process observed."""
        busy = any(entry.state == RankState.RUNNING for entry in self.launch.table)
        return 0.0 if busy else time.monotonic() - self._last_use

    @property
    def start_report(self) -> StartReport:
        """How the ranks were started, or attached to."""
        return StartReport(
            started_s=self.launch.state.started_s,
            seconds=self.start_seconds,
            network=self.launch.state.placement.description,
            notes=self.launch.state.notes_of_start,
            is_first=self.is_first,
        )
