"""``log_metrics`` on ranks: from the cell to the client, and what is kept of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import jupyter_disttrain
from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import RankFailure

from ....support.process_tools import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from ....support.notebook_driver import Notebook


def test_values_are_available_when_the_cell_has_ended(cluster: Cluster) -> None:
    run = cluster.run("for step in range(10): log_metrics(step, loss=step + rank, accuracy=torch.tensor(step / 8))")
    loss = cluster.metrics.gather("loss", run.number)
    assert loss.ranks == (0, 1)
    assert loss.values.tolist() == [[step, step + 1] for step in range(10)]
    assert cluster.metrics.gather("accuracy").values[:, 0].tolist() == [step / 8 for step in range(10)]


def test_sharded_tensor_is_refused(cluster: Cluster) -> None:
    code = (
        "from torch.distributed.tensor import Partial, DTensor\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "mesh = init_device_mesh('cpu', (world_size,))\n"
        "log_metrics(1, norm=DTensor.from_local(torch.ones(()), mesh, [Partial()]))"
    )
    with pytest.raises(RankFailure, match=r"norm is sharded over ranks, .*; log norm.full_tensor\(\)"):
        cluster.run(code, 0)


def test_nan_is_named_at_once_for_all_its_ranks_and_for_this_cell_only(notebook: Notebook) -> None:
    loop = "%%distributed\nfor step in range(6):\n    log_metrics(step, loss=float('nan') if {} else 0.5 + step)"
    outcome = notebook.run(loop.format("rank == 1 and step > 3")).check()
    assert outcome.lines == ["loss is NaN on rank 1 at step 4; before that it was 3.5 (step 3)"]
    assert notebook.run(loop.format("True")).check().lines == ["loss is NaN on ranks 0-1 at step 0"]
    notebook.run(loop.format("rank and step == 5")).check()
    assert "logged last, mean over ranks:" in notebook.run("%dist_status --text").text
    shown = notebook.run("%dist_status").check().outputs[-1]["data"]["text/html"]
    assert '<tspan fill="#0072b2">rank 0: 5.5</tspan> <tspan fill="#c27800">rank 1: nan</tspan>' in shown
    assert "<title>NaN</title>" in shown
    assert "values of " in notebook.run("cluster.metrics").text


def test_metrics_outlive_the_kernel_and_are_restored_once(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    cluster = Cluster(n=2, launcher="local", backend="none", keep=True, name="kept-metrics")
    cluster.run("for step in range(5): log_metrics(step, early=rank)")
    code = f"import os, time\nlog_metrics(0, late=rank)\nwhile not os.path.exists({str(stop)!r}): time.sleep(0.01)"
    cluster.run(f"{code}\nlog_metrics(1, late=rank)", block=False)
    assert wait_until(lambda: len(cluster.metrics) == 12)
    cluster.detach()
    again = Cluster.attach("kept-metrics")
    try:
        assert len(again.metrics) == 12
        stop.touch()
        again.missed[0].wait()
        assert again.metrics.gather("late").values.tolist() == [[0, 1], [0, 1]]
        assert again.metrics.gather("early").values.shape == (5, 2)
    finally:
        again.shutdown()
    files = sorted(path.name for path in again._session.launch.folders.run.glob("*.jsonl"))
    assert files == ["rank0.metrics.jsonl", "rank1.metrics.jsonl"]


def test_excess_metrics_are_thinned_reported_and_interruptible() -> None:
    with Cluster(n=2, launcher="local", backend="none", name="flood") as flooded:
        run = flooded.run("step = 0\nwhile True:\n    log_metrics(step, loss=1.0)\n    step += 1", block=False)
        assert wait_until(lambda: len(flooded.metrics) > 50_000, seconds=60)
        figures = flooded.telemetry.ranks
        assert {figures[rank].vitals.state for rank in range(2)} == {"running"}
        flooded.interrupt()
        with pytest.raises(RankFailure, match="KeyboardInterrupt"):
            run.wait(30)
        assert "calls of this cell were dropped" in run.stderr[0]
        assert flooded.run("step > 0").results == {0: True, 1: True}


def test_metrics_of_a_child_process_arrive(cluster: Cluster) -> None:
    cluster.run(
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Logging(Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, index): log_metrics(index, by_worker=index); return torch.ones(1)\n"
        "for batch in DataLoader(Logging(), batch_size=2, num_workers=2): pass",
        0,
    )
    assert wait_until(lambda: sorted(row.value for row in cluster.metrics.rows("by_worker")) == list(range(8)))


def test_late_metrics_of_a_thread_belong_to_its_cell(torchless: Cluster) -> None:
    code = """
import threading
goes, ends = threading.Event(), threading.Event()
def log():
    log_metrics(0, late=0.0)
    goes.set()
    ends.wait()
    log_metrics(1, late=1.0)
threading.Thread(target=log).start()
goes.wait()
"""
    numbers = [torchless.run(each, 0).number for each in (code, "ends.set()")]
    assert wait_until(lambda: len(torchless.metrics.rows("late")) == 2)
    assert {row.cell for row in torchless.metrics.rows("late")} <= set(numbers)


def test_module_logs_on_a_rank_and_does_nothing_in_a_script(cluster: Cluster) -> None:
    cluster.run("import jupyter_disttrain\njupyter_disttrain.log_metrics(3, imported=rank + 0.5)")
    assert cluster.metrics.gather("imported").values.tolist() == [[0.5, 1.5]]
    assert jupyter_disttrain.log_metrics(3, imported=1) is None  # type: ignore[func-returns-value]
    assert len(cluster.metrics.rows("imported")) == 2
