"""Ask other hosts for signs of life, and tell of those that give none.

Covers: doing what ``host_watch`` decides, on the link's thread.
Does not cover: ranks of the notebook's own host, whose processes can be seen (``arrivals.untold_deaths``).
"""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from ..messages import NANNY_REQUEST, RankDeath
from .arrivals import is_here
from .host_watch import LOST_SECONDS, HostWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from .link import Link, Message
    from .rank_table import RankEntry

# For a nanny that is gone: what it said last waits for TCP after a cut, which its neighbour's answer does not.
GONE_SECONDS = 3.5
FORGET_SECONDS = 2 * LOST_SECONDS  # after which nobody waits for an answer: a lost host never gives one


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
        self._asked: deque[tuple[float, Future[Message]]] = deque()
        self._gone_since: dict[str, float] = {}  # by engine: when its nanny was first found gone
        self._lock = threading.Lock()  # a person's reset comes from another thread than the link's

    @property
    def lost_hosts(self) -> list[str]:
        """The hosts that count as lost."""
        return list(self._buried)

    def forget_lost(self, link: Link) -> None:
        """Take no host for lost: one may have been started anew, and then has nothing left that could answer.

        What is left on one that was only cut off, or stopped, is told to end, and hears of it when it is back.
        """
        with self._lock:
            nannies = [nanny for of_host in self._buried.values() for nanny in of_host]
            for name in self._buried:
                self._watch.forget(name)
            self._buried.clear()
        for nanny in nannies:
            link.request(nanny, NANNY_REQUEST, {"do": "end"})

    def is_lost(self, host: str) -> bool:
        """Whether a host counts as lost."""
        return host in self._buried

    def turn(self, link: Link, table: Sequence[RankEntry]) -> None:
        """Ask, and tell what follows from the answers so far."""
        now = time.monotonic()
        by_host: dict[str, list[RankEntry]] = {}
        for entry in table:
            if entry.probe and not _is_over(entry):
                by_host.setdefault(_host(entry), []).append(entry)
        with self._lock:
            lost = self._watch.take_lost(now)
            is_alone = bool(lost) and len(by_host) > 1 and self._watch.all_silent(now)
            is_cut = bool(lost) and self._on_cut is not None and self._watch.all_silent(now)
            if not is_cut:
                self._buried |= {name: [entry.nanny for entry in by_host.get(name, [])] for name in lost}
            returned = self._watch.take_returned()
            self._watch.know({name: [entry.probe for entry in entries] for name, entries in by_host.items()})
            probes = self._watch.questions(now)
        if is_cut and self._on_cut is not None:
            self._on_cut(max(lost.values()))
            return
        if lost and is_alone:
            self._note(
                "no host answers any more: it may be this machine that is cut off from the network, or its controller "
                "that was stopped"
            )
        for name, silent_s in lost.items():
            for entry in by_host.get(name, []):  # whatever they do there, nobody hears of it
                self._on_death(_death(entry, host_silent_s=silent_s))
        for name, silent_s in returned.items():
            self._note(f"{name} did not answer for {silent_s:.1f} s and is there again; nothing was lost")
        self._ask(link, table, probes, by_host)

    def _ask(
        self, link: Link, table: Sequence[RankEntry], probes: Sequence[str], by_host: dict[str, list[RankEntry]]
    ) -> None:
        now = time.monotonic()
        while self._asked and now - self._asked[0][0] > FORGET_SECONDS:
            self._asked.popleft()[1].cancel()
        nannies = {
            entry.probe: [each.nanny_pid for each in entries] for entries in by_host.values() for entry in entries
        }
        for probe in probes:
            asked = link.request(probe, NANNY_REQUEST, {"do": "ping", "nannies": nannies.get(probe, [])})
            asked.add_done_callback(functools.partial(self._on_answer, link, table, probe))
            self._asked.append((now, asked))

    def _on_answer(self, link: Link, table: Sequence[RankEntry], probe: str, done: Future[Message]) -> None:
        if done.cancelled() or done.exception() is not None:
            return  # it came too late, or the cluster was closed
        now = time.monotonic()
        with self._lock:
            returned = self._watch.on_answer(probe, now)
        if returned:
            self._end_buried(link, returned)
            return
        content: dict[str, Any] = done.result()["content"]
        gone = content.get("gone", ())
        there = {_host(entry) for entry in table if entry.probe == probe}
        for entry in table:
            if _host(entry) not in there or _is_over(entry) or is_here(entry):
                continue
            if entry.nanny_pid not in gone:
                self._gone_since.pop(entry.engine, None)
            elif now - self._gone_since.setdefault(entry.engine, now) >= GONE_SECONDS:
                del self._gone_since[entry.engine]
                self._on_death(_death(entry, signal_number=signal.SIGKILL))

    def _end_buried(self, link: Link, name: str) -> None:
        """End the ranks of a host that came back too late: others have taken their place."""
        with self._lock:
            nannies = self._buried.pop(name, [])
            self._watch.forget(name)
        for nanny in nannies:
            link.request(nanny, NANNY_REQUEST, {"do": "end"})
        self._note(f"{name} is there again; the processes that it still had of this cluster were ended")


def _host(entry: RankEntry) -> str:
    return entry.launch_host or entry.info.host


def _is_over(entry: RankEntry) -> bool:
    """Whether its nanny has ended as well, so that its silence says nothing of the host."""
    return entry.has_ended or entry.state == "dead"


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
