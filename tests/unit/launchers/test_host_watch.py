"""The state machine of host heartbeats, with simulated times (``test_host_faults`` uses real hosts)."""

from __future__ import annotations

from jupyter_disttrain.launchers.hosts.host_watch import LOST_TURNS, HostWatch
from jupyter_disttrain.protocol.time_limits import LOST_SECONDS

PROBES = {"node1": ["a", "b"], "node2": ["c", "d"]}
TURN = 0.5


def test_one_nanny_per_host_is_pinged_and_all_of_a_silent_host() -> None:
    hosts = HostWatch()
    assert hosts.turn(0.0, PROBES) == ({}, ["a", "c"])
    hosts.on_answer("a", 0.1)
    assert hosts.turn(0.5, PROBES) == ({}, ["a", "c", "d"])


def test_host_is_lost_once_after_long_silence_and_enough_pings() -> None:
    hosts = HostWatch()
    lost = []
    for turn in range(30):
        now = turn * TURN
        lost += [(name, now) for name in hosts.turn(now, PROBES)[0]]
        hosts.on_answer("a", now + 0.01)
    assert [name for name, _ in lost] == ["node2"]
    assert LOST_SECONDS <= lost[0][1] <= LOST_SECONDS + TURN
    assert hosts.turn(100.0, PROBES)[1].count("c") == 1


def test_suspended_notebook_reports_no_host_as_lost() -> None:
    hosts = HostWatch()
    hosts.turn(0.0, PROBES)
    assert hosts.turn(100.0, PROBES)[0] == {}
    hosts.on_answer("a", 100.1)
    hosts.on_answer("d", 100.1)
    assert all(hosts.turn(100.0 + turn, PROBES)[0] == {} for turn in range(LOST_TURNS))


def test_late_reply_has_the_silent_time_once() -> None:
    hosts = HostWatch()
    hosts.turn(0.0, PROBES)
    host, silent_s = hosts.on_answer("d", 4.0)
    assert (host and host.name, silent_s) == ("node2", 4.0)
    assert hosts.on_answer("c", 4.1)[1] == 0.0


def test_lost_host_is_pinged_until_it_is_forgotten() -> None:
    hosts = HostWatch()
    lost = {name for turn in range(20) for name in hosts.turn(turn * TURN, PROBES)[0]}
    assert lost == {"node1", "node2"}
    assert "c" in hosts.turn(10.5, {})[1], "so that its processes can be ended"
    host, _ = hosts.on_answer("c", 11.0)
    assert host is not None
    assert host.is_lost
    hosts.forget("node2")
    assert "c" not in hosts.turn(11.5, {})[1]
