"""Metrics and status figures: step counts, histories, bounds on memory."""

from __future__ import annotations

import json
import mmap
import os
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from jupyter_disttrain.features.telemetry import metrics_table
from jupyter_disttrain.features.telemetry.client import Telemetry
from jupyter_disttrain.features.telemetry.metrics_table import MetricsTable
from jupyter_disttrain.features.telemetry.rank import status_page
from jupyter_disttrain.features.telemetry.rank.process_stats import Vitals
from jupyter_disttrain.features.telemetry.rank.progress import Progress
from jupyter_disttrain.features.telemetry.rank_figures import rates_between
from jupyter_disttrain.features.telemetry.snapshot import metrics_packet, rank_snapshots
from jupyter_disttrain.features.telemetry.stragglers import find_straggler
from jupyter_disttrain.protocol.messages import RankVitals
from jupyter_disttrain.protocol.metric_blocks import pack, unpack
from jupyter_disttrain.protocol.states import RankState

from ..records import cell_started, rank_info

if TYPE_CHECKING:
    import pytest


def test_optimizers_of_a_cell_are_counted_and_alternating_ones_count_once() -> None:
    progress = Progress(lambda: None, lambda _loop: None)

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.zeros(1, requires_grad=True)])

    folds, network, critic = [optimizer() for _ in range(5)], optimizer(), optimizer()
    for fold in folds:
        for _ in range(100):
            progress._on_step(fold, (), {})
    assert progress.steps == 500 - 4  # a new optimizer could be one that alternates with the last
    progress.reset(cell_started())
    for _ in range(10):
        for each in (critic, critic, critic, network):
            progress._on_step(each, (), {})
    assert progress.steps - 496 == 30
    progress.reset(cell_started())
    for _ in range(100):
        progress._on_step(optimizer(), (), {})  # an optimizer that is created again in each step
    assert progress.steps - 526 == 100


def test_page_that_is_being_written_reads_as_its_previous_version() -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    status_page.write(
        page, status_page.RankStatus(beat_s=time.monotonic(), cell=3, steps=70, seen=5, call=b"all_reduce")
    )
    status_page.write_loop(page, status_page.LoopStatus(cell=3, done=4, total=9))
    shown = {"status": lambda: status_page.read(page), "loop": lambda: status_page.read_loop(page)}
    wire: Any = SimpleNamespace(uses=lambda: 1, **shown)
    vitals = Vitals(os.getpid(), wire, lambda: None, lambda _record: None)
    before = vitals._of_rank(time.monotonic(), None)
    assert (before.cell, before.steps, before.seen, before.call) == (3, 70, 5, "all_reduce")
    assert (before.done, before.total) == (4, 9)
    page[status_page.AT] |= 1  # the state in which a rank stopped at this point leaves it
    page[status_page.LOOP_AT] |= 1
    now = vitals._of_rank(time.monotonic() + 10, None)
    assert (now.cell, now.steps, now.state, now.done) == (3, 70, "not responding", 4)


def some(rank: int, cell: int, **values: float) -> tuple[int, Any]:
    return rank, unpack(pack([(float(step), step, values) for step in range(3)], cell, 0))


def test_metric_logged_now_is_drawn_whatever_was_logged_before() -> None:
    table = MetricsTable()
    for number in range(30):
        table.add(*some(0, 1, **{f"loss_{number}": 1.0}))
    mark = len(table)
    table.add(*some(0, 2, loss=0.5))
    assert [each.name for each in table.gather_last(2)] == ["loss_29", "loss"]
    _, header, _ = metrics_packet(table, mark)
    assert header["names"] == ["loss"], "other names are not sent each time"
    table.add(*some(0, 3, loss_0=0.5))
    assert [each.name for each in table.gather_last(2)] == ["loss_0", "loss"]


def test_history_holds_the_last_cell_of_each_metric() -> None:
    table = MetricsTable()
    for cell in range(1, 21):
        table.add(0, unpack(pack([(0.0, step, {"loss": 1.0}) for step in range(400)], cell, 0)))
    _, header, columns = metrics_packet(table, 0)
    cells = np.frombuffer(columns, np.int32, header["count"], 12 * header["count"])
    assert set(cells) == {20}
    assert header["count"] == 400


def test_history_is_thinned_uniformly_however_it_was_logged() -> None:
    table = MetricsTable()
    for rank in range(2):  # per epoch, with many batches in each
        for epoch in range(10):
            table.add(rank, unpack(pack([(0.0, epoch, {"loss": 1.0})] * 1000, 1, 0)))
    table.add(0, unpack(pack([(0.0, 0, {"free": 1.0})], 1, 0)))
    table.add(0, unpack(pack([(0.0, None, {"free": 1.0})] * 40_000, 1, 0)))
    for number in range(2000):
        table.add(*some(0, 1, **{f"name{number}": 1.0}))
    _, header, columns = metrics_packet(table, 0)
    count = header["count"]
    steps = np.frombuffer(columns, np.float64, count)
    names = np.frombuffer(columns, np.uint16, count, 16 * count)
    ranks = np.frombuffer(columns, np.uint16, count, 18 * count)
    loss = names == header["names"].index("loss")
    for rank in range(2):
        seen, how_often = np.unique(steps[loss & (ranks == rank)], return_counts=True)
        assert seen.tolist() == list(range(10))
        assert 100 < how_often.min() <= how_often.max() < 200
    assert 1000 < (names == header["names"].index("free")).sum() < 2000
    assert len(header["names"]) == 2002
    table = MetricsTable()
    table.add(0, unpack(pack([(0.0, step, {"loss": 1e300}) for step in range(30_000)], 1, 0)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, header, columns = metrics_packet(table, 0)
    assert 1000 < header["count"] < 2000
    assert metrics_packet(MetricsTable(), 0)[1]["count"] == 0


def test_names_that_differ_in_each_step_use_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_table, "MOST_SETS", 10)
    table = MetricsTable()
    for step in range(100):
        table.add(*some(0, 1, **{f"expert{step % 13}": 1.0, f"expert{13 + step % 17}": 2.0}))
    assert len(table._numbers_of) <= 10
    assert table.gather("expert12").mean.tolist() == [1.0] * 3


def test_few_samples_of_a_rank_are_not_a_finding() -> None:
    began = RankVitals(time_s=0, beat_s=1, state="running", cell=1)
    slow = replace(began, beat_s=16, steps=100, checks=60, waits=0, seen=2)  # two samples that stand for sixty checks
    fast = replace(slow, waits=60)
    rates = {rank: rates_between(began, each) for rank, each in enumerate((slow, fast))}
    assert rates[0] is not None
    assert rates[0].checks == 2
    assert find_straggler({rank: each for rank, each in rates.items() if each is not None}) is None


def test_ended_cell_shows_no_current_figures() -> None:
    """The end of a cell is known at once, while its figures arrive once a second."""
    telemetry = Telemetry(1.0)
    info = rank_info(0, 1)
    status = RankVitals(time_s=1.0, beat_s=1.0, state="running", cell=7, execution_count=3, line=2, done=46, total=60)

    def shown(known: str) -> dict[str, Any]:
        return rank_snapshots(telemetry, [info], {0: RankState(known)})[0]

    telemetry.take(0, RankVitals.msg_type, json.dumps(status.to_content()).encode())
    assert shown("running")["done"] == 46
    assert "done" not in shown("idle")  # the notebook's process knows that the cell has ended
    telemetry.end_cell(0)
    assert telemetry.ranks[0].vitals.state == "idle"
    late = replace(status, time_s=2.0, beat_s=1.1, done=58)  # the rank wrote these figures before the end
    telemetry.take(0, RankVitals.msg_type, json.dumps(late.to_content()).encode())
    assert telemetry.ranks[0].vitals.state == "idle"
    assert not {"cell", "line", "done", "total"} & shown("running").keys()
    following = replace(status, time_s=3.0, beat_s=3.0, cell=8, done=1)
    telemetry.take(0, RankVitals.msg_type, json.dumps(following.to_content()).encode())
    assert (telemetry.ranks[0].vitals.state, shown("running")["done"]) == ("running", 1)
