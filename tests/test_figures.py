"""Figures that a review found to be wrong, or to cost more and more."""

from __future__ import annotations

import mmap
import os
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from jupyter_disttrain import Cluster
from jupyter_disttrain.cluster import metrics_table
from jupyter_disttrain.cluster.metrics_table import MetricsTable
from jupyter_disttrain.cluster.snapshot import metrics_packet
from jupyter_disttrain.cluster.stragglers import find_straggler
from jupyter_disttrain.cluster.telemetry import rates_between
from jupyter_disttrain.engine import pulse
from jupyter_disttrain.engine.progress import Progress
from jupyter_disttrain.engine.vitals import Vitals
from jupyter_disttrain.messages import RankVitals
from jupyter_disttrain.notebook.status import status_text
from jupyter_disttrain.samples import pack, unpack

from .test_lifecycle import wait_until

if TYPE_CHECKING:
    import pytest

    from .notebook_driver import Notebook


def test_who_waits_again_and_again_does_not_count_as_who_waits_for_ever() -> None:
    code = """
import time
if rank == 0:
    for _ in range(16):
        dist.recv(torch.zeros(1), 1)
        sum(range(200_000))  # what it does with it
else:
    for _ in range(16):
        time.sleep(0.3)
        dist.send(torch.ones(1), 0)
"""
    with Cluster(n=2, launcher="local", sample_s=0.1, name="coordinator") as cluster:
        cluster.run(code)  # the first time is slow
        run = cluster.run(code, block=False)
        waited = []
        while not run.done:
            waited.append(cluster.telemetry.ranks[0].vitals.waits_s)
            time.sleep(0.05)
        run.wait()
        assert 0 < max(waited) < 2.4  # half of what it waited in all


def test_ranks_whose_loader_is_interrupted_by_another_say_how_long_they_need() -> None:
    code = """
import gc, time
from torch.utils.data import DataLoader
from jupyter_disttrain.engine.progress import Progress
(progress,) = [each for each in gc.get_objects() if isinstance(each, Progress)]
seen = {}
for number, _ in enumerate(DataLoader(range(100)), 1):
    time.sleep(0.02)
    if number == 50:
        for _ in DataLoader(range(10)): pass  # validation
    if number > 51: seen[number] = progress.loop
seen
"""
    with Cluster(n=1, launcher="local", name="validates") as cluster:
        cluster.run("from torch.utils.data import DataLoader")
        for done, total, left_s in cluster.run(code).results[0].values():
            assert total == 100
            assert left_s >= 0.02 * (100 - done)


def test_each_optimizer_of_a_cell_counts_and_those_that_take_turns_count_once() -> None:
    progress, folds, network, critic = Progress(), [object() for _ in range(5)], object(), object()
    for optimizer in folds:
        for _ in range(100):
            progress._on_step(optimizer, (), {})
    assert progress.steps == 500 - 4  # a new one might be one that takes turns with the last
    progress.begin_cell()
    for _ in range(10):
        for optimizer in (critic, critic, critic, network):
            progress._on_step(optimizer, (), {})
    assert progress.steps - 496 == 30


def test_a_page_that_is_being_written_tells_what_it_told_before() -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    pulse.write(page, pulse.Pulse(beat_s=time.monotonic(), cell=3, steps=70, seen=5, call=b"all_reduce"))
    wire: Any = SimpleNamespace(pulse=lambda: pulse.read(page), uses=lambda: (True, 1))
    vitals = Vitals(os.getpid(), wire, lambda: None, lambda _record: None)
    before = vitals._of_rank(time.monotonic(), None)
    assert (before.cell, before.steps, before.seen, before.call) == (3, 70, 5, "all_reduce")
    page[pulse.AT] |= 1  # as the rank leaves it that is stopped right there
    now = vitals._of_rank(time.monotonic() + 10, None)
    assert (now.cell, now.steps, now.state) == (3, 70, "not responding")


def test_a_view_is_drawn_once_a_cell_however_often_it_is_shown(bare_notebook: Notebook) -> None:
    bare_notebook.run("%dist_init -n 2 --launcher local --backend none").check()
    bare_notebook.run("%%distributed --watch\nlog_metrics(1, loss=0.5)").check()
    for _ in range(3):
        bare_notebook.run("%dist_status").check()
    bare_notebook.run(
        "updates = []\n"
        "publish = get_ipython().display_pub.publish\n"
        "def count(*arguments, **options):\n"
        "    updates.append(options.get('update', False))\n"
        "    publish(*arguments, **options)\n"
        "get_ipython().display_pub.publish = count"
    ).check()
    bare_notebook.run("1 + 1").check()
    assert (
        bare_notebook.run("get_ipython().display_pub.publish = publish; sum(updates)").text == "2"
    )  # one for each cell
    bare_notebook.run("%dist_shutdown").check()
    assert bare_notebook.run("1 + 1").check().text == "2"


def test_the_status_of_ranks_that_are_started_anew_is_said() -> None:
    with Cluster(n=1, launcher="local", backend="none", name="anew") as cluster:
        reset = threading.Thread(target=cluster.reset)
        reset.start()
        assert wait_until(lambda: not cluster.table)
        assert status_text(cluster) == "anew: its ranks are being started anew"
        reset.join()
        assert status_text(cluster).startswith("anew: rank 0 · local")


def some(rank: int, cell: int, **values: float) -> tuple[int, Any]:
    return rank, unpack(pack([(float(step), step, values) for step in range(3)], cell, 0))


def test_what_is_logged_now_is_drawn_whatever_was_logged_before() -> None:
    table = MetricsTable()
    for number in range(30):
        table.add(*some(0, 1, **{f"loss_{number}": 1.0}))
    mark = len(table)
    table.add(*some(0, 2, loss=0.5))
    assert [each.name for each in table.gather_last(2)] == ["loss_29", "loss"]
    _, header, _ = metrics_packet(table, mark)
    assert header["names"] == ["loss"], "and who watches is not told of all the others each time"
    table.add(*some(0, 3, loss_0=0.5))
    assert [each.name for each in table.gather_last(2)] == ["loss_0", "loss"]


def test_a_history_holds_the_last_cell_of_each_metric() -> None:
    table = MetricsTable()
    for cell in range(1, 21):
        table.add(0, unpack(pack([(0.0, step, {"loss": 1.0}) for step in range(400)], cell, 0)))
    _, header, columns = metrics_packet(table, 0)
    cells = np.frombuffer(columns, np.int32, header["count"], 12 * header["count"])
    assert set(cells) == {20}
    assert header["count"] == 400


def test_names_that_differ_in_each_step_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_table, "MOST_SETS", 10)
    table = MetricsTable()
    for step in range(100):
        table.add(*some(0, 1, **{f"expert{step % 13}": 1.0, f"expert{13 + step % 17}": 2.0}))
    assert len(table._numbers_of) <= 10
    assert table.gather("expert12").mean.tolist() == [1.0] * 3


def test_few_sights_of_a_rank_found_nothing() -> None:
    began = RankVitals(time_s=0, beat_s=1, state="running", cell=1)
    slow = replace(began, beat_s=16, steps=100, looks=60, waits=0, seen=2)  # two sights that stand for sixty looks
    fast = replace(slow, waits=60)
    rates = {rank: rates_between(began, each) for rank, each in enumerate((slow, fast))}
    assert rates[0] is not None
    assert rates[0].looks == 2
    assert find_straggler({rank: each for rank, each in rates.items() if each is not None}) is None
