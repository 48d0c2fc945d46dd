"""Detect hosts that stopped responding.

Covers: heartbeat requests to a nanny of each host, the decision that a host is lost, a host that replies again.
Does not cover: sending the requests (``client.recovery.heartbeat``), what follows from a rank's death
(``client.recovery.state_machine``), the rank's own view (``rank.nanny.controller_watch``).

:class:`HostWatch` is a state machine without I/O. It counts turns as well as seconds: a notebook that was stopped for
a while must not mistake its own pause for silence of all hosts.

A TCP connection survives a network that is cut for some seconds: messages sent during the cut arrive later. So a host
counts as lost only after ``LOST_SECONDS``, and a shorter cut loses no output of its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...protocol.time_limits import ASK_SECONDS, HOST_WATCH_LATE_SECONDS, HOST_WATCH_SILENT_SECONDS, LOST_SECONDS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

LOST_TURNS = 10  # turns without a reply before a host counts as lost, in addition to LOST_SECONDS


@dataclass(slots=True)
class Host:
    """One host and the probes (ping sockets) of its nannies."""

    probes: set[str]
    next_at: float = 0.0  # time of the next request
    asked_at: float | None = None  # time of the first request since the last reply
    turns: int = 0  # turns since ``asked_at``
    lost: bool = False
    returned_after_s: float = 0.0  # seconds without a reply before it replied again; 0: nothing to report


@dataclass(slots=True)
class HostWatch:
    """The hosts of a cluster, and which of them respond."""

    hosts: dict[str, Host] = field(default_factory=dict)

    def know(self, probes: Mapping[str, Collection[str]]) -> None:
        """Set the probes of living ranks, by host; keep a lost host until :meth:`forget`."""
        for name, of_host in probes.items():
            host = self.hosts.setdefault(name, Host(probes=set(of_host)))
            if not host.lost:
                host.probes = set(of_host)
        for name in [name for name, host in self.hosts.items() if name not in probes and not host.lost]:
            del self.hosts[name]

    def questions(self, now: float) -> list[str]:
        """Return the probes to send a request to now: one of each host, but all of a host that owes a reply."""
        asked: list[str] = []
        for host in self.hosts.values():
            is_silent = host.asked_at is not None
            if host.asked_at is None:
                if now < host.next_at:
                    continue
                host.asked_at, host.turns, host.next_at = now, 0, now + ASK_SECONDS
            host.turns += 1
            probes = sorted(host.probes)
            asked += probes if is_silent else probes[:1]
        return asked

    def on_answer(self, probe: str, now: float) -> str:
        """Record a reply; return the host's name if it was lost and responds again, else an empty string."""
        for name, host in self.hosts.items():
            if probe not in host.probes:
                continue
            silent_s = 0.0 if host.asked_at is None else now - host.asked_at
            host.asked_at, host.turns = None, 0
            if host.lost:
                return name
            if silent_s >= HOST_WATCH_SILENT_SECONDS:
                host.returned_after_s = silent_s
        return ""

    def take_lost(self, now: float) -> dict[str, float]:
        """Return the hosts newly counted as lost, with the seconds since the first request without a reply."""
        found = {}
        for name, host in self.hosts.items():
            if host.lost or host.asked_at is None or host.turns < LOST_TURNS or now - host.asked_at < LOST_SECONDS:
                continue
            host.lost = True
            found[name] = now - host.asked_at
        return found

    def all_silent(self, now: float) -> bool:
        """Whether no host has replied for about as long as it takes to count as lost."""
        asked = [host.asked_at for host in self.hosts.values()]
        return all(at is not None and now - at >= LOST_SECONDS - HOST_WATCH_LATE_SECONDS for at in asked)

    def take_returned(self) -> dict[str, float]:
        """Return the hosts that respond again, with the seconds for which they did not."""
        found = {name: host.returned_after_s for name, host in self.hosts.items() if host.returned_after_s}
        for name in found:
            self.hosts[name].returned_after_s = 0.0
        return found

    def forget(self, name: str) -> None:
        """Forget a lost host."""
        self.hosts.pop(name, None)
