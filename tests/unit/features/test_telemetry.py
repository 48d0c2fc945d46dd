"""Rates and histories of ranks, with simulated samples."""

from __future__ import annotations

import io
import json
import math

import pytest

from jupyter_disttrain.features.telemetry.client import Telemetry
from jupyter_disttrain.features.telemetry.rank.progress import Pass, Progress
from jupyter_disttrain.features.telemetry.rank_figures import Rates
from jupyter_disttrain.features.telemetry.stragglers import find_straggler
from jupyter_disttrain.protocol.messages import RankVitals

from ..records import cell_started


def test_resumed_progress_bar_counts_only_its_own_steps() -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    progress = Progress(lambda: None, lambda _loop: None)
    progress.reset(cell_started())
    progress._began_s -= 60.0
    with tqdm(total=1000, initial=900, file=io.StringIO()) as bar:
        assert math.isnan(progress.loop[2])
        bar.start_t -= 10.0
        bar.update(10)
        assert progress.loop[:2] == (910, 1000)
        assert progress.loop[2] == pytest.approx(90.0, rel=0.1)
        with tqdm(total=5, file=io.StringIO()) as inner:
            inner.update(1)
            assert progress.loop[:2] == (910, 1000)
            bar.update(90)
            assert progress.loop[:2] == (1, 5)  # the other bar has finished
    assert progress.loop[:2] == (0, 0)


def test_abandoned_loop_is_no_longer_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Pass(done=3, total=10, since=100.0, last=102.0)
    monkeypatch.setattr("jupyter_disttrain.features.telemetry.rank.progress.time.monotonic", lambda: 111.0)
    assert found.as_loop() == (3, 10, 7.0)
    monkeypatch.setattr("jupyter_disttrain.features.telemetry.rank.progress.time.monotonic", lambda: 112.1)
    assert found.as_loop()[:2] == (0, 0)


def test_equally_fast_ranks_are_not_named() -> None:
    def rates(waiting: float, checks: int = 100) -> Rates:
        return Rates(
            seconds=10,
            steps=100,
            steps_per_s=10,
            samples_per_s=None,
            waiting=waiting,
            waiting_for_data=None,
            checks=checks,
        )

    assert find_straggler({0: rates(0.3), 1: rates(0.35), 2: rates(0.28)}) is None
    assert find_straggler({0: rates(0.02), 1: rates(0.0)}) is None
    assert find_straggler({0: rates(0.6, checks=10), 1: rates(0.0, checks=10)}) is None  # too few checks
    assert find_straggler({0: rates(0.6)}) is None
    found = find_straggler({0: rates(0.6), 1: rates(0.0), 2: rates(0.5)})
    assert found is not None
    assert str(found) == (
        "rank 1 is slower than the others: it takes 0.1 s a step by itself, ranks 0,2 0.045 s, and they wait for it"
    )


def test_history_of_ten_minutes_is_kept() -> None:
    telemetry = Telemetry(1.0)
    for second in range(2000):
        vitals = RankVitals(time_s=second, beat_s=second + 1, state="running", cell=1, steps=2 * second, checks=second)
        telemetry.take(0, vitals.msg_type, json.dumps(vitals.to_content()).encode())
    figures = telemetry.ranks[0]
    assert len(figures.history) == 600
    rates = figures.rates()
    assert rates is not None
    assert (rates.seconds, rates.steps_per_s, rates.waiting) == (5, 2, 0)


def test_rank_without_new_values_keeps_its_history() -> None:
    telemetry = Telemetry(1.0)
    for second in (1, 2, 2, 2):
        vitals = RankVitals(time_s=second, beat_s=second, state="not responding", steps=2 * second)
        telemetry.take(0, vitals.msg_type, json.dumps(vitals.to_content()).encode())
    assert len(telemetry.ranks[0].history) == 4
    vitals = RankVitals(time_s=9, beat_s=9, state="idle")  # of a new process
    telemetry.take(0, vitals.msg_type, json.dumps(vitals.to_content()).encode())
    assert len(telemetry.ranks[0].history) == 1


def test_rank_without_any_value_has_no_rates() -> None:
    telemetry = Telemetry(1.0)
    for beat in (0.0, 1000.0):
        vitals = RankVitals(time_s=1, beat_s=beat, state="running", cell=1, steps=7)
        telemetry.take(0, vitals.msg_type, json.dumps(vitals.to_content()).encode())
    assert telemetry.ranks[0].rates() is None  # and not 7 steps in 1000 s
