"""A rank's identity: names, variables, process group, device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.client.startup import gpus
from jupyter_disttrain.errors import RankFailure, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    """Three ranks on fewer cores."""
    with Cluster(n=3, timeout_s=77, name="three") as cluster:
        yield cluster


def test_documented_names_are_defined(three: Cluster) -> None:
    names = three.run("(rank, local_rank, node_rank, world_size, local_world_size, str(device), gpu_id)").results
    assert names == {rank: (rank, rank, 0, 3, 3, "cpu", None) for rank in range(3)}
    kinds = three.run("(torch.__name__, dist.__name__, comm.Get_rank(), comm.Get_size(), log_metrics.__name__)").results
    assert kinds == {rank: ("torch", "torch.distributed", rank, 3, "log_metrics") for rank in range(3)}


def test_variables_of_torchrun_and_open_mpi_are_set(three: Cluster) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR"]
    names += [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "NODE_RANK")]
    values = three.run(f"import os; [os.environ[name] for name in {names}]").results
    for rank in range(3):
        own = str(rank)
        assert values[rank] == [own, "3", own, "3", "0", "0", "127.0.0.1", own, "3", own, "3", own]


def test_store_is_reachable_at_the_master_port(three: Cluster) -> None:
    ports = three.run("os.environ['MASTER_PORT']").results
    assert len(set(ports.values())) == 1
    from torch.distributed import TCPStore  # noqa: PLC0415

    store = TCPStore("127.0.0.1", int(ports[0]), is_master=False)
    store.set("from the test", "hello")
    assert three.run(
        "dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])).get('from the test')"
    ).results[2] == (b"hello")


def test_threads_are_divided_unless_the_user_set_them(three: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    each = max(1, len(psutil.Process().cpu_affinity()) // 3)
    assert set(three.run("(os.environ['OMP_NUM_THREADS'], torch.get_num_threads())").results.values()) == {
        (str(each), each)
    }
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with Cluster(n=1, launcher="local", backend="none", name="threads") as cluster:
        assert cluster.run("import os; os.environ['OMP_NUM_THREADS']").results == {0: "5"}


def test_group_timeout_is_the_given_one(three: Cluster) -> None:
    code = "dist.group.WORLD._get_backend(torch.device('cpu')).options._timeout.total_seconds()"
    assert three.run(code).results == {0: 77.0, 1: 77.0, 2: 77.0}


SCRIPT = """
dist.init_process_group("gloo")
x = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(x)
dist.destroy_process_group()
"""


def test_script_that_creates_and_destroys_its_group_runs_in_a_cell(three: Cluster) -> None:
    for _ in range(2):
        three.run(SCRIPT)
    three.run("dist.destroy_process_group()" + SCRIPT + SCRIPT)
    three.run("pass", ranks=0)  # the ranks may have run different numbers of cells
    three.run(SCRIPT)
    assert three.run("float(x)").results == dict.fromkeys(range(3), 6.0)
    assert three.run("y = torch.ones(1); dist.all_reduce(y); float(y)").results == dict.fromkeys(range(3), 3.0)


def test_group_of_a_script_lives_as_long_as_the_script_keeps_it(three: Cluster) -> None:
    three.run("from datetime import timedelta\ndist.init_process_group('gloo', timeout=timedelta(seconds=55))")
    code = "dist.group.WORLD._get_backend(torch.device('cpu')).options._timeout.total_seconds()"
    assert three.run(code).results == dict.fromkeys(range(3), 55.0)
    three.run("dist.destroy_process_group()")
    assert three.run(code).results == dict.fromkeys(range(3), 77.0)


def test_group_destroyed_by_some_ranks_is_named_with_the_remedy(three: Cluster) -> None:
    three.run("dist.destroy_process_group()", ranks="0,2")
    with pytest.raises(UsageError) as caught:
        three.run("dist.barrier()")
    assert str(caught.value) == (
        "ranks 0,2 ended the process group and rank 1 did not, so a collective would wait forever; also "
        "run dist.destroy_process_group() with %%rank 1, so that all ranks form a new group, or run %dist_reset"
    )
    assert three.run("dist.is_initialized()", ranks="0,2").results == {0: False, 2: False}
    three.run("dist.destroy_process_group()", ranks=1)
    assert three.run("y = torch.ones(1); dist.all_reduce(y); float(y)").results == dict.fromkeys(range(3), 3.0)


def test_ranks_may_print_while_they_create_a_group(three: Cluster) -> None:
    three.run(
        "import threading, time\n"
        "def talk():\n"
        "    for number in range(200):\n"
        "        print(number, flush=True)\n"
        "        time.sleep(0.005)\n"
        "talker = threading.Thread(target=talk)\n"
        "talker.start()\n"
        "dist.destroy_process_group()"
    )
    three.run("talker.join(); dist.barrier()")


def test_group_is_repaired_after_a_cell_that_fails_after_destroying_it(three: Cluster) -> None:
    with pytest.raises(RankFailure):
        three.run("dist.destroy_process_group(); 1 / 0")
    three.run("dist.barrier()")


def test_gpus_of_this_machine_are_counted_as_on_the_ranks(three: Cluster) -> None:
    assert three.run("torch.cuda.device_count()").results[0] == len(gpus.visible_gpus())
