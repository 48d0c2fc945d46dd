"""``log_metrics`` from the call to the table, the file and the data frame."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import pytest

from jupyter_disttrain.features.telemetry import metrics_table
from jupyter_disttrain.features.telemetry.metrics_table import MetricsTable
from jupyter_disttrain.features.telemetry.rank.log_metrics import LIMIT, MetricsLog
from jupyter_disttrain.protocol.metric_blocks import pack, unpack

if TYPE_CHECKING:
    from jupyter_disttrain.protocol.metric_blocks import Samples


def test_values_beyond_the_rate_limit_are_dropped_and_counted() -> None:
    sent: list[Samples] = []
    log = MetricsLog(lambda: {"number": 3}, lambda data: sent.append(unpack(data)), lambda: None)
    for step in range(LIMIT + 5):
        log.log_metrics(step, x=step)
    log.end_cell()
    assert sum(message.dropped for message in sent) == 5
    steps = [step for message in sent for _, step, _ in message.rows()]
    assert steps == list(range(5, LIMIT + 5))
    assert {message.cell for message in sent} == {3}


def test_two_sending_threads_lose_and_repeat_no_value() -> None:
    sent: list[int] = []
    log = MetricsLog(
        lambda: {"number": 1},
        lambda data: sent.extend(step or 0 for _, step, _ in unpack(data).rows()),
        lambda: None,
    )
    log._share = 10**9  # nothing is dropped here
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
    assert sent == list(range(20_000))


class FailedDeviceValue:
    """A value on a device that has failed."""

    device = type("device", (), {"type": "cuda"})

    def is_there(self) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_failing_device_loses_only_its_own_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jupyter_disttrain.features.telemetry.rank.log_metrics._OnDevice", FailedDeviceValue)
    sent: list[Samples] = []
    log = MetricsLog(lambda: {"number": 1}, lambda data: sent.append(unpack(data)), lambda: None)
    log.log_metrics(0, x=1)
    log._samples.append((0.0, 1, 1, {"x": FailedDeviceValue()}))
    log.log_metrics(2, x=3)
    log.end_cell()
    assert [[step for _, step, _ in message.rows()] for message in sent] == [[0, 2]]
    assert sent[0].dropped == 1


def test_values_belong_to_the_cell_that_logged_them() -> None:
    sent: list[Samples] = []
    cell = {"number": 1}
    log = MetricsLog(lambda: cell, lambda data: sent.append(unpack(data)), lambda: None)
    log.log_metrics(0, x=1)
    cell = {"number": 2}
    log.log_metrics(0, x=2)
    log.end_cell()
    assert [(message.cell, values["x"]) for message in sent for _, _, values in message.rows()] == [(1, 1), (2, 2)]


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


def test_file_longer_than_the_table_is_read_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_table, "ROWS", 10)
    table = MetricsTable()
    table.extend(0, [(float(step), None, step, {"x": 1.0}) for step in range(25)])
    assert [row.step for row in table.rows()] == list(range(15, 25))


def test_samples_survive_serialization() -> None:
    samples: list[Any] = [
        (1.5, None, {"loss": 0.25, "größe": math.inf}),
        (2.5, 2**53, {"loss": -0.0, "größe": 1e-300}),
        (3.5, -3, {"loss": 1.0}),
        (4.5, 0, {}),
        (5.5, 7, {"größe": 1.0, "loss": 2.0}),
    ]
    there = unpack(pack(samples, cell=None, dropped=3))
    assert (list(there.rows()), there.cell, there.dropped) == (samples, None, 3)
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
