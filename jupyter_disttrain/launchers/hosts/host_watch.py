"""Detect hosts that stopped responding.

Covers: heartbeat requests to a nanny of each host, the decision that a host is lost, a host that replies again.
Does not cover: sending the requests (``client.recovery.host_heartbeats``), what follows from a rank's death
(``client.recovery.state_machine``), the rank's own view (``rank.nanny.controller_watch``).

:class:`HostWatch` is a state machine without I/O. It counts turns as well as seconds: a notebook that was stopped for
a while must not mistake its own pause for silence of all hosts.

A TCP connection survives a network that is cut for some seconds: messages sent during the cut arrive later. So a host
counts as lost only after ``LOST_SECONDS``, and a shorter cut loses no output of its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...protocol.time_limits import ASK_SECONDS, HOST_WATCH_LATE_SECONDS, LOST_SECONDS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

LOST_TURNS = 10  # turns without a reply before a host counts as lost, in addition to LOST_SECONDS


@dataclass(slots=True)
class Host:
    """One host and the probes (ping sockets) of its nannies."""

    name: str
    probes: list[str]
    next_at: float = 0.0  # time of the next request
    asked_at: float | None = None  # time of the first request since the last reply
    turns: int = 0  # turns since ``asked_at``
    is_lost: bool = False


@dataclass(slots=True)
class HostWatch:
    """The hosts of a cluster, and which of them respond."""

    hosts: dict[str, Host] = field(default_factory=dict)

    def turn(self, now: float, probes: Mapping[str, Collection[str]]) -> tuple[dict[str, float], list[str]]:
        """Return the hosts newly counted as lost, and the probes to send a request to now.

        The former are given with the seconds since the first request without a reply. The latter are one of each host,
        but all of a host that owes a reply. ``probes`` has those of living ranks, by host; a lost host is kept until
        :meth:`forget`.
        """
        found = {}
        for host in self.hosts.values():
            silent_s = 0.0 if host.asked_at is None else now - host.asked_at
            if not host.is_lost and host.turns >= LOST_TURNS and silent_s >= LOST_SECONDS:
                host.is_lost = True
                found[host.name] = silent_s
        self._know(probes)
        return found, [probe for host in self.hosts.values() for probe in _to_ask(host, now)]

    def _know(self, probes: Mapping[str, Collection[str]]) -> None:
        lost = {name: host for name, host in self.hosts.items() if host.is_lost}
        living = {name: self.hosts.get(name) or Host(name, []) for name in probes if name not in lost}
        for name, host in living.items():
            host.probes = sorted(probes[name])
        self.hosts = lost | living

    def on_answer(self, probe: str, now: float) -> tuple[Host | None, float]:
        """Record a reply; return its host, and the seconds since the first request without a reply."""
        host = next((each for each in self.hosts.values() if probe in each.probes), None)
        if host is None or host.asked_at is None:
            return host, 0.0
        silent_s, host.asked_at, host.turns = now - host.asked_at, None, 0
        return host, silent_s

    def all_silent(self, now: float) -> bool:
        """Whether no host has replied for about as long as it takes to count as lost."""
        asked = [host.asked_at for host in self.hosts.values()]
        return all(at is not None and now - at >= LOST_SECONDS - HOST_WATCH_LATE_SECONDS for at in asked)

    def forget(self, name: str) -> None:
        """Forget a lost host."""
        self.hosts.pop(name, None)


def _to_ask(host: Host, now: float) -> list[str]:
    is_silent = host.asked_at is not None
    if not is_silent and now < host.next_at:
        return []
    if not is_silent:
        host.asked_at, host.turns, host.next_at = now, 0, now + ASK_SECONDS
    host.turns += 1
    return host.probes if is_silent else host.probes[:1]
