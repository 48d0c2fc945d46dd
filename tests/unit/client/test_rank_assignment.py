"""Registration of rank processes and their first process group."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from jupyter_disttrain.client.startup.cluster_state import ClusterState
from jupyter_disttrain.client.startup.rank_assignment import RankAssignment
from jupyter_disttrain.client.startup.rank_table import RankEntry
from jupyter_disttrain.client.startup.registration import Registration
from jupyter_disttrain.config.cluster import ClusterConfig
from jupyter_disttrain.errors import LaunchError
from jupyter_disttrain.launchers.placement import Placement
from jupyter_disttrain.protocol.messages import NannyHello
from jupyter_disttrain.protocol.requests import Form

from ..records import rank_info


class _Ranks:
    """Two ranks on which MPI is found to be lost while they form the first group."""

    def request(self, engine: str, request: Any) -> Future[Any]:
        content: dict[str, Any] = {"status": "ok", "port": 1}
        if isinstance(request, Form):
            lost = [] if request.mpi_lost else ["the subgroup of ranks 0-1"]
            content |= {"lost": lost, "mpi_lost": request.mpi_lost or ("rank 1 died" if engine == "1" else "")}
        future: Future[Any] = Future()
        future.set_result({"content": content})
        return future


def test_what_was_lost_in_a_round_that_is_repeated_is_reported() -> None:
    state = ClusterState.before_start(ClusterConfig(backend="none"))
    state.placement, state.address, state.is_started = Placement(), "127.0.0.1", True
    state.link = _Ranks()  # type: ignore[assignment]
    state.table[:] = [
        RankEntry(info=rank_info(rank, 2), engine=str(rank), nanny=f"nanny-{rank}", nanny_pid=1) for rank in range(2)
    ]
    assert RankAssignment(state, Registration(state)).form() == {"the subgroup of ranks 0-1": [0, 1]}
    assert state.generation == 2
    assert state.mpi_lost == "rank 1 died"


def registration() -> Registration:
    return Registration(ClusterState.before_start(ClusterConfig()))


def test_start_timeout_of_a_new_process_is_reported_in_tenths_of_a_second() -> None:
    with pytest.raises(LaunchError, match=r"no new process started within 0\.1 s"):
        registration().wait_for_one((), 0.12345)


def test_repeated_hellos_do_not_postpone_the_start_timeout() -> None:
    registered, has_ended = registration(), threading.Event()
    hello = NannyHello(engine="known", nanny="nanny")

    def repeat() -> None:
        while not has_ended.wait(0.02):
            registered.on_record(hello)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        with pytest.raises(LaunchError, match=r"no new process started within 0\.1 s"):
            registered.wait_for_one(("known",), 0.1)
    finally:
        has_ended.set()
        thread.join()
