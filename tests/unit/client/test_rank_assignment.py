"""Forming the process group: what ranks report to have lost."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from jupyter_disttrain.client.startup.cluster_state import ClusterState
from jupyter_disttrain.client.startup.rank_assignment import RankAssignment
from jupyter_disttrain.client.startup.rank_table import RankEntry
from jupyter_disttrain.client.startup.registration import Registration
from jupyter_disttrain.config.cluster import ClusterConfig
from jupyter_disttrain.launchers.placement import Placement
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
