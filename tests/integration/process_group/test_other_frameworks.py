"""Horovod and TensorFlow where they are not installed: advice and reserved ports.

With the frameworks themselves: ``tests/frameworks``.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import LaunchError, RankFailure

from ...support.leftovers import our_processes

if TYPE_CHECKING:
    from ...support.notebook_driver import Notebook

PLACES = "import os; os.environ['JAX_COORDINATOR_ADDRESS']"
MISSING = "raise ModuleNotFoundError('No module named horovod', name='horovod')"  # as its import does


def test_missing_tensorflow_is_named_before_anything_runs(bare_notebook: Notebook) -> None:
    outcome = bare_notebook.run("%dist_init --tf-config worker=2")
    assert outcome.status == "error"
    assert "TF_CONFIG was requested, but TensorFlow is not installed: pip install 'tensorflow>=2.16'" in outcome.text
    with pytest.raises(LaunchError, match="or leave --tf-config out"):
        Cluster(tf_roles=(("worker", 1),), launcher="local", name="untaken")
    assert not [process for process in our_processes() if "untaken" in " ".join(process.cmdline())]


def test_missing_horovod_is_named_with_its_build_command(cluster: Cluster) -> None:
    with pytest.raises(RankFailure, match=r"on this rank's host: jupyter disttrain horovod \(builds and installs it"):
        cluster.run(MISSING)
    assert cluster.run("repr(hvd)").results[0] == "<hvd: horovod.torch, started when it is used>"


def test_port_of_a_rank_is_reserved_until_a_server_uses_it(cluster: Cluster) -> None:
    (place,) = set(cluster.run(PLACES).results.values())
    host, _, port = place.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), 5)
    with socket.socket() as rude, pytest.raises(OSError, match="Address already in use"):
        rude.bind((host, int(port)))
    with socket.create_server((host, int(port))) as server:  # with SO_REUSEADDR
        assert server.getsockname()[1] == int(port)
