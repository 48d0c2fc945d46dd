"""Figures that a review found to be wrong, or to cost more and more."""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
import warnings
from ast import literal_eval
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from jupyter_disttrain import Cluster
from jupyter_disttrain.cluster import metrics_table
from jupyter_disttrain.cluster.metrics_table import MetricsTable
from jupyter_disttrain.cluster.snapshot import metrics_packet, rank_snapshots
from jupyter_disttrain.cluster.stragglers import find_straggler
from jupyter_disttrain.cluster.telemetry import Telemetry, rates_between
from jupyter_disttrain.engine import pulse
from jupyter_disttrain.engine.progress import Progress
from jupyter_disttrain.engine.vitals import Vitals
from jupyter_disttrain.messages import RankVitals
from jupyter_disttrain.notebook.status import status_text
from jupyter_disttrain.ranks import RankInfo
from jupyter_disttrain.samples import pack, unpack

from .process_tools import wait_until

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
    progress = Progress()

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.zeros(1, requires_grad=True)])

    folds, network, critic = [optimizer() for _ in range(5)], optimizer(), optimizer()
    for fold in folds:
        for _ in range(100):
            progress._on_step(fold, (), {})
    assert progress.steps == 500 - 4  # a new one might be one that takes turns with the last
    progress.begin_cell()
    for _ in range(10):
        for each in (critic, critic, critic, network):
            progress._on_step(each, (), {})
    assert progress.steps - 496 == 30
    progress.begin_cell()
    for _ in range(100):
        progress._on_step(optimizer(), (), {})  # one that is made anew for each step
    assert progress.steps - 526 == 100


def test_loaders_of_all_kinds_are_counted_and_none_is_harmed() -> None:
    code = """
import gc, time
from torch.utils.data import DataLoader, Sampler
from jupyter_disttrain.engine.progress import Progress
(progress,) = [each for each in gc.get_objects() if isinstance(each, Progress)]
class Odd(Sampler):
    def __init__(self, length): self.length = length
    def __iter__(self): return iter(range(8))
    def __len__(self):
        if self.length is None: raise NotImplementedError
        return self.length
batches = [sum(1 for _ in DataLoader(list(range(8)), batch_size=2, sampler=Odd(length))) for length in (None, 2**64, 8)]
inside = []
inside.append(inside)
batches.append(len(list(DataLoader([1, 2], collate_fn=lambda _: inside))))
def held_up(batches):
    for number in range(100):
        time.sleep(0.1 if number == 4 else 0)  # as by another process
        yield next(batches)
together = [progress.loop for _ in zip(DataLoader(range(10)), held_up(iter(DataLoader(range(100)))))]
batches, together
"""
    with Cluster(n=1, launcher="local", name="odd") as cluster:
        cluster.run("from torch.utils.data import DataLoader")
        batches, together = cluster.run(code).results[0]
        assert batches == [4, 4, 4, 2]
        assert [(done, total) for done, total, _ in together[1:]] == [(done, 10) for done in range(2, 11)]
        assert all(left_s >= 0 for _, _, left_s in together[1:])


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
    # Where no server gives a page the logs, the kernel does.
    bare_notebook.run("%%distributed\nimport sys\nprint('of', rank, file=sys.stderr, flush=True)").check()
    widget = "from jupyter_disttrain.notebook.widget import ClusterWidget\nwidget = ClusterWidget(cluster)\n"
    told = bare_notebook.run(f"{widget}widget._answer({{'ask': 'log', 'rank': 1}})['logs']").check().text
    assert literal_eval(told) == [{"rank": 1, "parts": [{"stream": "stderr", "text": "of 1\n"}], "is_cut": False}]
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


def test_a_history_is_thinned_alike_however_it_was_logged() -> None:
    table = MetricsTable()
    for rank in range(2):  # epoch by epoch, with many batches in each
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


def test_what_a_thread_logs_after_its_cell_is_the_cells() -> None:
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
    with Cluster(n=1, launcher="local", backend="none", name="late") as cluster:
        cluster.run(code)
        assert wait_until(lambda: cluster.table[0].state == "idle")
        cluster.run("ends.set()")
        assert wait_until(lambda: len(cluster.metrics) == 2)
        assert {row.cell for row in cluster.metrics.rows()} <= {1, 2}


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


def test_nan_on_several_ranks_is_said_of_all_and_of_this_cell_alone(notebook: Notebook) -> None:
    notebook.run("%%distributed\nlog_metrics(79, fallen=1.0)").check()
    told = notebook.run("%%distributed\nlog_metrics(0, fallen=float('nan'))").check()
    assert "fallen is NaN on ranks 0-1 at step 0" in told.lines
    both = notebook.run(
        "%%distributed\nlog_metrics(0, fallen=2.0)\nlog_metrics(1, fallen=float('nan') if rank else 1.0)"
    )
    assert "fallen is NaN on rank 1 at step 1; before that it was 2 (step 0)" in both.check().lines
    assert "logged last, mean over ranks:" in notebook.run("%dist_status --text").text
    shown = notebook.run("%dist_status").check().outputs[-1]["data"]["text/html"]
    assert '<tspan fill="#0072b2">rank 0: 1</tspan> <tspan fill="#c27800">rank 1: nan</tspan>' in shown
    assert "<title>NaN</title>" in shown
    assert notebook.run("cluster.metrics").text.startswith("<")
    assert "values of " in notebook.run("cluster.metrics").text
    notebook.run("%%distributed\nalike = torch.ones(3)").check()
    assert notebook.run("cluster.diff('alike')").text == "alike is the same on ranks 0-1 (1 part)"


def test_a_cell_that_has_ended_shows_nothing_of_itself_any_more() -> None:
    """The end of a cell is seen at once, and its figures come once a second."""
    telemetry = Telemetry(1.0)
    ranks = {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1, "node_rank": 0, "node_count": 1}
    info = RankInfo(**ranks, host="node1", pid=1, backend="gloo", device="cpu")
    told = RankVitals(time_s=1.0, beat_s=1.0, state="running", cell=7, execution_count=3, line=2, done=46, total=60)

    def shown(known: str) -> dict[str, Any]:
        return rank_snapshots(telemetry, [info], {0: known})[0]

    telemetry.take(0, RankVitals.msg_type, json.dumps(told.to_content()).encode())
    assert shown("running")["done"] == 46
    assert "done" not in shown("idle")  # the notebook's process knows that it has ended
    telemetry.end_cell(0)
    assert telemetry.ranks[0].vitals.state == "idle"
    late = replace(told, time_s=2.0, beat_s=1.1, done=58)  # the rank wrote these figures before the end
    telemetry.take(0, RankVitals.msg_type, json.dumps(late.to_content()).encode())
    assert telemetry.ranks[0].vitals.state == "idle"
    assert not {"cell", "line", "done", "total"} & shown("running").keys()
    following = replace(told, time_s=3.0, beat_s=3.0, cell=8, done=1)
    telemetry.take(0, RankVitals.msg_type, json.dumps(following.to_content()).encode())
    assert (telemetry.ranks[0].vitals.state, shown("running")["done"]) == ("running", 1)
