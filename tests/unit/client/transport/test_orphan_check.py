"""Detect that all ranks of a job have left, with simulated times and real connections."""

from __future__ import annotations

import socket

import pytest

from jupyter_disttrain.client.transport.controller import OrphanCheck, has_connection
from jupyter_disttrain.protocol.time_limits import CLOSED_SECONDS, ORPHANED_SECONDS, UNANSWERED_SECONDS


@pytest.fixture
def check() -> OrphanCheck:
    """Watch ranks that are connected since 100 s."""
    check = OrphanCheck()
    assert not check.are_gone(known=True, connected=True, now_s=100.0)
    return check


def test_job_is_not_over_before_the_first_rank() -> None:
    check = OrphanCheck()
    assert not check.are_gone(known=False, connected=False, now_s=1e6)
    assert not check.are_gone(known=False, connected=True, now_s=2e6)


def test_deregistered_rank_has_left_once_its_connections_are_closed(check: OrphanCheck) -> None:
    assert not check.are_gone(known=False, connected=True, now_s=101.0)
    assert not check.are_gone(known=False, connected=False, now_s=101.0 + CLOSED_SECONDS / 2)
    assert check.are_gone(known=False, connected=False, now_s=101.1 + CLOSED_SECONDS)


def test_killed_rank_has_left_although_the_hub_still_lists_it(check: OrphanCheck) -> None:
    assert not check.are_gone(known=True, connected=False, now_s=100.0 + UNANSWERED_SECONDS)
    assert check.are_gone(known=True, connected=False, now_s=100.1 + UNANSWERED_SECONDS)


def test_stopped_rank_with_missed_heartbeats_is_present(check: OrphanCheck) -> None:
    for now_s in (111.0, 140.0, 100.0 + ORPHANED_SECONDS):
        assert not check.are_gone(known=False, connected=True, now_s=now_s)
    assert check.are_gone(known=False, connected=True, now_s=100.1 + ORPHANED_SECONDS)


def test_reconnecting_rank_has_not_left(check: OrphanCheck) -> None:
    assert not check.are_gone(known=False, connected=True, now_s=110.0)
    assert not check.are_gone(known=False, connected=False, now_s=110.2)
    assert not check.are_gone(known=False, connected=True, now_s=110.4)
    assert not check.are_gone(known=False, connected=False, now_s=110.4 + CLOSED_SECONDS)


def test_only_connected_ranks_count() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not has_connection({port})
        with socket.create_connection(("127.0.0.1", port)):
            assert has_connection({port, 1})
            assert not has_connection({1})
        server.accept()[0].close()
        assert not has_connection({port})
