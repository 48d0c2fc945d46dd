"""Check that other hosts can be reached, and report those that can't.

Covers: carrying out the decisions of ``launchers.hosts.host_watch``, on the link's thread.
Does not cover: ranks on the notebook's own host, whose processes are visible (``registration.unreported_deaths``).
"""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from ...launchers.hosts.host_watch import HostWatch
from ...protocol.rank_death import RankDeath
from ...protocol.requests import End, Ping
from ...protocol.states import RankState
from ...protocol.time_limits import FORGET_SECONDS, GONE_SECONDS, HOST_WATCH_SILENT_SECONDS
from ..startup.registration import is_here

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from ..startup.rank_table import RankEntry
    from ..transport.link import Link, Message

# GONE_SECONDS is the delay before a missing nanny counts as dead: after a network cut its last messages are delayed by
# TCP, whereas its neighbour's answer is not.


class HostHeartbeat:
    """Reachability of one cluster's hosts.

    Parameters
    ----------
    on_death
        Called with the death of each rank that no other process can report.
    note
        Called with notes for the user.
    on_cut
        Called with the seconds since the last reply, once no host replies; None: then all hosts count as lost.
    mpiexec_was_killed
        Returns whether mpiexec was killed. Nannies on other hosts are killed with it, so a missing reply does not show
        that their host is lost.
    """

    def __init__(
        self,
        on_death: Callable[[RankDeath], None],
        note: Callable[[str], None],
        on_cut: Callable[[float], None] | None = None,
        mpiexec_was_killed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._mpiexec_was_killed = mpiexec_was_killed
        self._on_death = on_death
        self._on_cut = on_cut
        self._note = note
        self._watch = HostWatch()
        self._lost_nannies: dict[str, list[str]] = {}  # the nannies of a lost host's ranks, by host
        self._asked: deque[tuple[float, Future[Message]]] = deque()  # pending pings with the time they were sent
        self._gone_since: dict[str, float] = {}  # by engine: when its nanny was first found missing
        self._lock = threading.Lock()  # the user's reset runs on another thread than the link's

    @property
    def lost_hosts(self) -> list[str]:
        """The hosts that count as lost."""
        return list(self._lost_nannies)

    def forget_lost(self, link: Link) -> None:
        """Consider no host lost any more: a rebooted host has no process left that could reply.

        Processes left on a host that was only cut off or stopped are asked to end, and receive that once it is back.
        """
        for name in self.lost_hosts:
            self._end_left(link, name)

    def _end_left(self, link: Link, name: str) -> None:
        """Consider a host lost no more, and end what is left on it: its ranks have been replaced, or will be."""
        with self._lock:
            nannies = self._lost_nannies.pop(name, [])
            self._watch.forget(name)
        for nanny in nannies:
            link.request(nanny, End())

    def turn(self, link: Link, table: Sequence[RankEntry]) -> None:
        """Send pings, and report what follows from the replies so far."""
        now = time.monotonic()
        by_host: dict[str, list[RankEntry]] = {}
        for entry in table:
            if entry.probe and not _is_over(entry):
                by_host.setdefault(_host(entry), []).append(entry)
        with self._lock:
            lost, probes = self._watch.turn(now, {name: [each.probe for each in of] for name, of in by_host.items()})
            ended = list(lost) if lost and self._mpiexec_was_killed() else []
            for name in ended:
                del lost[name]
                self._watch.forget(name)
            all_silent = bool(lost) and self._watch.all_silent(now)
            if not (all_silent and self._on_cut):
                self._lost_nannies |= {name: [entry.nanny for entry in by_host.get(name, [])] for name in lost}
        for entry in (entry for name in ended for entry in by_host.get(name, [])):
            self._on_death(_death(entry, signal_number=signal.SIGKILL))
        if all_silent and self._on_cut is not None:
            self._on_cut(max(lost.values()))
            return
        if all_silent and len(by_host) > 1:
            self._note(
                "no host replies any more; this machine may be disconnected from the network, or the controller on it "
                "stopped"
            )
        for name, silent_s in lost.items():
            for entry in by_host.get(name, []):  # these ranks are unreachable, whatever they do
                self._on_death(_death(entry, host_silent_s=silent_s))
        self._ask(link, table, probes, by_host)

    def _ask(
        self, link: Link, table: Sequence[RankEntry], probes: Sequence[str], by_host: dict[str, list[RankEntry]]
    ) -> None:
        now = time.monotonic()
        while self._asked and now - self._asked[0][0] > FORGET_SECONDS:
            self._asked.popleft()[1].cancel()
        nannies = {
            entry.probe: [(each.nanny_pid, each.nanny_started) for each in entries]
            for entries in by_host.values()
            for entry in entries
        }
        for probe in probes:
            asked = link.request(probe, Ping(nannies=nannies.get(probe, [])))
            asked.add_done_callback(functools.partial(self._on_answer, link, table, probe))
            self._asked.append((now, asked))

    def _on_answer(self, link: Link, table: Sequence[RankEntry], probe: str, done: Future[Message]) -> None:
        if done.cancelled() or done.exception() is not None:
            return  # the answer came too late, or the cluster was closed
        now = time.monotonic()
        with self._lock:
            host, silent_s = self._watch.on_answer(probe, now)
        if host is not None and host.is_lost:
            self._end_left(link, host.name)
            self._note(f"{host.name} replies again; the processes of this cluster that still ran there were ended")
            return
        if host is not None and silent_s >= HOST_WATCH_SILENT_SECONDS:
            self._note(f"{host.name} did not reply for {silent_s:.1f} s and replies again; no rank was lost")
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


def _host(entry: RankEntry) -> str:
    return entry.launch_host or entry.info.host


def _is_over(entry: RankEntry) -> bool:
    """Whether the nanny has ended as well, so that its silence does not mean that the host is lost."""
    return entry.has_ended or entry.state == RankState.DEAD


def _death(entry: RankEntry, **how: Any) -> RankDeath:
    return RankDeath(engine=entry.engine, pid=entry.info.pid, host=entry.info.host, **how)
