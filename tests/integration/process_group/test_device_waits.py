"""Ranks that wait for a GPU: the wait is detected and released, and the cell reports lost work.

Covers: a wait without a Python frame, one that spins, values after an abort, aborts that hang, groups formed again with
a backend for each device. The GPU is simulated by ``fake_device``.
Does not cover: NCCL itself (``jupyter disttrain gpu-check`` on a machine with GPUs).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.client.recovery import supervisor

from ...support.process_tools import wait_until
from ...support.recovery_tools import failure_of, interrupted, is_intact, stop, waits
from ...support.shell_tools import left_idle

if TYPE_CHECKING:
    from collections.abc import Iterator


INSTALL = "from tests.support import fake_device as gpu; import os, time; kept = rank * 11; gpu.install()"


@pytest.fixture(scope="module")
def device() -> Iterator[Cluster]:
    """Three ranks with a device that they wait for as for a GPU."""
    with Cluster(n=3, launcher="local", grace_s=0.5, hang_after_s=0.5, name="device") as cluster:
        cluster.run(INSTALL)
        cluster.run("gpu.aborts.clear(); value = None")
        yield cluster


@pytest.fixture
def pids(device: Cluster) -> Iterator[dict[int, int]]:
    """The process ids of the ranks before the test."""
    yield device.run("value = None; os.getpid()").results
    assert left_idle(device, INSTALL)


def test_session_has_a_backend_for_each_device(device: Cluster) -> None:
    assert device.run("dist.get_backend(), dist.group.WORLD.bound_device_id").results[0] == ("cpu:gloo,meta:fake", None)


@pytest.mark.parametrize("spins", [False, True])
def test_one_interrupt_releases_ranks_that_wait_for_the_device_and_ends_the_cell(
    device: Cluster, pids: dict[int, int], spins: bool
) -> None:
    code = f"gpu.all_reduce(30)\nif rank < 2: value = gpu.item(spins={spins})\nelse: time.sleep(1000)"
    failure = interrupted(device, code, {0, 1}, ranks="all")
    assert {each.ename for each in failure.failures} == {"KeyboardInterrupt"}
    assert device.run("value").results == {0: None, 1: None, 2: None}  # not what was in the device's memory
    assert is_intact(device, pids)


COUNT_INTERRUPTS = """seen = []
gpu.all_reduce(4)
{failure}
try: value = gpu.item()
except BaseException as error:
    seen.append(type(error).__name__)
    for _ in range(1000): seen = list(seen)
    seen.append("cleaned up")
    raise"""


def test_one_interrupt_reports_one_error_although_another_rank_failed(device: Cluster, pids: dict[int, int]) -> None:
    failure = interrupted(device, COUNT_INTERRUPTS.format(failure=""), {0, 1, 2})
    assert {each.ename for each in failure.failures} == {"KeyboardInterrupt"}
    assert list(device.run("seen").results.values()) == [["KeyboardInterrupt", "cleaned up"]] * 3
    assert is_intact(device, pids)
    error = failure_of(device, COUNT_INTERRUPTS.format(failure="if rank == 1: raise ValueError('the cause')"))
    assert {rank: each.ename for rank, each in error.by_rank.items()} == {
        0: "ReleasedError",
        1: "ValueError",
        2: "ReleasedError",
    }
    assert list(device.run("seen", ranks=[0, 2]).results.values()) == [["ReleasedError", "cleaned up"]] * 2
    run = device.run(COUNT_INTERRUPTS.format(failure=""), block=False)
    assert wait_until(waits(run, {0, 1, 2}))
    device.interrupt()
    failure = stop(device, run)
    assert {each.ename for each in failure.failures} == {"KeyboardInterrupt"}
    assert {each[0] for each in device.run("seen").results.values()} == {"KeyboardInterrupt"}
    assert device.run("value").results == dict.fromkeys(range(3))
    assert is_intact(device, pids)


def test_ranks_that_wait_for_the_device_are_released_once_another_fails(device: Cluster, pids: dict[int, int]) -> None:
    code = "gpu.all_reduce(4)\nif rank == 1: raise ValueError('the cause')\nvalue = gpu.item()"
    failure = failure_of(device, code)
    assert [each.evalue for each in failure.failures] == ["the cause"]
    assert set(failure.waited) == {0, 2}
    assert device.run("value").results == {0: None, 1: None, 2: None}
    assert is_intact(device, pids)


def test_hang_on_the_device_is_explained_and_a_mismatch_is_named(device: Cluster, pids: dict[int, int]) -> None:
    code = "gpu.all_reduce(4 + rank % 2)\nvalue = gpu.item(spins=rank == 2)"
    run = device.run(code, block=False)
    assert wait_until(lambda: any("collective number 1 is not the same on all ranks" in line for line in run.hang))
    waits_at = "waits in all_reduce number 1 (Float 4) at line 2: value = gpu.item"  # the collective begins at line 1
    assert wait_until(lambda: any(waits_at in line for line in run.hang))
    figures = device.telemetry.ranks
    assert wait_until(lambda: all(figures[rank].vitals.state == "in collective" for rank in range(3)))
    stop(device, run)
    assert is_intact(device, pids)


def test_python_code_beside_a_pending_collective_is_not_a_wait(device: Cluster, pids: dict[int, int]) -> None:
    code = "gpu.all_reduce(4)\nif rank == 0: value = gpu.item()\nwhile True: pass"
    run = device.run(code, block=False)
    assert wait_until(waits(run, {0}))
    samples = [run._supervisor.stacks.collect({1, 2}, 5) for _ in range(3)]
    assert all(sample.waits_s is None for each in samples for sample in each.values())
    assert wait_until(lambda: any("ranks 1-2: in Python code at line 3" in line for line in device.where()))
    stop(device, run)
    assert is_intact(device, pids)


def test_cell_that_catches_the_release_error_still_fails(device: Cluster, pids: dict[int, int]) -> None:
    code = (
        "gpu.all_reduce(4)\nif rank == 1: raise ValueError('the cause')\n"
        "try: value = gpu.item()\nexcept Exception as error: value = str(error)"
    )
    failure = failure_of(device, code)
    assert failure.by_rank[0].ename == "ReleasedError"
    assert "the process groups were aborted while this cell ran" in device.run("value").results[0]
    assert is_intact(device, pids)


def test_groups_are_formed_again_by_all_ranks_and_aborted_beside_the_control_thread(
    device: Cluster, pids: dict[int, int]
) -> None:
    device.run("pair = dist.new_group([0, 1]); made = []; gpu.aborts.clear()")
    device.run(
        "from torch.distributed import distributed_c10d as c10d\nhelper = c10d._new_process_group_helper\n"
        "def count(*args, **options):\n    made.append(args[2]); return helper(*args, **options)\n"
        "c10d._new_process_group_helper = count\ngroup = get_ipython().kernel._request_handler.group\n"
        "group._store.set('exception_dump', '1')"
    )
    interrupted(device, "gpu.all_reduce(4); gpu.item()", {0, 1, 2})
    assert device.run("made").results == {rank: [[], [0, 1]] for rank in range(3)}
    aborts = device.run("c10d._new_process_group_helper = helper; gpu.aborts").results
    assert all(len(each) >= 2 for rank, each in aborts.items() if rank < 2)
    assert all(thread.startswith("abort of group") for each in aborts.values() for thread, _ in each)
    assert device.run("group._store.check(['exception_dump'])").results == dict.fromkeys(range(3), False)
    total = "x = torch.ones(2); dist.all_reduce(x, group=pair); x.tolist()"
    assert device.run(total, ranks="0-1").results == {0: [2.0, 2.0], 1: [2.0, 2.0]}
    assert is_intact(device, pids)


def test_collectives_are_counted_over_all_backends_of_a_group(device: Cluster, pids: dict[int, int]) -> None:
    counted = "get_ipython().kernel._request_handler.group.counts['collectives']"
    device.run(f"both = dist.new_group(backend='cpu:gloo,cuda:gloo'); before = {counted}")
    device.run("gpu.all_reduce(1); gpu.aborts.clear(); gpu._pending.clear()")  # over a backend that counts nothing
    device.run("x = torch.ones(1); dist.all_reduce(x); dist.all_reduce(x, group=both); dist.all_reduce(x, group=both)")
    called = f"sorted(number - before[name] for name, number in {counted}.items() if number != before[name])"
    assert list(device.run(called).results.values()) == [[1, 2]] * 3
    device.run("dist.destroy_process_group(both)")
    assert is_intact(device, pids)


INITIALIZE = """
import socket
served = socket.create_server(("127.0.0.1", 0))
if rank == 0: gpu.initialize()
else: time.sleep(1000)
"""


def test_initialization_of_a_communicator_is_released(device: Cluster, pids: dict[int, int]) -> None:
    device.run("import socket; mine = socket.create_server(('127.0.0.1', 0))")
    interrupted(device, INITIALIZE, {0}, ranks="all")
    device.run("for each in (mine, served):\n    socket.create_connection(each.getsockname()).close(); each.close()")
    assert is_intact(device, pids)


BOUND = """
import time
from torch._C._distributed_c10d import Backend
from jupyter_disttrain.rank.process_group import subgroups
from tests.support import fake_device as gpu
subgroups._abort_devices = gpu.abort
Backend.supports_splitting, Backend.eager_connect_single_device = True, lambda backend, device: gpu.initialize()
kept = rank * 11
"""
MAKE_BOUND = """
if rank == 0: dist.new_group(backend="meta:fake", device_id=torch.device("meta", 0))
else: time.sleep(1000)
"""


def test_rank_that_makes_a_group_bound_to_a_device_is_released() -> None:
    with Cluster(n=2, launcher="local", grace_s=0.5, hang_after_s=0.5, name="bound") as cluster:
        cluster.run(BOUND)
        pids = cluster.run("import os; os.getpid()").results
        interrupted(cluster, MAKE_BOUND, {0}, ranks="all")
        assert is_intact(cluster, pids)


BAD_SHUTDOWN = """
group = get_ipython().kernel._request_handler.group
destroy = group._destroy
def fail():
    group._destroy = destroy
    raise RuntimeError("NCCL error: unhandled cuda error")
group._destroy = fail
"""
ABORTED_PROOF = """
whole, dist.all_reduce = dist.all_reduce, lambda tensor: tensor
released, group._released = group._released, group.generation
try: group._prove()
except RuntimeError as error: reported = str(error)
finally: dist.all_reduce, group._released = whole, released
reported
"""


def test_group_is_formed_again_although_the_old_one_cannot_be_shut_down_and_no_wrong_sum_is_returned(
    device: Cluster, pids: dict[int, int]
) -> None:
    device.run(BAD_SHUTDOWN)
    failure = interrupted(device, "gpu.all_reduce(4); gpu.item()", {0, 1, 2})
    assert is_intact(device, pids)
    assert not [note for note in failure.notes if "formed again" in note]
    reported = device.run(ABORTED_PROOF).results
    assert reported == dict.fromkeys(range(3), "a rank has died while the group was formed")


def test_rank_whose_abort_hangs_is_replaced(device: Cluster, pids: dict[int, int]) -> None:
    device.run(
        "from jupyter_disttrain.rank.process_group import group as process_group; process_group.ABORT_SECONDS = 0.5"
    )
    code = "gpu.hangs = rank == 1\ngpu.all_reduce(4)\nvalue = gpu.item()"
    failure = interrupted(device, code, {0, 1, 2})
    assert "can't be released: the abort of process group" in "\n".join(failure.by_rank[1].traceback)
    assert any(note.startswith("rank 1 was replaced by a new process") for note in failure.notes)
    now = device.run("import os; os.getpid()").results
    assert {rank for rank in range(3) if now[rank] != pids[rank]} == {1}


def test_rank_that_lost_its_gpu_is_replaced_with_advice(device: Cluster, pids: dict[int, int]) -> None:
    code = "if rank == 2: raise torch.AcceleratorError('CUDA error: device-side assert triggered')"
    failure = failure_of(device, code)
    assert "this process can't use its GPU any more" in failure.by_rank[2].evalue
    now = device.run("import os; os.getpid()").results
    assert {rank for rank in range(3) if now[rank] != pids[rank]} == {2}


DIES = """
from jupyter_disttrain.rank.process_group.group import Group
prove = Group._prove
def wait(self):
    Group._prove = prove
    if rank == 2: os._exit(3)
    gpu.initialize()
Group._prove = wait
dist.destroy_process_group()
"""


def test_ranks_that_initialize_a_communicator_survive_the_death_of_another(
    device: Cluster, pids: dict[int, int]
) -> None:
    device.run(DIES)
    now = device.run("import os; os.getpid()").results
    assert {rank for rank in range(3) if now[rank] != pids[rank]} == {2}


STUCK = """
from jupyter_disttrain.rank.process_group.group import Group
def prove(self):
    if rank == 2: os._exit(3)
    import ctypes
    lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(lock); libc.pthread_mutex_lock(lock)
if rank: Group._prove = prove
dist.destroy_process_group()
"""


def test_rank_stuck_in_forming_the_group_is_replaced(
    device: Cluster, pids: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RELEASE_SECONDS", 1.0)
    device.run(f"import os{STUCK}")
    run = device.run("os = __import__('os'); total = torch.ones(1); dist.all_reduce(total); os.getpid(), total.item()")
    assert {rank for rank in range(3) if run.results[rank][0] != pids[rank]} == {1, 2}
    assert {total for _, total in run.results.values()} == {3.0}
    assert any("rank 1 on" in note and "is stuck in forming the process group" in note for note in run.notes)
