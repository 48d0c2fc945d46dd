"""The state machine of host heartbeats, with simulated times (``test_host_faults`` uses real hosts)."""

from __future__ import annotations

from jupyter_disttrain.launchers.hosts.heartbeat_state import LOST_TURNS, HostWatch
from jupyter_disttrain.protocol.time_limits import LOST_SECONDS

TURN = 0.5


def watch() -> HostWatch:
    found = HostWatch()
    found.know({"node1": ["a", "b"], "node2": ["c", "d"]})
    return found


def test_one_nanny_per_host_is_pinged_and_all_of_a_silent_host() -> None:
    hosts = watch()
    assert hosts.questions(0.0) == ["a", "c"]
    hosts.on_answer("a", 0.1)
    assert hosts.questions(0.5) == ["a", "c", "d"]


def test_host_is_lost_once_after_long_silence_and_enough_pings() -> None:
    hosts = watch()
    lost = []
    for turn in range(30):
        now = turn * TURN
        hosts.questions(now)
        hosts.on_answer("a", now + 0.01)
        lost += [(name, now) for name in hosts.take_lost(now)]
    assert [name for name, _ in lost] == ["node2"]
    assert LOST_SECONDS <= lost[0][1] <= LOST_SECONDS + TURN
    assert hosts.questions(100.0).count("c") == 1


def test_suspended_notebook_reports_no_host_as_lost() -> None:
    hosts = watch()
    hosts.questions(0.0)
    assert hosts.take_lost(100.0) == {}
    hosts.questions(100.0)
    hosts.on_answer("a", 100.1)
    hosts.on_answer("d", 100.1)
    assert all(hosts.take_lost(100.0 + turn) == {} for turn in range(LOST_TURNS))


def test_late_reply_is_reported_once_with_the_silent_time() -> None:
    hosts = watch()
    hosts.questions(0.0)
    hosts.on_answer("a", 0.1)
    assert hosts.on_answer("d", 4.0) == ""
    assert hosts.take_returned() == {"node2": 4.0}
    assert hosts.take_returned() == {}


def test_lost_host_that_replies_is_named_until_it_is_dropped() -> None:
    hosts = watch()
    for turn in range(20):
        hosts.questions(turn * TURN)
    assert set(hosts.take_lost(10.0)) == {"node1", "node2"}
    hosts.know({})
    assert "c" in hosts.questions(10.5), "it is still pinged, so that its processes can be ended"
    assert hosts.on_answer("c", 11.0) == "node2"
    hosts.forget("node2")
    assert "c" not in hosts.questions(11.5)
