"""Ask other hosts for signs of life, and tell of those that give none.

Covers: doing what ``host_watch`` decides, on the link's thread.
Does not cover: ranks of the notebook's own host, whose processes can be seen (``arrivals.untold_deaths``).
"""

from __future__ import annotations

import functools
import signal
import time
from typing import TYPE_CHECKING, Any

from ..messages import NANNY_REQUEST, RankDeath
from .host_watch import HostWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from .link import Link, Message
    from .rank_table import RankEntry


class Reach:
    """The signs of life of one cluster's hosts.

    Parameters
    ----------
    on_death
        Called with the death of each rank that nobody else can tell of.
    note
        Called with what a person should know.
    on_cut
        Called with the seconds since the last answer, when no host answers at all; None: that is the loss of all.
    """

    def __init__(
        self,
        on_death: Callable[[RankDeath], None],
        note: Callable[[str], None],
        on_cut: Callable[[float], None] | None = None,
    ) -> None:
        self._on_death = on_death
        self._on_cut = on_cut
        self._note = note
        self._watch = HostWatch()
        self._buried: dict[str, list[str]] = {}  # by host that was lost: the nannies of its ranks

    @property
    def lost_hosts(self) -> list[str]:
        """The hosts that count as lost."""
        return list(self._buried)

    def forget_lost(self) -> None:
        """Take no host for lost: one may have been started anew, and then has nothing left that could answer."""
        for name in list(self._buried):
            self._buried.pop(name)
            self._watch.forget(name)

    def is_lost(self, host: str) -> bool:
        """Whether a host counts as lost."""
        return host in self._buried

    def turn(self, link: Link, table: Sequence[RankEntry]) -> None:
        """Ask, and tell what follows from the answers so far."""
        now = time.monotonic()
        alive = [entry for entry in table if entry.probe and entry.state != "dead"]
        by_host: dict[str, list[RankEntry]] = {}
        for entry in alive:
            by_host.setdefault(entry.launch_host or entry.info.host, []).append(entry)
        lost = self._watch.take_lost(now)
        if lost and self._on_cut is not None and self._watch.all_silent(now):
            self._on_cut(max(lost.values()))
            return
        for name, silent_s in lost.items():
            self._bury(name, by_host.get(name, []), silent_s)
        for name, silent_s in self._watch.take_returned().items():
            self._note(f"{name} did not answer for {silent_s:.1f} s and is there again; nothing was lost")
        self._watch.know({name: [entry.probe for entry in entries] for name, entries in by_host.items()})
        nannies = {
            entry.probe: [each.nanny_pid for each in entries] for entries in by_host.values() for entry in entries
        }
        for probe in self._watch.questions(now):
            asked = link.request(probe, NANNY_REQUEST, {"do": "ping", "nannies": nannies.get(probe, [])})
            asked.add_done_callback(functools.partial(self._on_answer, link, table, probe))

    def _on_answer(self, link: Link, table: Sequence[RankEntry], probe: str, done: Future[Message]) -> None:
        if done.exception() is not None:
            return  # the cluster was closed
        content: dict[str, Any] = done.result()["content"]
        returned = self._watch.on_answer(probe, time.monotonic())
        if returned:
            self._end_buried(link, returned)
            return
        there = {entry.info.host for entry in table if entry.probe == probe}
        gone = content.get("gone", ())
        for entry in table:
            if entry.info.host in there and entry.nanny_pid in gone and entry.state != "dead":
                self._on_death(_death(entry, signal_number=signal.SIGKILL))

    def _bury(self, name: str, entries: Sequence[RankEntry], silent_s: float) -> None:
        """Take the ranks of a host for dead: whatever they do there, nobody hears of it."""
        self._buried[name] = [entry.nanny for entry in entries]
        for entry in entries:
            self._on_death(_death(entry, host_silent_s=silent_s))

    def _end_buried(self, link: Link, name: str) -> None:
        """End the ranks of a host that came back too late: others have taken their place."""
        for nanny in self._buried.pop(name, []):
            link.request(nanny, NANNY_REQUEST, {"do": "end"})
        self._watch.forget(name)
        self._note(f"{name} is there again; the processes that it still had of this cluster were ended")


def _death(entry: RankEntry, *, signal_number: int | None = None, host_silent_s: float = 0.0) -> RankDeath:
    return RankDeath(
        engine=entry.engine,
        pid=entry.info.pid,
        host=entry.info.host,
        exit_code=None,
        signal_number=signal_number,
        crash="",
        stderr_tail="",
        expected=False,
        host_silent_s=host_silent_s,
    )
