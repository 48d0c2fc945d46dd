"""Metrics and status figures with real ranks."""

from __future__ import annotations

import threading
import time
from ast import literal_eval
from typing import TYPE_CHECKING, Any

from jupyter_disttrain import Cluster
from jupyter_disttrain.notebook.views import widget
from jupyter_disttrain.notebook.views.status_text import status_text
from jupyter_disttrain.notebook.views.widget import ClusterWidget

from ....support.process_tools import wait_until

if TYPE_CHECKING:
    import pytest

    from ....support.notebook_driver import Notebook


def test_repeated_short_waits_are_not_reported_as_one_long_wait() -> None:
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
        assert 0 < max(waited) < 2.4  # half of the whole waiting time


def test_ranks_with_interleaved_loaders_report_their_data_time() -> None:
    code = """
import gc, time
from torch.utils.data import DataLoader
from jupyter_disttrain.features.telemetry.rank.progress import Progress
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


def test_data_loaders_of_all_kinds_are_timed_and_unchanged() -> None:
    code = """
import gc, time
from torch.utils.data import DataLoader, Sampler
from jupyter_disttrain.features.telemetry.rank.progress import Progress
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


def test_view_is_drawn_once_per_cell_however_often_it_is_shown(bare_notebook: Notebook) -> None:
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
    # Where no server sends the logs to a page, the kernel does.
    bare_notebook.run("%%distributed\nimport sys\nprint('of', rank, file=sys.stderr, flush=True)").check()
    widget = "from jupyter_disttrain.notebook.views.widget import ClusterWidget\nwidget = ClusterWidget(cluster)\n"
    output = bare_notebook.run(f"{widget}widget._answer({{'ask': 'log', 'rank': 1}})['logs']").check().text
    assert literal_eval(output) == [{"rank": 1, "parts": [{"stream": "stderr", "text": "of 1\n"}], "is_cut": False}]
    bare_notebook.run("%dist_shutdown").check()
    assert bare_notebook.run("1 + 1").check().text == "2"


def test_status_of_restarting_ranks_is_shown() -> None:
    with Cluster(n=1, launcher="local", backend="none", name="resets") as cluster:
        reset = threading.Thread(target=cluster.reset)
        reset.start()
        assert wait_until(lambda: not cluster.table)
        assert status_text(cluster) == "resets: its ranks are being restarted"
        reset.join()
        assert status_text(cluster).startswith("resets: rank 0 · local")


def test_failed_sample_does_not_freeze_the_page(torchless: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = threading.Semaphore(0)

    def fail(_cluster: Cluster) -> dict[str, Any]:
        samples.release()
        raise AttributeError("as while ranks are started again")

    shown = ClusterWidget(torchless)
    monkeypatch.setattr(widget, "snapshot", fail)
    assert all(samples.acquire(timeout=10) for _ in range(2))
    shown.close()


def test_late_metrics_of_a_thread_belong_to_its_cell() -> None:
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


def test_nan_on_several_ranks_is_reported_for_all_and_for_this_cell_only(notebook: Notebook) -> None:
    notebook.run("%%distributed\nlog_metrics(79, fallen=1.0)").check()
    outcome = notebook.run("%%distributed\nlog_metrics(0, fallen=float('nan'))").check()
    assert "fallen is NaN on ranks 0-1 at step 0" in outcome.lines
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
