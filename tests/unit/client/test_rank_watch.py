"""Whether a job's ranks have all left, with made-up moments and real connections."""

from __future__ import annotations

import socket

import pytest

from jupyter_disttrain.client.transport.rank_watch import RankWatch, has_connection
from jupyter_disttrain.protocol.time_limits import CLOSED_SECONDS, RANK_WATCH_SILENT_SECONDS, UNHEARD_SECONDS


@pytest.fixture
def watch() -> RankWatch:
    """Of ranks that are there since 100 s."""
    watch = RankWatch()
    assert not watch.are_gone(known=True, connected=True, now_s=100.0)
    return watch


def test_before_the_first_rank_nobody_has_left() -> None:
    watch = RankWatch()
    assert not watch.are_gone(known=False, connected=False, now_s=1e6)
    assert not watch.are_gone(known=False, connected=True, now_s=2e6)


def test_who_says_that_it_leaves_has_left_once_its_connections_are_closed(watch: RankWatch) -> None:
    assert not watch.are_gone(known=False, connected=True, now_s=101.0)
    assert not watch.are_gone(known=False, connected=False, now_s=101.0 + CLOSED_SECONDS / 2)
    assert watch.are_gone(known=False, connected=False, now_s=101.1 + CLOSED_SECONDS)


def test_who_was_killed_has_left_although_the_hub_counts_on_it(watch: RankWatch) -> None:
    assert not watch.are_gone(known=True, connected=False, now_s=100.0 + UNHEARD_SECONDS)
    assert watch.are_gone(known=True, connected=False, now_s=100.1 + UNHEARD_SECONDS)


def test_who_is_stopped_and_misses_its_beats_is_there(watch: RankWatch) -> None:
    for now_s in (111.0, 140.0, 100.0 + RANK_WATCH_SILENT_SECONDS):
        assert not watch.are_gone(known=False, connected=True, now_s=now_s)
    assert watch.are_gone(known=False, connected=True, now_s=100.1 + RANK_WATCH_SILENT_SECONDS)


def test_a_connection_that_is_made_anew_is_no_end(watch: RankWatch) -> None:
    assert not watch.are_gone(known=False, connected=True, now_s=110.0)
    assert not watch.are_gone(known=False, connected=False, now_s=110.2)
    assert not watch.are_gone(known=False, connected=True, now_s=110.4)
    assert not watch.are_gone(known=False, connected=False, now_s=110.4 + CLOSED_SECONDS)


def test_only_who_is_connected_counts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not has_connection({port})
        with socket.create_connection(("127.0.0.1", port)):
            assert has_connection({port, 1})
            assert not has_connection({1})
        server.accept()[0].close()
        assert not has_connection({port})
