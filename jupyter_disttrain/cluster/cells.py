"""The cells of a started cluster.

Covers: sending a cell to its ranks, handing each cell what its ranks say, ranks that can't take one.
Does not cover: the state of one cell (``cell_run``), bringing ranks back (``guardian``).
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ..messages import OPTIONS
from . import variables
from .cell_run import CellRun, Listener
from .events import Died, Replied, Silent
from .rank_table import check_idle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .events import Event
    from .guardian import Guardian
    from .link import Message
    from .rank_table import RankEntry
    from .start import Launch

LATE_LIMIT = 1000  # events kept for the next cell, said by threads that earlier cells left behind


class Cells:
    """What runs on the ranks of one launch."""

    def __init__(self, launch: Launch, guardian: Guardian, count: int) -> None:
        self._launch = launch
        self._guardian = guardian
        self._lock = threading.RLock()
        self._cells: dict[str, tuple[CellRun, int]] = {}  # by the id of the request, with its rank
        self._current: CellRun | None = None
        self._late: list[Event] = []
        self.count = count  # of the cells that were ever sent

    def check_free(self, ranks: Sequence[int]) -> None:
        """Refuse to queue a cell behind one that may never end."""
        with self._lock:
            self._launch.check_open()
            check_idle(self._launch.table, ranks)
            self._cells = {
                msg_id: cell for msg_id, cell in self._cells.items() if not cell[0].done or cell[0] is self._current
            }

    def send(
        self,
        code: str,
        ranks: tuple[int, ...],
        interrupt: Callable[..., None],
        *,
        values: bool,
        listener: Listener | None,
        execution_count: int | None,
        lines_before: int,
    ) -> CellRun:
        """Send a cell to its ranks."""
        with self._lock:
            self.check_free(ranks)
            self.count += 1
            hosts = {entry.info.rank: entry.info.host for entry in self._launch.table}
            run = CellRun(self.count, ranks, hosts, interrupt, self._guardian, listener)
            rest = [] if self._current is None else self._current.take_rest()
            for event in (*rest, *self._late):
                run.put(event)
            self._late.clear()
            self._current = run
            options = {
                "cell": self.count,
                "value": values,
                "execution_count": execution_count or self.count,
                "lines_before": lines_before,
            }
            content = {
                "code": code,
                "silent": False,
                "store_history": True,
                "allow_stdin": False,
                "stop_on_error": False,
            }
            for rank in ranks:
                self._send_to_rank(run, rank, content, options)
        return run

    def _send_to_rank(self, run: CellRun, rank: int, content: Message, options: Message) -> None:
        entry = self._launch.table[rank]
        entry.state, entry.cell = "running", options["execution_count"]
        self._guardian.on_sent(rank)

        def on_reply(message: Message) -> None:
            told = message["metadata"].get(OPTIONS, {})
            content, buffers = variables.with_value(message["content"], message["buffers"])
            quiet = told.get("quiet", True)
            event = Replied(rank=rank, time_s=time.time(), content=content, buffers=buffers, quiet=quiet)
            entry.group = told.get("group", entry.group)
            if entry.state == "running":
                entry.state = "idle"
            failed = content["status"] != "ok"
            # A cell that fails between the end of one group and the making of the next leaves none.
            broken = entry.group == "broken" or (failed and not entry.group)
            self._guardian.on_reply(rank, failed=failed, broken=broken)
            run.put(event)

        msg_id = self._launch.open_link.post(
            entry.engine, "execute_request", content, metadata={OPTIONS: options}, on_reply=on_reply
        )
        entry.request = msg_id
        self._cells[msg_id] = (run, rank)

    def take(self, entry: RankEntry, message: Message, event: Event) -> None:
        """Hand what a rank said to its cell; called on the link's thread."""
        if isinstance(event, Died):
            self._on_death(entry, event)
            return
        run, _ = self._cells.get(message["parent_header"].get("msg_id", ""), (None, entry.info.rank))
        with self._lock:
            if run is not None and not run.ended_s:
                run.put(event)
            elif isinstance(event, Silent):
                return  # of a cell that was given up; the cell that runs now has its own
            elif self._current is not None and not self._current.ended_s:
                self._current.put(event)  # said by a thread that an earlier cell left behind
            elif len(self._late) < LATE_LIMIT:
                self._late.append(event)

    def _on_death(self, entry: RankEntry, event: Died) -> None:
        with self._lock:  # a cell that is being sent at this moment has to learn of it too
            entry.state = "dead"
            for run, rank in list(self._cells.values()):
                if rank == entry.info.rank:
                    run.put(event)
        self._guardian.on_death(entry.info.rank)
        entry.pid_gone.set()

    def abandon(self, reason: str) -> None:
        """Tell every cell that nobody can be reached any more."""
        with self._lock:
            for run, _ in list(self._cells.values()):
                run.abandon(reason)
            self._cells.clear()
