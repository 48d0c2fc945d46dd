"""``log_metrics`` from the call to the table, the file and the data frame."""

from __future__ import annotations

import json
import math
import threading
from typing import TYPE_CHECKING, Any

import pytest

from jupyter_disttrain.features.telemetry import metrics_table
from jupyter_disttrain.features.telemetry.metrics_table import MetricsTable
from jupyter_disttrain.features.telemetry.rank.log_metrics import LIMIT, MetricsLog
from jupyter_disttrain.protocol.metric_blocks import pack, unpack

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_disttrain.protocol.metric_blocks import Samples


@pytest.fixture
def sent() -> list[Samples]:
    """What ``log`` has sent."""
    return []


@pytest.fixture
def cell() -> dict[str, Any]:
    """The running cell of ``log``."""
    return {"number": 3}


@pytest.fixture
def log(sent: list[Samples], cell: dict[str, Any]) -> MetricsLog:
    """The log of a rank."""
    return MetricsLog(lambda: cell, lambda data: sent.append(unpack(data)), lambda: None)


def steps_of(sent: list[Samples]) -> list[int | None]:
    return [step for message in sent for _, step, _ in message.rows()]


def test_values_beyond_the_rate_limit_are_dropped_and_counted(
    log: MetricsLog, sent: list[Samples], capsys: pytest.CaptureFixture[str]
) -> None:
    for step in range(LIMIT + 5):
        log.log_metrics(step, x=step)
    log.end_cell()
    assert steps_of(sent) == list(range(5, LIMIT + 5))
    assert {message.cell for message in sent} == {3}
    assert capsys.readouterr().err.startswith("log_metrics: 5 calls of this cell were dropped, the earliest first")


def test_two_sending_threads_lose_and_repeat_no_value(log: MetricsLog, sent: list[Samples]) -> None:
    log._per_second = 10**9  # nothing is dropped here
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            log.send()

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(20_000):
        log.log_metrics(step, x=1)
        if step % 100 == 0:
            log.end_cell()
    stop.set()
    for thread in threads:
        thread.join()
    log.end_cell()
    assert steps_of(sent) == list(range(20_000))


class FailedDeviceValue:
    """A value on a device that has failed."""

    device = type("device", (), {"type": "cuda"})

    def is_there(self) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_failing_device_loses_only_its_own_values(
    log: MetricsLog, sent: list[Samples], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jupyter_disttrain.features.telemetry.rank.log_metrics._OnDevice", FailedDeviceValue)
    log.log_metrics(0, x=1)
    log._samples.append((0.0, 3, 1, {"x": FailedDeviceValue()}))
    log.log_metrics(2, x=3)
    log.end_cell()
    assert steps_of(sent) == [0, 2]


def test_values_belong_to_the_cell_that_logged_them(log: MetricsLog, sent: list[Samples], cell: dict[str, Any]) -> None:
    log.log_metrics(0, x=1)
    cell["number"] = 4
    log.log_metrics(0, x=2)
    log.end_cell()
    assert [(message.cell, values["x"]) for message in sent for _, _, values in message.rows()] == [(3, 1), (4, 2)]


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
    records = [{"time_s": step + 1.0, "cell": None, "step": step, "values": {"x": "nan"}} for step in range(25)]
    (tmp_path / "rank3.metrics.jsonl").write_text("\n".join(['0, "cut": 1}', *map(json.dumps, records), '{"time_s']))
    table = MetricsTable()
    table.read(tmp_path)
    assert [(row.rank, row.cell, row.step) for row in table.rows()] == [(3, None, step) for step in range(15, 25)]
    assert all(math.isnan(row.value) for row in table.rows())
    table.add(3, unpack(pack([(25.0, 24, {"x": 1.0}), (26.0, 25, {"x": 1.0})], cell=None)))
    assert [row.step for row in table.rows()][-2:] == [24, 25]  # what the file had is not added again


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
