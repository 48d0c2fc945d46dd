"""Handle the messages that ranks and their nannies publish.

Covers: passing output to cells, vitals and metrics to telemetry; requests from the side panel, the loss of the
controller, the end of a Slurm job.
Does not cover: replies (``client.cells.executor``), the sockets (``link``).

Messages are handled on the link's thread; notices on a Slurm job arrive on the thread of ``client.startup.job_watch``.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from typing import TYPE_CHECKING

from ...protocol.messages import Acknowledged, Asked, RankDeath, Used
from ...protocol.requests import Publish
from ...protocol.states import RankState
from ..cells.message_events import event_from
from ..properties import Overview
from .link import FIGURES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..cells.executor import Cells
    from ..startup.rank_table import RankEntry
    from .link import Message


class Hearing(Overview):
    """The part of a cluster that handles published messages."""

    _cells: Cells | None
    _last_asked = ""  # token of the last request from the side panel
    _places: dict[str, int]  # index in the table, by engine

    @abstractmethod
    def interrupt(self, ranks: Iterable[int] | None = None, *, forced: bool = False) -> None:
        """Interrupt ranks that run a cell."""

    @abstractmethod
    def reset(self) -> None:
        """End all ranks and start as many new ones."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the cluster."""

    @abstractmethod
    def _drop(self, because: str) -> None:
        """Close the cluster and leave its ranks running."""

    def _on_message(self, channel: str, message: Message) -> None:
        if channel not in ("iopub", FIGURES):
            return
        entry = self._entry_of(message["metadata"].get("engine", ""))
        if entry is None:
            return
        rank = entry.info.rank
        msg_type = message["header"]["msg_type"]
        if channel == FIGURES:
            self.telemetry.take(rank, msg_type, message["content"])
            return
        if msg_type == Used.msg_type:
            self._last_use = time.monotonic()
            return
        if msg_type == Asked.msg_type:
            self._on_asked(Asked.from_content(message["content"]), entry)
            return
        if msg_type == RankDeath.msg_type:
            self._on_rank_death(entry, message)
            return
        self._take(entry, message)

    def _on_rank_death(self, entry: RankEntry, message: Message) -> None:
        """Pass a death on, unless the rank's job has ended: that ends the cluster and explains the death."""
        entry.has_ended = True

        def pass_on() -> None:
            # A death is reported at every check until it is handled; a later copy may find the rank replaced.
            if self._launch.table[entry.info.rank] is not entry or entry.state == RankState.DEAD:
                return
            self.telemetry.end_rank(entry.info.rank, expected=bool(message["content"]["expected"]))
            self._take(entry, message)

        if self._job_watch is None:
            pass_on()
        else:
            self._job_watch.if_it_runs(pass_on)

    def _take(self, entry: RankEntry, message: Message) -> None:
        event = event_from(entry.info.rank, message)
        if event is not None and self._cells is not None:
            self._cells.take(entry, message, event)

    def _entry_of(self, engine: str) -> RankEntry | None:
        """Return the rank of an engine; None if it is not a rank any more, or not yet."""
        table = self._launch.table
        at = self._places.get(engine, -1)
        if at < 0 or at >= len(table) or table[at].engine != engine:
            self._places = {entry.engine: at for at, entry in enumerate(table)}  # outdated if a rank was replaced
            at = self._places.get(engine, -1)
        return table[at] if at >= 0 else None

    def _on_asked(self, asked: Asked, entry: RankEntry) -> None:
        """Carry out a request from the side panel, whether the notebook is busy or not."""
        if time.monotonic() > asked.until_s or asked.token == self._last_asked:
            return  # expired, e.g. while this process was stopped, and reported as failed; or a repetition
        self._last_asked = asked.token
        acknowledged = Acknowledged(token=asked.token)
        request = Publish(record_type=acknowledged.msg_type, content=acknowledged.to_content())
        self._launch.open_link.request(entry.nanny, request)
        if asked.what == "stop":
            self._end_because("was ended from the side panel")
        else:
            does = self.reset if asked.what == "reset" else self.interrupt
            threading.Thread(target=does, name=f"disttrain {asked.what}", daemon=True).start()

    def _on_job_notice(self, words: str) -> None:
        """Report a notice on the job: in the running cell, in the status, and with the next cell."""
        self.telemetry.remarks.job = words
        self._guardian.note(words)

    def _on_job_over(self, words: str) -> None:
        """End the cluster with its job, unless the job ended because the controller was lost.

        If the job ends while the ranks are being identified, the start fails by itself.
        """
        if self._launch.lost_because:
            return
        self._end_because(f"has lost its nodes: {words}")

    def _on_lost(self) -> None:
        """Handle the loss of the controller: the ranks can't be reached any more."""
        if self._cells is None:
            return  # the cluster is being joined, which fails now
        why = self._launch.lost_because
        limit = self.config.idle_timeout_s
        is_stopped, is_unused = self._launch.is_being_stopped, bool(limit) and self.idle_s >= limit
        for entry in self.table:
            self.telemetry.end_rank(entry.info.rank, expected=is_stopped or is_unused)
            entry.state = RankState.DEAD
        self._guardian.close()
        if is_stopped:
            self._end_because("was ended by jupyter disttrain stop")
        elif is_unused:
            self._end_because(f"was ended, because nobody had used it for {limit:g} s")
        elif self.config.job:
            self._leave_because(why)
        else:
            self._cells.abandon(why)

    def _leave_because(self, reason: str) -> None:
        """Close the cluster in this process; do not end what is left of it elsewhere."""
        self._abandon(reason)
        because = f"is out of reach: {reason}"
        threading.Thread(target=self._drop, args=(because,), name="disttrain leave").start()  # it joins this thread

    def _end_because(self, reason: str) -> None:
        self._launch.closed_because = reason
        self._abandon(f"the cluster {self.name!r} {reason}; start one with %dist_init")
        threading.Thread(target=self.shutdown, name="disttrain end").start()  # it joins this thread

    def _abandon(self, reason: str) -> None:
        if self._cells is not None:
            self._cells.abandon(reason)
