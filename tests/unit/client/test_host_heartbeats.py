"""Decisions from heartbeat replies of hosts, with simulated times and replies (``test_host_faults`` has real hosts)."""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from jupyter_disttrain.client.cells.executor import Cells
from jupyter_disttrain.client.recovery import host_heartbeats
from jupyter_disttrain.client.recovery.spare_hosts import SpareHosts
from jupyter_disttrain.client.session_messages import SessionMessages
from jupyter_disttrain.client.startup.rank_table import RankEntry
from jupyter_disttrain.client.startup.registration import MISSED_CHECKS, as_message, unreported_deaths
from jupyter_disttrain.config.cluster import ClusterConfig
from jupyter_disttrain.config.hosts import parse_hosts
from jupyter_disttrain.errors import HostLostError
from jupyter_disttrain.features.telemetry.client import Telemetry
from jupyter_disttrain.protocol.rank_death import RankDeath

from ..records import rank_info

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_disttrain.client.transport.link import Link
    from jupyter_disttrain.protocol.requests import Request

TURN = 0.25


class FakeLink:
    """Stand in for the link: requests, of which finished ones are dropped."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, Future[Any]]] = []

    def request(self, target: str, _request: Request) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((target, future))
        future.add_done_callback(lambda _: self.waiting.remove((target, future)))
        return future

    def answer(self, probe: str, gone: list[int]) -> None:
        for target, future in list(self.waiting):
            if target == probe:
                future.set_result({"content": {"gone": gone}})


def entry(rank: int, launch_host: str, host: str) -> RankEntry:
    return RankEntry(
        info=rank_info(rank, 2, host=host, pid=10**7 + rank),
        engine=f"engine{rank}",
        nanny=f"nanny{rank}",
        nanny_pid=2 * 10**7 + rank,
        probe=f"probe{rank}",
        launch_host=launch_host,
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(host_heartbeats, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def turn_until(
    condition: Callable[[], object], hosts: host_heartbeats.HostHeartbeat, table: list[RankEntry], clock: list[float]
) -> None:
    while not condition():
        hosts.turn(cast("Link", FakeLink()), table)
        clock[0] += TURN


def test_requests_to_a_lost_host_are_dropped(clock: list[float]) -> None:
    link, deaths = FakeLink(), list[RankDeath]()
    table = [entry(0, "node1", "node1")]
    hosts = host_heartbeats.HostHeartbeat(deaths.append, lambda _text: None)
    for _ in range(1000):
        hosts.turn(cast("Link", link), table)
        clock[0] += TURN
    assert hosts.lost_hosts == ["node1"]
    assert len(link.waiting) <= host_heartbeats.FORGET_SECONDS / TURN + 2


def test_last_output_of_a_dead_nanny_is_awaited(clock: list[float]) -> None:
    link, deaths = FakeLink(), list[RankDeath]()
    table = [entry(0, "node1", "node1"), entry(1, "node1", "node1")]
    hosts = host_heartbeats.HostHeartbeat(deaths.append, lambda _text: None)
    began = clock[0]
    while not deaths:
        hosts.turn(cast("Link", link), table)
        link.answer("probe0", gone=[table[1].nanny_pid])
        clock[0] += TURN
    assert [(death.engine, death.signal_number) for death in deaths] == [("engine1", signal.SIGKILL)]
    assert clock[0] - began >= host_heartbeats.GONE_SECONDS


def test_rank_on_a_host_with_our_hostname_is_not_looked_up_locally() -> None:
    table = [entry(0, "node1", socket.gethostname())]
    assert [list(unreported_deaths(table)) for _ in range(MISSED_CHECKS)] == [[]] * MISSED_CHECKS


def test_hosts_silent_since_mpiexec_was_killed_are_not_lost(clock: list[float]) -> None:
    deaths, notes = list[RankDeath](), list[str]()
    table = [entry(0, "node1", "node1"), entry(1, "node2", "node2")]
    hosts = host_heartbeats.HostHeartbeat(deaths.append, notes.append, mpiexec_was_killed=lambda: True)
    turn_until(lambda: len(deaths) == 2, hosts, table, clock)
    assert {death.cause.partition(":")[0] for death in deaths} == {"was killed by SIGKILL"}
    assert (hosts.lost_hosts, notes) == ([], [])
    SpareHosts(ClusterConfig(launcher="mpi", hosts=parse_hosts("node1:1,node2:1")), table, hosts).host_for("node1")


def test_silence_of_all_hosts_hints_at_the_local_network(clock: list[float]) -> None:
    notes = list[str]()
    table = [entry(0, "node1", "node1"), entry(1, "node2", "node2")]
    hosts = host_heartbeats.HostHeartbeat(lambda _death: None, notes.append)
    turn_until(lambda: hosts.lost_hosts, hosts, table, clock)
    assert [note for note in notes if note.startswith("no host replies any more; this machine may be disconnected")]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            ClusterConfig(launcher="ssh", hosts=parse_hosts("node1:1")),
            "%dist_reset -r 0 starts its ranks there; .*--spare HOST at the start reserves a host for such ranks",
        ),
        (ClusterConfig(launcher="slurm"), "%dist_shutdown and %dist_init request other nodes from Slurm"),
    ],
)
def test_advice_for_a_lost_host_depends_on_the_launcher(
    config: ClusterConfig, message: str, clock: list[float]
) -> None:
    table = [entry(0, "node1", "node1")]
    hosts = host_heartbeats.HostHeartbeat(lambda _death: None, lambda _text: None)
    turn_until(lambda: hosts.lost_hosts, hosts, table, clock)
    with pytest.raises(HostLostError, match=rf"node1 is lost.*{message}"):
        SpareHosts(config, table, hosts).host_for("node1")


def test_late_duplicate_death_report_is_not_attributed_to_the_new_process() -> None:
    dead, buried = entry(0, "node1", "node1"), list[int]()
    callbacks: list[Callable[[], None]] = []
    launch = SimpleNamespace(table=[dead])
    nothing = lambda *_: None  # noqa: E731
    supervisor = SimpleNamespace(on_death=lambda entry, _death: buried.append(entry.info.rank), note=lambda _text: None)
    telemetry = Telemetry(1.0, print)
    session = SimpleNamespace(
        launch=launch,
        open_cells=Cells(
            cast("Any", launch), cast("Any", supervisor), Telemetry(1.0, print), cast("Any", None), 0, nothing
        ),
        job_watch=SimpleNamespace(if_it_runs=callbacks.append),  # the request to Slurm takes its time
        telemetry=telemetry,
        debugger=SimpleNamespace(on_end=nothing),
    )
    messages = SessionMessages(cast("Any", session), interrupt=nothing, reset=nothing, shutdown=nothing, leave=nothing)
    for _ in range(3):
        messages.on_message("iopub", as_message(host_heartbeats._death(dead, signal_number=9)))
    first, second, third = callbacks
    first()
    second()
    assert buried == [0]
    launch.table[0] = entry(0, "node1", "node1")
    third()
    assert buried == [0]
    assert launch.table[0].state == "idle"


def test_process_with_the_pid_of_a_killed_nanny_is_not_taken_for_it() -> None:
    table = [replace(entry(0, "", socket.gethostname()), nanny_pid=os.getpid(), probe="")]
    assert [list(unreported_deaths(table)) for _ in range(MISSED_CHECKS)] == [[]] * MISSED_CHECKS
    table[0].nanny_started = "1"
    *_, last = [list(unreported_deaths(table)) for _ in range(MISSED_CHECKS)]
    assert [death.engine for death in last] == [table[0].engine]
