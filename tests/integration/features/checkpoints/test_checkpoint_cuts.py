"""Background checkpoints that are interrupted: the latest is complete, the next is saved, the user is informed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import RankFailure

from ....support.recovery_tools import interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ....support.notebook_driver import Notebook

CUT_OFF = (
    "the checkpoint that was being written in the background was aborted; the previous version remains the latest\n"
)
# A disk that takes as long as the test needs.
SLOW = """
import threading
from torch.distributed.checkpoint import FileSystemWriter
reached, go_on, fast = threading.Event(), threading.Event(), FileSystemWriter.write_data
def slow(self, *args, **options):
    reached.set(); go_on.wait()
    return fast(self, *args, **options)
FileSystemWriter.write_data = slow
"""
FAST = "go_on.set(); FileSystemWriter.write_data = fast"
SHORT_S = 60.0  # in place of half an hour


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two ranks by one launcher: the launcher does not matter here, and many tests need new ranks."""
    with Cluster(n=2, launcher="mpi", name="cut-off") as cluster:
        yield cluster


def begin(cluster: Cluster, folder: Path, slow: int) -> None:
    """Save a version, then start a second one, which one rank is still writing."""
    cluster.run("step, model = 1, torch.nn.Linear(20, 20)")
    cluster.checkpoints.save(folder, ["model", "step"])
    cluster.run(SLOW, slow)
    cluster.run("step = 2")
    cluster.checkpoints.save(folder, ["model", "step"], beside=True)
    cluster.run("reached.wait()", slow)


def checkpoints_work(cluster: Cluster, folder: Path) -> bool:
    """Return whether the first version is loaded, and later ones follow it without partial files."""
    cluster.checkpoints.load(folder, ["step"], timeout_s=SHORT_S)
    assert cluster.run("step").results == {0: 1, 1: 1}
    cluster.run("step = 3")
    cluster.checkpoints.save(folder, ["step"], timeout_s=SHORT_S)
    cluster.checkpoints.save(folder, ["step"], beside=True)
    cluster.checkpoints.finish(timeout_s=SHORT_S)
    return sorted(path.name for path in folder.iterdir()) == ["000001", "000002", "000003"]


@pytest.fixture
def cancellations_reported(cluster: Cluster) -> Callable[[int], int]:
    """Return how often this test's ranks reported a cancelled version; a rank's log has all it ever reported."""

    def so_far(rank: int) -> int:
        return sum(path.read_text().count(CUT_OFF) for path in Path(cluster.log_folder).glob(f"rank{rank}*.log"))

    before = {rank: so_far(rank) for rank in (0, 1)}
    return lambda rank: so_far(rank) - before[rank]


@pytest.mark.parametrize("slow", [0, 1])
def test_interrupt_that_releases_ranks(
    cluster: Cluster, tmp_path: Path, cancellations_reported: Callable[[int], int], slow: int
) -> None:
    begin(cluster, tmp_path, slow)
    interrupted(cluster, f"if rank == {slow}:\n    while True: pass\ndist.barrier()", {1 - slow})
    cluster.run(FAST, slow)
    assert checkpoints_work(cluster, tmp_path)
    assert (cancellations_reported(0), cancellations_reported(1)) == (1, 1)


@pytest.mark.parametrize("dies", [0, 1])
def test_death_of_a_rank(
    cluster: Cluster, tmp_path: Path, cancellations_reported: Callable[[int], int], dies: int
) -> None:
    begin(cluster, tmp_path, dies)
    run = cluster.run(f"if rank == {dies}:\n    while True: pass\ndist.barrier()", block=False)
    psutil.Process(cluster.table[dies].info.pid).send_signal(signal.SIGKILL)
    with pytest.raises(RankFailure, match="RankDied") as caught:
        run.wait()
    assert not [note for note in caught.value.notes if "lost with the old process group" in note]
    cluster.run("model = torch.nn.Linear(20, 20)")
    assert checkpoints_work(cluster, tmp_path)
    assert cancellations_reported(1 - dies) == 1


def test_cell_that_destroys_the_process_group(
    cluster: Cluster, tmp_path: Path, cancellations_reported: Callable[[int], int]
) -> None:
    begin(cluster, tmp_path, 1)
    cluster.run(f"dist.destroy_process_group()\nif rank: {FAST}")
    assert checkpoints_work(cluster, tmp_path)
    assert (cancellations_reported(0), cancellations_reported(1)) == (1, 1)


def test_rank_that_cannot_copy_its_part(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run("step, model = 1, torch.nn.Linear(20, 20)")
    cluster.checkpoints.save(tmp_path, ["step"])
    cluster.run(
        "import torch.distributed.checkpoint.state_dict_saver as saver\nwhole = saver.async_save\n"
        "def fails(*args, **options): raise MemoryError('no room for a copy')\nsaver.async_save = fails",
        1,
    )
    with pytest.raises(RankFailure, match="MemoryError: no room for a copy"):
        cluster.checkpoints.save(tmp_path, ["model"], beside=True)
    cluster.run("saver.async_save = whole", 1)
    assert checkpoints_work(cluster, tmp_path)


def test_cancelled_write(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run("step = 1")
    cluster.checkpoints.save(tmp_path, ["step"])
    cluster.run(
        "from concurrent.futures import Future\n"
        "import torch.distributed.checkpoint.state_dict_saver as saver\nwhole, cancelled = saver.async_save, Future()\n"
        "saver.async_save = lambda *args, **options: cancelled"
    )
    cluster.checkpoints.save(tmp_path, ["step"], beside=True)
    cancelled = cluster.run("cancelled.cancel(); saver.async_save = whole")
    assert cancelled.stderr == {0: CUT_OFF, 1: CUT_OFF}
    assert checkpoints_work(cluster, tmp_path)


def test_writer_threads_are_not_counted_with_the_cell(cluster: Cluster, tmp_path: Path) -> None:
    begin(cluster, tmp_path, 1)
    run = cluster.run(f"if rank: {FAST}; get_ipython().checkpoints._beside._outcome.result()")
    assert run.notes == []
    cluster.checkpoints.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001", "000002"]


def test_end_of_the_cluster(tmp_path: Path) -> None:
    cluster = Cluster(n=2, launcher="local", name="ended")
    begin(cluster, tmp_path, 1)
    cluster.shutdown()  # as when the kernel ends
    left = [path.name for path in tmp_path.iterdir() if path.name != "000001"]
    assert len(left) == 1
    with Cluster(n=2, launcher="local", name="next") as after:
        after.checkpoints.load(tmp_path, ["step"])
        assert after.run("step").results == {0: 1, 1: 1}
        after.checkpoints.save(tmp_path, ["step"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*left, "000001", "000002"])


def test_end_of_a_with_block_waits(tmp_path: Path) -> None:
    with Cluster(n=2, launcher="local", name="block") as cluster:
        begin(cluster, tmp_path, 1)
        cluster.run(f"threading.Timer(0.2, lambda: exec({FAST!r}, globals())).start()", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001", "000002"]


def test_failed_version_is_reported_and_the_ranks_end(bare_notebook: Notebook, tmp_path: Path) -> None:
    full = (
        "%%distributed\nimport jupyter_disttrain.features.checkpoints.rank as own\n"
        "def full(*_): raise OSError(28, 'No space left on device')\nown.finish = full\nvalue = 1"
    )
    bare_notebook.run("%dist_init -n 2 --launcher local").check()
    for ending, ends in (("%dist_reset", "ready"), ("%dist_shutdown", "ranks 0-1 ended")):
        bare_notebook.run(full).check()
        bare_notebook.run(f"%dist_save --async {tmp_path}/run value").check()
        outcome = bare_notebook.run(ending).check()
        assert "the previous checkpoint was not saved: rank 0: No space left on device: " in outcome.text
        assert "Traceback" not in outcome.text
        assert ends in outcome.text
    bare_notebook.run("%dist_init -n 2 --launcher local").check()
    bare_notebook.run(full).check()
    bare_notebook.run(f"%dist_save --async {tmp_path}/run value").check()
    assert "No space left on device" in bare_notebook.run("%unload_ext jupyter_disttrain").check().text
    bare_notebook.run("%load_ext jupyter_disttrain").check()
    assert "no cluster is running" in bare_notebook.run("%dist_status").error
    assert list((tmp_path / "run").glob("0*")) == []


def test_shutdown_reports_what_it_cancels(bare_notebook: Notebook, tmp_path: Path) -> None:
    bare_notebook.run("%dist_init -n 2 --launcher local").check()
    bare_notebook.run(f"%%distributed\nvalue = 1{SLOW}").check()
    bare_notebook.run(f"%dist_save --async {tmp_path}/run value").check()
    bare_notebook.run("%%distributed --noblock -r 1\nimport time\nwhile True: time.sleep(0.01)").check()
    cancellations_reported = bare_notebook.run("%dist_shutdown").check().text
    assert "rank 1 not idle: a checkpoint that is being written in the background is aborted" in cancellations_reported
    assert "ranks 0-1 ended" in cancellations_reported
