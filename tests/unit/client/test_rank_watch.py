"""Detect that all ranks of a job have left, with simulated times and real connections."""

from __future__ import annotations

import socket

import pytest

from jupyter_disttrain.client.transport.rank_watch import RankWatch, has_connection
from jupyter_disttrain.protocol.time_limits import CLOSED_SECONDS, RANK_WATCH_SILENT_SECONDS, UNANSWERED_SECONDS


@pytest.fixture
def watch() -> RankWatch:
    """Watch ranks that are connected since 100 s."""
    watch = RankWatch()
    assert not watch.are_gone(known=True, connected=True, now_s=100.0)
    return watch


def test_job_is_not_over_before_the_first_rank() -> None:
    watch = RankWatch()
    assert not watch.are_gone(known=False, connected=False, now_s=1e6)
    assert not watch.are_gone(known=False, connected=True, now_s=2e6)


def test_deregistered_rank_has_left_once_its_connections_are_closed(watch: RankWatch) -> None:
    assert not watch.are_gone(known=False, connected=True, now_s=101.0)
    assert not watch.are_gone(known=False, connected=False, now_s=101.0 + CLOSED_SECONDS / 2)
    assert watch.are_gone(known=False, connected=False, now_s=101.1 + CLOSED_SECONDS)


def test_killed_rank_has_left_although_the_hub_still_lists_it(watch: RankWatch) -> None:
    assert not watch.are_gone(known=True, connected=False, now_s=100.0 + UNANSWERED_SECONDS)
    assert watch.are_gone(known=True, connected=False, now_s=100.1 + UNANSWERED_SECONDS)


def test_stopped_rank_with_missed_heartbeats_is_present(watch: RankWatch) -> None:
    for now_s in (111.0, 140.0, 100.0 + RANK_WATCH_SILENT_SECONDS):
        assert not watch.are_gone(known=False, connected=True, now_s=now_s)
    assert watch.are_gone(known=False, connected=True, now_s=100.1 + RANK_WATCH_SILENT_SECONDS)


def test_reconnecting_rank_has_not_left(watch: RankWatch) -> None:
    assert not watch.are_gone(known=False, connected=True, now_s=110.0)
    assert not watch.are_gone(known=False, connected=False, now_s=110.2)
    assert not watch.are_gone(known=False, connected=True, now_s=110.4)
    assert not watch.are_gone(known=False, connected=False, now_s=110.4 + CLOSED_SECONDS)


def test_only_connected_ranks_count() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not has_connection({port})
        with socket.create_connection(("127.0.0.1", port)):
            assert has_connection({port, 1})
            assert not has_connection({1})
        server.accept()[0].close()
        assert not has_connection({port})
