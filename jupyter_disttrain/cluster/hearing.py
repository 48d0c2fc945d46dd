"""What arrives at a cluster from its ranks and their nannies.

Covers: handing output to cells, figures to telemetry, what others ask for to who does it; the controller's end.
Does not cover: replies (``cells``), the sockets (``link``).

All of it is called on the link's thread.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from typing import TYPE_CHECKING

from ..messages import NANNY_REQUEST, Asked, Heard, RankDeath, Used
from .inbox import event_from
from .link import FIGURES
from .overview import Overview

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .cells import Cells
    from .link import Message
    from .rank_table import RankEntry


class Hearing(Overview):
    """The part of a cluster that listens."""

    _cells: Cells | None
    _last_asked = ""  # the token of a wish
    _places: dict[str, int]  # in the table, by engine

    @abstractmethod
    def interrupt(self, ranks: Iterable[int] | None = None, *, forced: bool = False) -> None:
        """Interrupt ranks that run a cell."""

    @abstractmethod
    def reset(self) -> None:
        """Start all ranks anew."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the cluster."""

    @abstractmethod
    def _drop(self, because: str) -> None:
        """Close the cluster and leave its ranks to themselves."""

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
        """Pass it on, unless the rank's job has ended: that ends the cluster, and is all that there is to say."""
        entry.has_ended = True

        def pass_on() -> None:
            # It is told at every look until it is taken, and by then a copy may find a new process in the rank's place.
            if self._launch.table[entry.info.rank] is not entry or entry.state == "dead":
                return
            self.telemetry.forget(entry.info.rank)
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
        """Return the rank that an engine is; None for one that is no rank any more, or not yet."""
        table = self._launch.table
        at = self._places.get(engine, -1)
        if at < 0 or at >= len(table) or table[at].engine != engine:
            self._places = {entry.engine: at for at, entry in enumerate(table)}  # a rank was replaced
            at = self._places.get(engine, -1)
        return table[at] if at >= 0 else None

    def _on_asked(self, asked: Asked, entry: RankEntry) -> None:
        """Do what somebody asks for in the side panel; the notebook may be busy or not."""
        if time.monotonic() > asked.until_s or asked.token == self._last_asked:
            return  # it was stopped meanwhile, and who asked was told so
        self._last_asked = asked.token
        heard = Heard(token=asked.token)
        request = {"do": "publish", "msg_type": heard.msg_type, "content": heard.to_content()}
        self._launch.open_link.request(entry.nanny, NANNY_REQUEST, request)
        if asked.what == "stop":
            self._end_because("was ended from the side panel")
        else:
            does = self.reset if asked.what == "reset" else self.interrupt
            threading.Thread(target=does, name=f"disttrain {asked.what}", daemon=True).start()

    def _on_job_notice(self, words: str) -> None:
        """Tell what should be known of the job: in a cell that runs, in the status, and with the next cell."""
        self.telemetry.remarks.job = words
        self._guardian.note(words)

    def _on_job_over(self, words: str) -> None:
        """End with the job, unless that has ended for want of a controller.

        Where the ranks are only just being told who they are, that fails by itself.
        """
        if self._launch.lost_because:
            return
        self._end_because(f"has lost its nodes: {words}")

    def _on_lost(self) -> None:
        """Take note that the controller is gone, and nobody can be reached any more."""
        if self._cells is None:
            return  # it is just being joined, and that fails now
        why = self._launch.lost_because
        for entry in self.table:
            entry.state = "dead"
        self._guardian.close()
        limit = self.config.idle_timeout_s
        if self._launch.is_being_stopped:
            self._end_because("was ended by jupyter disttrain stop")
        elif limit and self.idle_s >= limit:
            self._end_because(f"was ended, because nobody had used it for {limit:g} s")
        elif self.config.job:
            self._leave_because(why)
        else:
            self._cells.abandon(why)

    def _leave_because(self, reason: str) -> None:
        """Close the cluster here; what is left of it there is not ended."""
        self._abandon(reason)
        because = f"is out of reach: {reason}"
        threading.Thread(target=self._drop, args=(because,), name="disttrain leave").start()  # which joins this thread

    def _end_because(self, reason: str) -> None:
        self._launch.closed_because = reason
        self._abandon(f"the cluster {self.name!r} {reason}; start one with %dist_init")
        threading.Thread(target=self.shutdown, name="disttrain end").start()  # which joins this thread

    def _abandon(self, reason: str) -> None:
        if self._cells is not None:
            self._cells.abandon(reason)
