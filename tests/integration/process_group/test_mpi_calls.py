"""An interrupt ends every blocking call of mpi4py, and keeps MPI and variables intact."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import RankFailure

from ...support.process_tools import wait_until
from ...support.recovery_tools import SUM, failure_of

if TYPE_CHECKING:
    from collections.abc import Iterator

BEGIN = "import numpy as np; from mpi4py import MPI; kept = rank * 11; held = {'in a dict': comm}"
STALE = "comm.send('stale', dest=1 - rank, tag=3); request = comm.isend('stale, too', dest=1 - rank, tag=4)"

# What rank 1 calls, and rank 0 does not.
CALLS = [
    "comm.recv(source=0, tag=77)",
    "comm.probe(source=0, tag=77)",
    "comm.mprobe(source=0, tag=77)",
    "comm.ssend('x', dest=0)",
    "comm.Send(np.zeros(5_000_000), 0)",
    "comm.send(bytes(5_000_000), 0)",
    "held['in a dict'].Ssend(np.zeros(1), 0)",
    "comm.Isend(np.zeros(5_000_000), 0).Wait()",
    "request = comm.irecv(source=0, tag=78); request.wait()",
    "MPI.Request.Waitall([comm.Issend(np.zeros(1), 0), comm.Irecv(np.zeros(1), 0, 78)])",
    "MPI.Request.waitall([comm.issend('x', 0), comm.irecv(None, 0, 78)])",
    "MPI.Request.Waitany([comm.Issend(np.zeros(1), 0), comm.Irecv(np.zeros(1), 0, 78)])",
    "MPI.Request.Waitsome([comm.Issend(np.zeros(1), 0), comm.Irecv(np.zeros(1), 0, 78)])",
    "MPI.Request.waitany([comm.irecv(None, 0, 78)])",
    "comm.Probe(0, 77)",
    "comm.Mprobe(0, 77)",
    "request = comm.Send_init(np.zeros(5_000_000), 0); request.Start(); request.Wait()",
    "request = comm.Recv_init(np.zeros(1), 0, 9); request.Start(); request.Wait()",
    "requests = [comm.Ssend_init(np.zeros(1), 0)]; MPI.Prequest.Startall(requests); MPI.Request.Waitall(requests)",
    "comm.sendrecv('x', 0, 5, None, 0, 6)",
    "comm.Sendrecv(np.zeros(1_000_000), 0, 5, np.zeros(5), 0, 6)",
    "comm.Ibarrier().Wait()",
    "comm.bcast(bytes(5_000_000), root=1)",
    "comm.gather(bytes(5_000_000), root=0)",
    "comm.alltoall([1, 2])",
    "comm.Allreduce(np.zeros(2_000_000), np.zeros(2_000_000))",
    "comm.Split(0, rank)",
    "comm.Dup()",
    "comm.Create(comm.Get_group())",
    "comm.Create_cart([2])",
    "comm.Split(rank).Create_intercomm(0, comm, 0)",
]
# The same with objects that both ranks create first.
OF_OBJECTS = [
    ("own = comm.Dup()", "own.ssend('x', 0)"),
    ("request = comm.Barrier_init()", "request.Start(); request.Wait()"),
    ("win = MPI.Win.Allocate(8, comm=comm)", "win.Fence()"),
    ("win = MPI.Win.Allocate(8, comm=comm)", "win.Free()"),
    ("file = MPI.File.Open(comm, folder + '/file', MPI.MODE_CREATE | MPI.MODE_WRONLY)", "file.Close()"),
]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two ranks of one MPI job."""
    with Cluster(n=2, launcher="mpi", name="calls", grace_s=0.5) as cluster:
        cluster.push({"folder": str(tmp_path_factory.mktemp("files"))})
        cluster.run(BEGIN)
        yield cluster


@pytest.mark.parametrize(("before", "call"), [*((STALE, call) for call in CALLS), *OF_OBJECTS])
def test_interrupt_ends_a_blocking_call(session: Cluster, before: str, call: str) -> None:
    run = session.run(f"{before}\nif rank == 1:\n    {call}", block=False)
    assert wait_until(lambda: run.running_now == {1} and "MPI" in str(session.where()))
    session.interrupt()
    with pytest.raises(RankFailure) as caught:
        run.wait(timeout_s=20)  # far less than the wait would take; a timeout would be another error
    assert {(failure.ename, failure.line) for failure in caught.value.failures} == {("KeyboardInterrupt", 3)}
    assert not caught.value.notes
    assert session.run("(comm.allreduce(1), kept)", timeout_s=20).results == {0: (2, 0), 1: (2, 11)}


POOL = """
from mpi4py.futures import MPICommExecutor
try:
    with MPICommExecutor(comm, root=0) as pool:
        if pool is not None:
            list(pool.map(int, ["x"]))
            raise ValueError("no such")
except ValueError:
    comm.Abort(3)
"""


ABORTS = ["comm.Abort(3)", "MPI.COMM_WORLD.Abort(3)", "comm.Dup().Abort(3)", "comm.Split(0).Abort(3)", POOL]
ABORTS += ["comm.Create(comm.Get_group()).Abort(3)", "comm.Create_cart([2]).Abort(3)", "MPI.COMM_SELF.Abort(3)"]


@pytest.mark.parametrize("call", ABORTS)
def test_abort_ends_the_cell_and_not_the_session(session: Cluster, call: str) -> None:
    error = failure_of(session, call, timeout_s=20)
    assert {failure.ename for failure in error.failures} == {"MpiAbortError"}
    assert all(failure.evalue.startswith("comm.Abort(3) would end all ranks") for failure in error.failures)
    assert session.run("(comm.allreduce(1), kept)", timeout_s=20).results == {0: (2, 0), 1: (2, 11)}


def test_end_of_mpi_in_a_cell_has_no_effect(session: Cluster) -> None:
    run = session.run("MPI.Finalize()")
    assert set(run.stderr.values()) == {"MPI.Finalize() has no effect in a cell: MPI ends with the rank\n"}
    for name in ("Free", "Disconnect"):
        error = failure_of(session, f"comm.{name}()")
        assert {failure.evalue for failure in error.failures} == {
            f"comm.{name}() would end MPI for all later cells, which use this communicator"
        }
    made = "own = comm.Dup(); own.Free(); other = comm.Dup(); other.Disconnect(); (comm.allreduce(1), kept)"
    assert session.run(made, timeout_s=20).results == {0: (2, 0), 1: (2, 11)}


HELD = "win = MPI.Win.Allocate(8, comm=comm)\nif rank == 0: win.Lock(0)\ncomm.Barrier()\nif rank == 1: win.Lock(0)"
MADE = "if rank == 1: MPI.Win.Create(bytearray(8), comm=comm)"
# Open MPI crashes where a release interrupts partitioned communication.
PARTITIONED = """
import numpy as np
if rank == 1:
    request = comm.Precv_init(np.zeros(8), 4, 0, 9)
    request.Start()
    request.Wait()
"""
SEVERAL = """
import numpy as np
if rank == 1:
    requests = [comm.Psend_init(np.zeros(8), 4, 0, tag) for tag in (5, 6)]
    MPI.Prequest.Startall(requests)
    MPI.Request.Waitall([requests[0], requests[1]])
"""


ALONE = "if rank == 1: MPI.COMM_SELF.recv(source=0)"
ENDLESS = [(MADE, "Create"), (HELD, "Lock"), (PARTITIONED, "Wait"), (SEVERAL, "Waitall"), (ALONE, "recv")]


@pytest.mark.parametrize(("code", "call"), ENDLESS)
def test_rank_in_an_uninterruptible_call_is_replaced_by_the_third_interrupt(
    session: Cluster, code: str, call: str
) -> None:
    run = session.run(f"from mpi4py import MPI\n{code}", block=False)
    assert wait_until(lambda: run.running_now == {1} and f"MPI {call}" in str(session.where()))
    for forced in (False, True, True):
        session.interrupt(forced=forced)
    with pytest.raises(RankFailure) as caught:
        run.wait(timeout_s=60)
    host = session.table[1].info.host
    assert any(
        note.startswith(f"rank 1 on {host} was in MPI {call}, which ") and "interrupted three times" in note
        for note in caught.value.notes
    )
    works = "(comm.allreduce(1), MPI.COMM_SELF.allreduce(1), rank or kept)"
    assert session.run(f"from mpi4py import MPI\n{works}", timeout_s=20).results == {0: (2, 1, 0), 1: (2, 1, 1)}


def test_dist_is_intact_after_these_tests(session: Cluster) -> None:
    assert session.run(SUM, timeout_s=20).results == {0: [3.0], 1: [3.0]}
