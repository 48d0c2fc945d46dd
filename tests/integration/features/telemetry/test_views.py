"""The views of a cluster: the widget with the picture below it, and the status as text."""

from __future__ import annotations

import threading
from ast import literal_eval
from typing import TYPE_CHECKING, Any

from jupyter_disttrain.notebook.views import widget
from jupyter_disttrain.notebook.views.status_text import status_text
from jupyter_disttrain.notebook.views.widget import ClusterWidget

from ....support.process_tools import wait_until

if TYPE_CHECKING:
    import pytest

    from jupyter_disttrain import Cluster

    from ....support.notebook_driver import Notebook


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


def test_status_of_restarting_ranks_is_shown(torchless: Cluster) -> None:
    reset = threading.Thread(target=torchless.reset)
    reset.start()
    assert wait_until(lambda: not torchless.table)
    assert status_text(torchless) == "torchless: its ranks are being restarted"
    reset.join()
    assert status_text(torchless).startswith("torchless: ranks 0-1 · local")


def test_failed_sample_does_not_freeze_the_page(torchless: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = threading.Semaphore(0)

    def fail(_cluster: Cluster) -> dict[str, Any]:
        samples.release()
        raise AttributeError("as while ranks are started again")

    shown = ClusterWidget(torchless)
    monkeypatch.setattr(widget, "state_of", fail)
    assert all(samples.acquire(timeout=10) for _ in range(2))
    shown.close()
