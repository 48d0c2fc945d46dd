"""Whether other hosts can be reached.

Covers: asking a nanny of each host for a sign of life, a host that does not answer, one that answers again, nannies
that were killed there.
Does not cover: what follows from a rank's death (``recovery``), the rank's own view (``engine.cluster_watch``).

:class:`HostWatch` is a state machine without I/O. It counts turns and not only seconds: a notebook that was stopped for
a while must not take its own absence for that of all hosts.

A TCP connection survives a network that is cut for some seconds: what was sent then comes later. So a host counts as
lost only after ``LOST_SECONDS``, and what ranks said until then is not lost with a shorter cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

LOST_SECONDS = 5.6  # without an answer
LATE_SECONDS = 2.0  # by which hosts that fall silent together may differ
LOST_TURNS = 10  # and so many turns without one
ASK_SECONDS = 0.5  # between two questions to a host that answers; one that is silent is asked at every turn
SILENT_SECONDS = 2.0  # without an answer, before it is told that it came back


@dataclass(slots=True)
class Host:
    """One host and the probes of its nannies."""

    probes: set[str]
    next_at: float = 0.0  # when it is asked again
    asked_at: float | None = None  # the first question since the last answer
    turns: int = 0  # since then
    lost: bool = False
    returned_after_s: float = 0.0  # that it did not answer; 0: nothing to tell


@dataclass(slots=True)
class HostWatch:
    """Which hosts answer."""

    hosts: dict[str, Host] = field(default_factory=dict)

    def know(self, probes: Mapping[str, Collection[str]]) -> None:
        """Take the probes of the ranks that live, by host; a lost host is known until it has been told to end them."""
        for name, of_host in probes.items():
            host = self.hosts.setdefault(name, Host(probes=set(of_host)))
            if not host.lost:
                host.probes = set(of_host)
        for name in [name for name, host in self.hosts.items() if name not in probes and not host.lost]:
            del self.hosts[name]

    def questions(self, now: float) -> list[str]:
        """Return the probes to ask now: one of each host, all of one that is silent."""
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
        """Note an answer; returns the name of a host that was lost and is there again, else an empty string."""
        for name, host in self.hosts.items():
            if probe not in host.probes:
                continue
            silent_s = 0.0 if host.asked_at is None else now - host.asked_at
            host.asked_at, host.turns = None, 0
            if host.lost:
                return name
            if silent_s >= SILENT_SECONDS:
                host.returned_after_s = silent_s
        return ""

    def take_lost(self, now: float) -> dict[str, float]:
        """Return the hosts that count as lost since the last call, with the seconds since the first lost question."""
        found = {}
        for name, host in self.hosts.items():
            if host.lost or host.asked_at is None or host.turns < LOST_TURNS or now - host.asked_at < LOST_SECONDS:
                continue
            host.lost = True
            found[name] = now - host.asked_at
        return found

    def all_silent(self, now: float) -> bool:
        """Whether no host has answered for about as long as one that counts as lost."""
        asked = [host.asked_at for host in self.hosts.values()]
        return all(at is not None and now - at >= LOST_SECONDS - LATE_SECONDS for at in asked)

    def take_returned(self) -> dict[str, float]:
        """Return the hosts that answer again, with the seconds that they did not."""
        found = {name: host.returned_after_s for name, host in self.hosts.items() if host.returned_after_s}
        for name in found:
            self.hosts[name].returned_after_s = 0.0
        return found

    def forget(self, name: str) -> None:
        """Forget a lost host."""
        self.hosts.pop(name, None)
