"""``log_metrics`` from the call to the table, the file and the data frame."""

from __future__ import annotations

import csv
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

import jupyter_disttrain
from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import RankFailure
from jupyter_disttrain.features.telemetry.rank.log_metrics import NAMES

from ....support.process_tools import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from ....support.notebook_driver import Notebook

LOOP = """
import math
for step in range(10):
    log_metrics(step, loss=1 / (step + 1 + rank), accuracy=torch.tensor(step / 10))
"""


def test_values_are_available_when_the_cell_has_ended(cluster: Cluster) -> None:
    cluster.run(LOOP)
    loss = cluster.metrics.gather("loss")
    assert loss.ranks == (0, 1)
    assert loss.steps.tolist() == list(range(10))
    expected = np.array([[1 / (step + 1 + rank) for rank in range(2)] for step in range(10)])
    np.testing.assert_allclose(loss.values, expected)
    np.testing.assert_allclose(loss.mean, expected.mean(axis=1))
    np.testing.assert_allclose(loss.minimum, expected[:, 1])
    np.testing.assert_allclose(loss.maximum, expected[:, 0])
    np.testing.assert_allclose(loss.spread, expected[:, 0] - expected[:, 1])
    np.testing.assert_allclose(cluster.metrics.gather("accuracy").values[:, 0], np.arange(10) / 10, atol=1e-7)
    with pytest.raises(KeyError, match="no rank has logged 'lost'; logged are: loss, accuracy"):
        cluster.metrics.gather("lost")


@pytest.mark.filterwarnings("error")
def test_diverged_values_are_gathered_without_a_warning(cluster: Cluster) -> None:
    values = "[float('inf'), (-1) ** rank * float('inf'), 1e308]"
    cluster.run(f"for step, value in enumerate({values}): log_metrics(step, off=value)")
    off = cluster.metrics.gather("off")
    np.testing.assert_array_equal(off.mean, [np.inf, np.nan, 1e308])
    np.testing.assert_array_equal(off.spread, [np.nan, np.inf, 0])


def test_repeated_cell_starts_a_new_curve_and_keeps_the_earlier_one(cluster: Cluster) -> None:
    first = cluster.run("for step in range(5): log_metrics(step, again=step)")
    cluster.run("for step in range(3): log_metrics(step, again=10 + step)", 0)
    assert cluster.metrics.gather("again").values.tolist() == [[10], [11], [12]]
    assert cluster.metrics.gather("again", cell=first.number).values.shape == (5, 2)


def test_steps_may_decrease_be_missing_and_be_huge(cluster: Cluster) -> None:
    cluster.run("for step in (3, 1, 2**53, 1): log_metrics(step, jumping=step + 0.5)", 0)
    found = cluster.metrics.gather("jumping")
    assert found.steps.tolist() == [1, 3, 2**53]
    assert found.values[:2].tolist() == [[1.5], [3.5]]
    cluster.run("for value in 'ab': log_metrics(counted=ord(value))")
    assert cluster.metrics.gather("counted").steps.tolist() == [0, 1]


def test_metric_may_change_its_number_type_but_not_to_text(cluster: Cluster) -> None:
    kinds = "1, 2.5, True, torch.tensor(4), float('nan'), 'five', 6"
    refused = "try: log_metrics(step, kind=value)\n    except TypeError as error: print(error)"
    run = cluster.run(f"for step, value in enumerate([{kinds}]):\n    {refused}", 0)
    assert run.stdout[0] == "log_metrics accepts numbers, but kind is the text 'five'\n"
    found = cluster.metrics.gather("kind")
    assert found.steps.tolist() == [0, 1, 2, 3, 4, 6]
    np.testing.assert_array_equal(found.values[:, 0], [1, 2.5, 1, 4, math.nan, 6])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("log_metrics(1, loss='high')", "log_metrics accepts numbers, but loss is the text 'high'"),
        ("log_metrics(1, loss=None)", "log_metrics accepts numbers, but loss is a NoneType"),
        ("log_metrics(1, loss=torch.ones((), dtype=torch.complex64))", r"is complex; log e.g. loss.abs\(\)"),
        (
            (
                "from torch.distributed.tensor import Partial, DTensor\n"
                "from torch.distributed.device_mesh import init_device_mesh\n"
                "mesh = init_device_mesh('cpu', (world_size,))\n"
                "log_metrics(1, norm=DTensor.from_local(torch.ones(()), mesh, [Partial()]))"
            ),
            r"norm is sharded over ranks, .*; log norm.full_tensor\(\)",
        ),
        ("log_metrics(1, loss=torch.ones(3))", r"but loss has 3; log e.g. loss.mean\(\)"),
        ("log_metrics(1.5, loss=1)", r"must be a whole number up to 2\*\*53, not 1.5"),
        ("log_metrics('one', loss=1)", r"must be a whole number up to 2\*\*53, not 'one'"),
        ("log_metrics(2**60, loss=1)", r"must be a whole number up to 2\*\*53, not 1152921504606846976"),
    ],
)
def test_non_numbers_are_refused(cluster: Cluster, call: str, message: str) -> None:
    before = len(cluster.metrics)
    with pytest.raises(RankFailure, match=message):
        cluster.run(call, 0)
    assert len(cluster.metrics) == before


@pytest.mark.parametrize("value", ["torch.tensor(2.0, requires_grad=True)", "torch.tensor([[2]])", "True + 1", "2.0"])
def test_numbers_of_many_types_are_accepted(cluster: Cluster, value: str) -> None:
    cluster.run(f"log_metrics(torch.tensor(4), kind={value})", 1)
    row = cluster.metrics.rows("kind")[-1]
    assert (row.rank, row.step, row.value) == (1, 4, 2.0)


def test_nan_on_one_rank_is_named_at_once_and_once(notebook: Notebook) -> None:
    cell = notebook.run(
        "%%distributed\nfor step in range(6):\n"
        "    log_metrics(step, loss=float('nan') if rank == 1 and step > 3 else 0.5 + step)"
    )
    assert cell.check().lines == ["loss is NaN on rank 1 at step 4; before that it was 3.5 (step 3)"]


def test_infinity_arrives_unchanged(cluster: Cluster) -> None:
    cluster.run("log_metrics(0, up=float('inf'), down=torch.tensor(float('-inf')), none=float('nan'))", 0)
    assert cluster.metrics.rows("up")[-1].value == math.inf
    assert cluster.metrics.rows("down")[-1].value == -math.inf
    assert math.isnan(cluster.metrics.gather("none").maximum[0])


def test_names_past_the_limit_are_refused_once(cluster: Cluster) -> None:
    before = len(cluster.metrics.names)
    with Cluster(n=1, launcher="local", backend="none", name="many-names") as many:
        run = many.run(f"for name in range({NAMES + 500}): log_metrics(0, **{{f'm{{name}}': 1}}, kept=2)")
        assert len(many.metrics.names) == NAMES
        assert len(many.metrics.rows("kept")) == NAMES + 500
        assert run.stderr[0] == (
            f"log_metrics: 'm{NAMES - 1}' and further new names are dropped, because this cell has logged {NAMES} "
            "metrics; put a varying number into the step, not into the name\n"
        )
        many.run("log_metrics(0, of_the_next_cell=1.0)")
        assert "of_the_next_cell" in many.metrics.names
    assert len(cluster.metrics.names) == before


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


def test_frame_and_csv_file_hold_every_value(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.run("for step in range(3): log_metrics(step, framed=step * (rank + 1))\nlog_metrics(framed=7)")
    frame = cluster.metrics.to_frame()
    mine = frame[(frame["name"] == "framed") & (frame["cell"] == run.number)]
    assert len(mine) == 8
    assert mine["step"].isna().sum() == 2
    pivot = mine.dropna(subset="step").pivot_table(index="step", columns="rank", values="value")
    assert pivot.to_numpy().tolist() == [[0, 0], [1, 2], [2, 4]]
    assert str(frame["time"].dtype).endswith("UTC]")
    cluster.metrics.to_csv(tmp_path / "metrics.csv")
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["name"] == "framed"]
    assert [float(row["value"]) for row in rows if row["rank"] == "1"] == [0, 2, 4, 7]


def test_tensorboard_reads_the_event_files(cluster: Cluster, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    cluster.run("for step in range(4): log_metrics(step * 10, boarded=step + rank)")
    cluster.metrics.to_tensorboard(tmp_path / "events")
    for rank in range(2):
        events = EventAccumulator(str(tmp_path / "events" / f"rank{rank}"))
        events.Reload()
        assert [(event.step, event.value) for event in events.Scalars("boarded")] == [
            (step * 10, step + rank) for step in range(4)
        ]


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


def test_name_that_cannot_be_written_is_refused(cluster: Cluster) -> None:
    with pytest.raises(RankFailure, match=r"log_metrics can't use the name '\\ud800': it can't be encoded"):
        cluster.run("log_metrics(0, **{'\\ud800': 1.0})", 0)
    cluster.run("log_metrics(0, **{'größe/μ': 1.0})", 0)
    assert "größe/μ" in cluster.metrics.names


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


def test_module_logs_on_a_rank_and_does_nothing_in_a_script(cluster: Cluster) -> None:
    cluster.run("import jupyter_disttrain\njupyter_disttrain.log_metrics(3, imported=rank + 0.5)")
    assert cluster.metrics.gather("imported").values.tolist() == [[0.5, 1.5]]
    assert jupyter_disttrain.log_metrics(3, imported=1) is None  # type: ignore[func-returns-value]
    assert len(cluster.metrics.rows("imported")) == 2
