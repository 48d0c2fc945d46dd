"""Pass what the ranks of a session publish to cells, telemetry and recovery.

Covers: output, vitals and metrics, deaths, requests from the side panel, the loss of the controller.
Does not cover: replies (``client.cells.executor``), messages before the ranks are watched
(``client.transport.dispatch``).

Messages are handled on the threads of ``client.transport.dispatch``; those on deaths in a Slurm job on that of
``client.startup.job_watch``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..protocol.messages import Acknowledged, Asked, DebugMessage, Used
from ..protocol.rank_death import RankDeath
from ..protocol.requests import Publish
from ..protocol.states import RankState
from .cells.events import event_from
from .startup.registration import killed_text
from .transport.link import FIGURES

if TYPE_CHECKING:
    from collections.abc import Callable

    from .session import Session
    from .startup.rank_table import RankEntry
    from .transport.link import Message


class SessionMessages:
    """Handles the published messages of one session, whose ranks are watched.

    ``interrupt`` and ``reset`` are called when the side panel requests it; ``shutdown`` and ``leave`` with the reason,
    to end the cluster, or to close it here and leave its ranks. None of them may wait for the ranks.
    """

    def __init__(
        self,
        session: Session,
        *,
        interrupt: Callable[[], None],
        reset: Callable[[], None],
        shutdown: Callable[[str], None],
        leave: Callable[[str], None],
    ) -> None:
        self._session = session
        self._interrupt, self._reset, self._shutdown, self._leave = interrupt, reset, shutdown, leave
        self._last_asked = ""  # token of the last request from the side panel

    def on_message(self, channel: str, message: Message) -> None:
        """Handle a published message."""
        if channel not in ("iopub", FIGURES):
            return
        entry = self._entry_of(message["metadata"].get("engine", ""))
        if entry is None:
            return
        rank = entry.info.rank
        msg_type = message["header"]["msg_type"]
        if channel == FIGURES:
            self._session.telemetry.take(rank, msg_type, message["content"])
        elif msg_type == Used.msg_type:
            self._session.mark_used()
        elif msg_type == DebugMessage.msg_type:
            self._session.debugger.take(rank, message["content"]["message"])
        elif msg_type == Asked.msg_type:
            self._on_asked(Asked.from_content(message["content"]), entry)
        elif msg_type == RankDeath.msg_type:
            self._on_rank_death(entry, message)
        else:
            self._take(entry, message)

    def on_lost(self) -> None:
        """Handle the loss of the controller: the ranks can't be reached any more."""
        session, launch = self._session, self._session.launch
        limit = session.config.idle_timeout_s
        is_stopped, is_unused = launch.is_being_stopped, bool(limit) and session.idle_s >= limit
        for entry in tuple(launch.table):
            session.telemetry.end_rank(entry.info.rank, expected=is_stopped or is_unused)
            session.debugger.on_end(entry.info.rank)
            entry.state = RankState.DEAD
        session.supervisor.close()
        if is_stopped:
            self._shutdown("was ended by jupyter disttrain stop")
        elif is_unused:
            self._shutdown(f"was ended, because it had not been used for {limit:g} s")
        elif session.config.job:
            self._leave(launch.lost_because)
        else:
            session.abandon_cells(launch.lost_because)

    def _on_rank_death(self, entry: RankEntry, message: Message) -> None:
        """Pass a death on, unless the rank's job has ended: that ends the cluster and explains the death."""
        entry.has_ended = True
        session = self._session
        self._note_killed(entry, RankDeath.from_content(message["content"]).unfinished)

        def pass_on() -> None:
            # A death is reported at every check until it is handled; a later copy may find the rank replaced.
            if session.launch.table[entry.info.rank] is not entry or entry.state == RankState.DEAD:
                return
            session.telemetry.end_rank(entry.info.rank, expected=bool(message["content"]["expected"]))
            session.debugger.on_end(entry.info.rank)
            self._take(entry, message)

        if session.job_watch is None:
            pass_on()
        else:
            session.job_watch.if_it_runs(pass_on)

    def _note_killed(self, entry: RankEntry, unfinished: str) -> None:
        """Keep a message on a rank that was killed because it took too long to exit."""
        if not unfinished:
            return
        text = killed_text(entry.info, unfinished)
        if self._session.launch.link is None:  # the ranks are being ended
            self._session.launch.killed.append(text)
        else:
            self._session.supervisor.note(text)

    def _take(self, entry: RankEntry, message: Message) -> None:
        event = event_from(entry.info.rank, message)
        if event is not None:
            self._session.open_cells.take(entry, message, event)

    def _entry_of(self, engine: str) -> RankEntry | None:
        """Return the rank of an engine; None if it is not a rank any more, or not yet."""
        return next((entry for entry in self._session.launch.table if entry.engine == engine), None)

    def _on_asked(self, asked: Asked, entry: RankEntry) -> None:
        """Carry out a request from the side panel, whether the notebook is busy or not."""
        if time.monotonic() > asked.until_s or asked.token == self._last_asked:
            return  # expired, e.g. while this process was stopped, and reported as failed; or a repetition
        self._last_asked = asked.token
        acknowledged = Acknowledged(token=asked.token)
        request = Publish(record_type=acknowledged.msg_type, content=acknowledged.to_content())
        self._session.launch.open_link.request(entry.nanny, request)
        if asked.what == "stop":
            self._shutdown("was ended from the side panel")
        elif asked.what == "reset":
            self._reset()
        else:
            self._interrupt()
