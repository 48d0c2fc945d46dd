"""Telemetry with simulated samples: progress, histories, rates, remarks, what front ends receive."""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import time
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from jupyter_disttrain.features.telemetry.client import Telemetry
from jupyter_disttrain.features.telemetry.rank import status_page
from jupyter_disttrain.features.telemetry.rank.process_stats import Vitals
from jupyter_disttrain.features.telemetry.rank.progress import NOWHERE, Loop, Pass, Progress
from jupyter_disttrain.features.telemetry.rank_figures import Rates
from jupyter_disttrain.features.telemetry.snapshot import Feed, snapshot
from jupyter_disttrain.features.telemetry.warnings import find_straggler
from jupyter_disttrain.protocol.messages import METRICS, RankVitals
from jupyter_disttrain.protocol.metric_blocks import pack
from jupyter_disttrain.protocol.states import RankState

from ..records import cell_started, rank_info


@pytest.fixture
def telemetry() -> Telemetry:
    """The telemetry of a cluster that nothing has reported to yet."""
    return Telemetry(1.0, print)


def report(telemetry: Telemetry, rank: int = 0, **fields: Any) -> None:
    """Deliver a rank's figures; without ``beat_s``, of a heartbeat at the same time."""
    vitals = RankVitals(**{"beat_s": fields["time_s"], "state": "running", "cell": 1, **fields})
    telemetry.take(rank, vitals.msg_type, json.dumps(vitals.to_content()).encode())


def logged(telemetry: Telemetry, rank: int, cell: int, steps: Any = range(3), **values: float) -> None:
    """Deliver metrics of a rank."""
    telemetry.take(rank, METRICS, pack([(float(at), step, values) for at, step in enumerate(steps)], cell))


def test_optimizers_of_a_cell_are_counted_and_alternating_ones_count_once() -> None:
    progress = Progress()

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


def test_resumed_progress_bar_counts_only_its_own_steps() -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    progress = Progress()
    progress.reset(cell_started())
    progress._began_s -= 60.0
    with tqdm(total=1000, initial=900, file=io.StringIO()) as bar:
        assert progress.loop.left_s is None
        bar.start_t -= 10.0
        bar.update(10)
        assert (progress.loop.done, progress.loop.total) == (910, 1000)
        assert progress.loop.left_s == pytest.approx(90.0, rel=0.1)
        with tqdm(total=5, file=io.StringIO()) as inner:
            inner.update(1)
            assert (progress.loop.done, progress.loop.total) == (910, 1000)
            bar.update(90)
            assert (progress.loop.done, progress.loop.total) == (1, 5)  # the other bar has finished
    assert (progress.loop.done, progress.loop.total) == (0, 0)


def test_abandoned_loop_is_no_longer_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    iterator = Progress()  # or any other object
    found = Pass(done=3, total=10, since=100.0, last=102.0, iterator=weakref.ref(iterator))
    monkeypatch.setattr("jupyter_disttrain.features.telemetry.rank.progress.time.monotonic", lambda: 111.0)
    assert found.as_loop() == Loop(done=3, total=10, left_s=7.0, passed_s=11.0)
    without_loop = replace(found, iterator=weakref.ref(Progress()))
    assert without_loop.as_loop() is NOWHERE
    monkeypatch.setattr("jupyter_disttrain.features.telemetry.rank.progress.time.monotonic", lambda: 112.1)
    assert found.as_loop() is NOWHERE


def test_loops_that_end_within_seconds_are_short() -> None:
    assert not Loop(done=1, total=57, passed_s=0.01).is_long
    assert not Loop(done=28, total=57, left_s=0.3, passed_s=0.3).is_long
    assert not Loop(done=1, total=57, left_s=8.0, passed_s=0.2).is_long, "too early to tell"
    assert Loop(done=2, total=57, left_s=27.5, passed_s=1.0).is_long
    assert Loop(done=1, total=57, passed_s=5.1).is_long, "its first round takes long"


def test_page_that_is_being_written_reads_as_its_previous_version() -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    now = time.monotonic()
    status = RankVitals(time_s=1.0, beat_s=now, state="running", cell=3, done=4, total=9, call="all_reduce")
    wire: Any = SimpleNamespace(uses=lambda: 1)
    vitals = Vitals(os.getpid(), wire, lambda: None, lambda _record: None)
    assert status_page.read(page) is None
    for _ in range(2):
        status_page.write(page, status)
    vitals._status = status_page.read(page) or vitals._status
    assert vitals._vitals(now, vitals._status) == replace(status, time_s=0.0, uses=1)
    page[status_page.AT] |= 1  # the state in which a rank stopped at this point leaves it
    page[status_page.AT + 8 : status_page.AT + 16] = bytes(8)
    assert status_page.read(page) is None
    assert vitals._vitals(now + 10, vitals._status).state == "not responding"


def test_equally_fast_ranks_are_not_named() -> None:
    def rates(waiting: float, checks: int = 100) -> Rates:
        fields = {"seconds": 10, "steps": 100, "steps_per_s": 10, "samples_per_s": None, "waiting_for_data": None}
        return Rates(waiting=waiting, checks=checks, **fields)  # type: ignore[arg-type]

    assert not find_straggler({0: rates(0.3), 1: rates(0.35), 2: rates(0.28)})
    assert not find_straggler({0: rates(0.02), 1: rates(0.0)})
    assert not find_straggler({0: rates(0.6, checks=10), 1: rates(0.0, checks=10)})  # too few checks
    assert not find_straggler({0: rates(0.6)})
    assert find_straggler({0: rates(0.6), 1: rates(0.0), 2: rates(0.5)}) == (
        "rank 1 is slower than the others: it takes 0.1 s a step by itself, ranks 0,2 0.045 s, and they wait for it"
    )


def test_few_samples_of_a_rank_are_not_a_finding(telemetry: Telemetry) -> None:
    for rank, waits in enumerate((0, 60)):
        report(telemetry, rank, time_s=1)
        # Two samples that stand for sixty checks.
        report(telemetry, rank, time_s=16, steps=100, checks=60, waits=waits, seen=2)
    rates = telemetry.ranks[0].rates(15)
    assert rates is not None
    assert rates.checks == 2
    assert telemetry.remarks.of_speed({0, 1}) == []


def test_history_of_ten_minutes_is_kept(telemetry: Telemetry) -> None:
    for second in range(2000):
        report(telemetry, time_s=second, beat_s=second + 1, steps=2 * second, checks=second)
        report(telemetry, time_s=second, beat_s=second + 1.5, steps=2 * second + 1, checks=second, done=1, total=2)
    figures = telemetry.ranks[0]
    assert [vitals.time_s for vitals in figures.history] == list(range(1400, 2000))
    rates = figures.rates()
    assert rates is not None
    assert (rates.seconds, rates.steps_per_s, rates.waiting) == (5.5, 2, 0)


def test_rank_without_new_values_keeps_its_history(telemetry: Telemetry) -> None:
    for time_s, beat_s in ((1, 1), (2, 2), (3, 2), (4, 2)):
        report(telemetry, time_s=time_s, beat_s=beat_s, steps=2 * beat_s)
    assert len(telemetry.ranks[0].history) == 4
    report(telemetry, time_s=9, cell=None)  # of a new process
    assert len(telemetry.ranks[0].history) == 1


def test_rank_without_any_value_has_no_rates(telemetry: Telemetry) -> None:
    for beat_s in (0.0, 1000.0):
        report(telemetry, time_s=1, beat_s=beat_s, steps=7)
    assert telemetry.ranks[0].rates() is None  # and not 7 steps in 1000 s


def test_ended_cell_shows_no_current_figures(telemetry: Telemetry) -> None:
    """The end of a cell is known at once, while its figures arrive once a second."""
    fields: dict[str, Any] = {"cell": 7, "execution_count": 3, "line": 2, "total": 60}

    def shown(known: str) -> dict[str, Any]:
        found: dict[str, Any] = snapshot(telemetry, [(rank_info(0, 1), RankState(known))])["ranks"][0]
        return found

    report(telemetry, time_s=1.0, done=46, uses=5, **fields)
    assert (shown("running")["done"], shown("idle")["uses"]) == (46, 5)
    assert "done" not in shown("idle")  # the notebook's process knows that the cell has ended
    telemetry.end_cell(0)
    assert telemetry.ranks[0].vitals.state == "idle"
    changes = telemetry.changes
    report(telemetry, time_s=2.0, done=58, **fields)  # the rank wrote these figures before the end
    assert telemetry.ranks[0].vitals.state == "idle"
    assert not {"cell", "line", "done", "total"} & shown("running").keys()
    assert telemetry.changes == changes
    report(telemetry, time_s=3.0, done=1, **{**fields, "cell": 8})
    assert (telemetry.ranks[0].vitals.state, shown("running")["done"]) == ("running", 1)
    assert telemetry.changes > changes


def test_nan_is_reported_for_its_cell_with_the_value_before(telemetry: Telemetry) -> None:
    remarks = telemetry.remarks
    logged(telemetry, 0, 1, loss=5.0)
    logged(telemetry, 0, 2, [10, 11, None], loss=0.5)
    logged(telemetry, 1, 2, [None], loss=math.nan, rate=math.nan)
    assert remarks.of_values(2) == ["loss is NaN on rank 1", "rate is NaN on rank 1"]
    telemetry.take(0, METRICS, pack([(4.0, 12, {"loss": 2.0}), (5.0, 13, {"loss": math.nan})], 2))
    logged(telemetry, 0, 3, [7], rate=math.nan)
    telemetry.take(1, METRICS, pack([(1.0, 3, {"rate": 0.25}), (2.0, 4, {"rate": math.nan})] * 2, 4))
    for _ in range(2):
        assert remarks.of_values(1) == []
        assert remarks.of_values(2) == ["loss is NaN on ranks 0-1", "rate is NaN on rank 1"]
        assert remarks.of_values(3) == ["rate is NaN on rank 0 at step 7"]
        assert remarks.of_values(4) == ["rate is NaN on rank 1 at step 4; before that it was 0.25 (step 3)"]


def test_table_of_metrics_is_made_with_the_first_value(telemetry: Telemetry, tmp_path: Path) -> None:
    telemetry.read_metrics(tmp_path)
    assert Feed(telemetry).metrics() is None
    assert telemetry.remarks.of_values(1) == []
    assert telemetry.metrics_arrived == 0
    assert telemetry._metrics is None
    logged(telemetry, 0, 1, [1], loss=math.nan)
    assert telemetry.metrics_arrived == 1
    assert telemetry.remarks.of_values(1) == ["loss is NaN on rank 0 at step 1"]


def test_metric_logged_now_is_drawn_whatever_was_logged_before(telemetry: Telemetry) -> None:
    for number in range(30):
        logged(telemetry, 0, 1, **{f"loss_{number}": 1.0})
    feed = Feed(telemetry)
    assert feed.metrics() is not None
    assert feed.metrics() is None
    logged(telemetry, 0, 2, loss=0.5)
    assert [each.name for each in telemetry.metrics.gather_last(2)] == ["loss_29", "loss"]
    header, _ = feed.metrics() or ({}, b"")
    assert header["names"] == ["loss"], "other names are not sent each time"
    logged(telemetry, 0, 3, loss_0=0.5)
    assert [each.name for each in telemetry.metrics.gather_last(2)] == ["loss_0", "loss"]


def columns(telemetry: Telemetry) -> tuple[list[str], dict[str, np.ndarray]]:
    """What a new front end receives: names, and the columns."""
    header, data = Feed(telemetry).metrics() or ({}, b"")
    found, at = {}, 0
    for name, kind in {"steps": "f8", "values": "f4", "cells": "i4", "name_at": "u2", "ranks": "u2"}.items():
        found[name] = np.frombuffer(data, kind, header["count"], at)
        at += found[name].nbytes
    assert at == len(data)
    return header["names"], found


def test_history_holds_the_last_cell_of_each_metric(telemetry: Telemetry) -> None:
    for cell in range(1, 21):
        logged(telemetry, 0, cell, range(400), loss=1.0)
    _, found = columns(telemetry)
    assert found["cells"].tolist() == [20] * 400


def test_history_is_thinned_uniformly_however_it_was_logged(telemetry: Telemetry) -> None:
    for rank in range(2):  # per epoch, with many batches in each
        for epoch in range(10):
            logged(telemetry, rank, 1, [epoch] * 1000, loss=1.0)
    logged(telemetry, 0, 1, [0], free=1.0)
    logged(telemetry, 0, 1, [None] * 40_000, free=1.0)
    for number in range(2000):
        logged(telemetry, 0, 1, **{f"name{number}": 1.0})
    names, found = columns(telemetry)
    loss = found["name_at"] == names.index("loss")
    for rank in range(2):
        seen, how_often = np.unique(found["steps"][loss & (found["ranks"] == rank)], return_counts=True)
        assert seen.tolist() == list(range(10))
        assert 100 < how_often.min() <= how_often.max() < 200
    free = found["steps"][found["name_at"] == names.index("free")]
    assert 1000 < len(free) < 2000
    assert np.isnan(free).sum() == len(free) - 1
    assert len(names) == 2002
    telemetry = Telemetry(1.0, print)
    logged(telemetry, 0, 1, range(30_000), loss=1e300)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, found = columns(telemetry)
    assert 1000 < len(found["values"]) < 2000
    assert np.isinf(found["values"]).all()
