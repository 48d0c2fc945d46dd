"""Progress of a start, shown in the cell, to Python and to the side panel's server."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.client.registry import cluster_file
from jupyter_disttrain.client.startup.progress import FILE, StartProgress
from jupyter_disttrain.config.cluster import ClusterConfig
from jupyter_disttrain.errors import LaunchError
from jupyter_disttrain.launchers.folders import Folders
from jupyter_disttrain.server.clusters import Clusters

if TYPE_CHECKING:
    from ...support.notebook_driver import Notebook, Outcome


def test_cell_shows_start_progress_and_keeps_the_last_line(bare_notebook: Notebook) -> None:
    shown: list[str] = []

    def note(message: dict[str, Any], outcome: Outcome) -> None:
        if message["msg_type"].endswith("display_data"):
            shown.append(outcome.text.strip())

    started = bare_notebook.run("%dist_init -n 2 --launcher local", on_message=note).check()
    assert shown[0] == "starting 2 ranks"
    assert shown[1] == "starting: 0 of 2 ranks, importing torch"
    assert shown[-2] == "starting: 2 ranks, forming the process group"
    assert len(started.outputs) == 1
    assert re.fullmatch(r"ranks 0-1 ready in \d+\.\d s · \S+ · cpu · gloo", started.text.strip())
    shown.clear()
    again = bare_notebook.run("%dist_reset", on_message=note).check()
    assert shown[:2] == ["ending ranks 0-1", "starting 2 ranks"]
    assert again.text.strip().startswith("ranks 0-1 ready in ")


def test_server_sees_a_cluster_from_its_start_on() -> None:
    server = Clusters(logging.getLogger("test"))
    seen: list[tuple[str, dict[str, Any]]] = []
    with Cluster(
        n=2, launcher="local", backend="none", name="slow", on_start=lambda text: seen.append((text, server.snapshot()))
    ) as cluster:
        after = server.snapshot()
        for text, snapshot in seen:
            found = [each for each in snapshot["starting"] if each["id"] == cluster.cluster_id]
            assert [(each["name"], each["text"]) for each in found] == [("slow", text)]
            assert cluster.cluster_id not in [each["id"] for each in snapshot["clusters"]]
        assert cluster.cluster_id in [each["id"] for each in after["clusters"]], "the server checks at once"
        assert not [each for each in after["starting"] if each["id"] == cluster.cluster_id]
        assert seen[0][0] == "starting 2 ranks"
    server.close()


def test_interrupted_start_is_not_listed() -> None:
    folders = Folders.make("cut")
    try:
        progress = StartProgress(ClusterConfig(n=3), print, lambda _text: None)
        progress.open(folders)
        assert folders.cluster_id in [each.cluster_id for each in cluster_file.starting()]
        path = folders.profile / FILE
        there = json.loads(path.read_text())
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        for change in ({"pid": gone.pid}, {"pid_started": "1"}, {"host": "another"}, {"unknown": 1}):
            path.write_text(json.dumps(there | change))
            assert folders.cluster_id not in [each.cluster_id for each in cluster_file.starting()], change
        progress.close()
        assert not path.exists()
    finally:
        folders.remove()


def test_failed_start_leaves_no_presence_file() -> None:
    with pytest.raises(LaunchError):
        Cluster(n=2, launcher="local", backend="none", name="fails", start_timeout_s=0.01)
    assert "fails" not in [each.name for each in cluster_file.starting()]
