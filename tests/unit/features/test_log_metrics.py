"""``log_metrics`` from the call to the table, the file and the data frame."""

from __future__ import annotations

import csv
import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from jupyter_disttrain.features.telemetry import metrics_table
from jupyter_disttrain.features.telemetry.metrics_table import MetricsTable
from jupyter_disttrain.features.telemetry.rank.log_metrics import LIMIT, NAMES, MetricsLog
from jupyter_disttrain.features.telemetry.rank.metrics_writer import MetricsFile
from jupyter_disttrain.protocol.metric_blocks import pack, unpack

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_disttrain.protocol.metric_blocks import Samples


class Rank:
    """A rank's log, and what it has sent."""

    def __init__(self) -> None:
        self.cell = 3  # the number of the running cell
        self.sent: list[Samples] = []
        self.log = MetricsLog(lambda: {"number": self.cell}, lambda data: self.sent.append(unpack(data)), lambda: None)

    @property
    def steps(self) -> list[int | None]:
        return [step for message in self.sent for _, step, _ in message.rows()]

    def end_cell(self) -> MetricsTable:
        """End the cell, and return what a client has then received."""
        self.log.end_cell()
        table = MetricsTable()
        for message in self.sent:
            table.add(0, message)
        return table


@pytest.fixture
def rank() -> Rank:
    """A rank that has logged nothing."""
    return Rank()


def test_process_that_may_be_killed_sends_small_messages() -> None:
    """Linux sends a small message whole or not at all."""
    sent: list[bytes] = []
    log = MetricsLog(lambda: {"number": 3}, sent.append, lambda: None, may_be_killed=True)
    for step in range(400):
        log.log_metrics(step, **{f"metric_{name}": float(step) for name in range(20)})
    log.end_cell()
    assert [step for data in sent for _, step, _ in unpack(data).rows()] == list(range(400))
    assert len(sent) > 1
    assert max(map(len, sent)) < 16384


def table_with(*samples: tuple[int, int, int | None, float]) -> MetricsTable:
    """Return a table of values of one metric: rank, cell, step, value."""
    table = MetricsTable()
    for rank, cell, step, value in samples:
        table.add(rank, unpack(pack([(1.0, step, {"loss": value})], cell)))
    return table


@pytest.mark.parametrize(
    ("step", "value", "error", "message"),
    [
        (1, "high", TypeError, "log_metrics accepts numbers, but loss is the text 'high'"),
        (1, None, TypeError, "log_metrics accepts numbers, but loss is a NoneType"),
        (1, torch.ones((), dtype=torch.complex64), TypeError, r"is complex; log e.g. loss.abs\(\)"),
        (1, torch.ones(3), ValueError, r"but loss has 3; log e.g. loss.mean\(\)"),
        (1.5, 1, ValueError, r"must be a whole number up to 2\*\*53, not 1.5"),
        ("one", 1, ValueError, r"must be a whole number up to 2\*\*53, not 'one'"),
        (2**60, 1, ValueError, r"must be a whole number up to 2\*\*53, not 1152921504606846976"),
    ],
)
def test_non_numbers_are_refused(rank: Rank, step: Any, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rank.log.log_metrics(step, good=1.0, loss=value)
    with pytest.raises(ValueError, match=r"log_metrics can't use the name '\\ud800': it can't be encoded"):
        rank.log.log_metrics(0, **{"\ud800": 1.0})
    assert len(rank.end_cell()) == 0


def test_numbers_of_many_types_are_accepted(rank: Rank) -> None:
    inf = math.inf
    values = [1, 2.5, True, torch.tensor(4), torch.tensor(5.0, requires_grad=True), torch.tensor([[6]]), -inf, math.nan]
    for step, value in enumerate(values):
        rank.log.log_metrics(torch.tensor(step), **{"größe/μ": value})  # type: ignore[arg-type]
    found = rank.end_cell().gather("größe/μ")
    assert found.steps.tolist() == list(range(len(values)))
    np.testing.assert_array_equal(found.values[:, 0], [1, 2.5, 1, 4, 5, 6, -inf, math.nan])
    np.testing.assert_array_equal(found.maximum, found.values[:, 0])


def test_names_past_the_limit_are_refused_once(rank: Rank, capsys: pytest.CaptureFixture[str]) -> None:
    for name in range(NAMES + 500):
        rank.log.log_metrics(0, **{f"m{name}": 1}, kept=2)
    assert len(rank.end_cell().names) == NAMES
    assert capsys.readouterr().err == (
        f"log_metrics: 'm{NAMES - 1}' and further new names are dropped, because this cell has logged {NAMES} "
        "metrics; put a varying number into the step, not into the name\n"
    )
    rank.log.log_metrics(0, of_the_next_cell=1.0)
    table = rank.end_cell()
    assert len(table.rows("kept")) == NAMES + 500
    assert "of_the_next_cell" in table.names


def test_value_without_a_name_is_refused() -> None:
    with pytest.raises(TypeError, match=r"needs a name for each value, e\.g\. log_metrics\(5, loss=2\.0\)"):
        Rank().log.log_metrics(5, 2.0)


@pytest.mark.filterwarnings("error")
def test_metric_is_gathered_by_step_and_rank() -> None:
    inf = math.inf
    found = table_with(*((rank, 1, step, rank + step) for step in range(3) for rank in range(2))).gather("loss")
    assert (found.ranks, found.steps.tolist(), found.values.tolist()) == ((0, 1), [0, 1, 2], [[0, 1], [1, 2], [2, 3]])
    for values, expected in ((found.mean, [0.5, 1.5, 2.5]), (found.minimum, [0, 1, 2]), (found.maximum, [1, 2, 3])):
        assert values.tolist() == expected
    diverged = table_with(*((rank, 1, step, value) for rank in range(2) for step, value in ((0, inf), (2, 1e308))))
    diverged.add(0, unpack(pack([(1.0, 1, {"loss": inf})], 1)))
    diverged.add(1, unpack(pack([(1.0, 1, {"loss": -inf})], 1)))
    np.testing.assert_array_equal(diverged.gather("loss").mean, [inf, math.nan, 1e308])
    np.testing.assert_array_equal(diverged.gather("loss").spread, [math.nan, inf, 0])
    with pytest.raises(KeyError, match="no rank has logged 'lost'; logged are: loss"):
        diverged.gather("lost")
    with pytest.raises(KeyError, match="cell 9 has not logged 'loss'; cells that have: 1"):
        diverged.gather("loss", cell=9)
    with pytest.raises(KeyError, match="no rank has logged 'loss', or anything else"):
        table_with().gather("loss")


def test_steps_may_decrease_be_missing_and_be_huge() -> None:
    jumping = table_with(*((0, 1, step, step + 0.5) for step in (3, 1, 2**53, 1))).gather("loss")
    assert jumping.steps.tolist() == [1, 3, 2**53]
    assert jumping.values[:2].tolist() == [[1.5], [3.5]]
    assert table_with((0, 1, None, 1), (1, 1, None, 3), (0, 1, None, 2)).gather("loss").steps.tolist() == [0, 1]


def test_repeated_cell_starts_a_new_curve_and_keeps_the_earlier_one() -> None:
    table = table_with(*((rank, 1, step, step) for rank in range(2) for step in range(5)), (0, 2, 0, 10), (0, 2, 1, 11))
    assert table.gather("loss").values.tolist() == [[10], [11]]
    assert table.gather("loss", cell=1).values.shape == (5, 2)


def test_frame_and_files_hold_every_value(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    table = table_with(*((rank, 4, step, rank + (step or 0)) for rank in range(2) for step in (0, 10, 20, None)))
    frame = table.to_frame()
    assert list(frame["step"].dropna()) == [0, 10, 20] * 2
    pivot = frame.dropna(subset="step").pivot_table(index="step", columns="rank", values="value")
    assert pivot.to_numpy().tolist() == [[0, 1], [10, 11], [20, 21]]
    assert set(frame["cell"]) == {4}
    assert str(frame["time"].dtype).endswith("UTC]")
    table.to_csv(tmp_path / "metrics.csv")
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["time_s", "cell", "step", "rank", "name", "value"]
    assert [float(row["value"]) for row in rows if row["rank"] == "1"] == [1, 11, 21, 1]
    table.to_tensorboard(tmp_path / "events")
    for rank in range(2):
        events = EventAccumulator(str(tmp_path / "events" / f"rank{rank}"))
        events.Reload()
        found = [(event.step, event.value) for event in events.Scalars("loss")]
        assert found == [(0, rank), (10, rank + 10), (20, rank + 20), (3, rank)]  # without a step: its number


def test_values_beyond_the_rate_limit_are_dropped_and_counted(rank: Rank, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(LIMIT + 5):
        rank.log.log_metrics(step, x=step)
    rank.log.end_cell()
    assert rank.steps == list(range(5, LIMIT + 5))
    assert {message.cell for message in rank.sent} == {3}
    assert capsys.readouterr().err.startswith("log_metrics: 5 calls of this cell were dropped, the earliest first")


def test_two_sending_threads_lose_and_repeat_no_value(rank: Rank) -> None:
    rank.log._per_second = 10**9  # nothing is dropped here
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            rank.log.send()

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(20_000):
        rank.log.log_metrics(step, x=1)
        if step % 100 == 0:
            rank.log.end_cell()
    stop.set()
    for thread in threads:
        thread.join()
    rank.log.end_cell()
    assert rank.steps == list(range(20_000))


class FailedDeviceValue:
    """A value on a device that has failed."""

    device = type("device", (), {"type": "cuda"})

    def is_there(self) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_failing_device_loses_only_its_own_values(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jupyter_disttrain.features.telemetry.rank.log_metrics._OnDevice", FailedDeviceValue)
    rank.log.log_metrics(0, x=1)
    rank.log._samples.append((0.0, 3, 1, {"x": FailedDeviceValue()}))
    rank.log.log_metrics(2, x=3)
    rank.log.end_cell()
    assert rank.steps == [0, 2]


def test_values_belong_to_the_cell_that_logged_them(rank: Rank) -> None:
    rank.log.log_metrics(0, x=1)
    rank.cell = 4
    rank.log.log_metrics(0, x=2)
    rank.log.end_cell()
    assert [(message.cell, values["x"]) for message in rank.sent for _, _, values in message.rows()] == [(3, 1), (4, 2)]


def test_table_keeps_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_table, "ROWS", 4000)
    table = MetricsTable()
    mark, seen = 0, 0
    for step in range(100):
        table.add(0, unpack(pack([(float(step), step * 100 + i, {"x": i}) for i in range(100)], cell=1)))
        mark, rows = table.since(mark)
        seen += len(rows)
    assert 3000 <= len(table) <= 4000
    assert seen == 10_000  # a reader that keeps up loses nothing
    assert table.rows()[-1].step == 9999
    steps = [row.step for row in table.rows()]
    assert steps == list(range(steps[0] or 0, 10_000))


def test_file_longer_than_the_table_is_read_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_table, "ROWS", 20)
    errors: list[OSError] = []
    file = MetricsFile(lambda _path, error: errors.append(error))
    file.place(str(tmp_path / "rank3.log"))
    for step in range(25):
        file.write(unpack(pack([(step + 1.0, step, {"x": math.nan})], cell=None)))
    file.close()
    with (tmp_path / "rank3.metrics.jsonl").open("a") as growing:
        growing.write('{"time_s')
    table = MetricsTable()
    table.read(tmp_path)
    assert [(row.rank, row.cell, row.step) for row in table.rows()] == [(3, None, step) for step in range(15, 25)]
    assert all(math.isnan(row.value) for row in table.rows())
    table.add(3, unpack(pack([(25.0, 24, {"x": 1.0}), (26.0, 25, {"x": 1.0})], cell=None)))
    assert [row.step for row in table.rows()][-2:] == [24, 25]  # what the file had is not added again
    assert errors == []


def test_samples_survive_serialization() -> None:
    samples: list[Any] = [
        (1.5, None, {"loss": 0.25, "größe": math.inf}),
        (2.5, 2**53, {"loss": -0.0, "größe": 1e-300}),
        (3.5, -3, {"loss": 1.0}),
        (4.5, 0, {}),
        (5.5, 7, {"größe": 1.0, "loss": 2.0}),
    ]
    there = unpack(pack(samples, cell=None))
    assert (list(there.rows()), there.cell) == (samples, None)
    assert [block.matrix.shape for block in there.blocks] == [(2, 4), (1, 3), (1, 2), (1, 4)]
    table = MetricsTable()
    table.add(1, there)
    assert [(row.step, row.name, row.value) for row in table.rows()] == [
        (step, name, value) for _, step, values in samples for name, value in values.items()
    ]


@pytest.mark.parametrize("data", [b"", b"123", b"\xff" * 40, pack([(0.0, 1, {"x": 1.0})], 1)[:-1], b"\x02\0\0\0{}"])
def test_invalid_samples_are_reported(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpack(data)
