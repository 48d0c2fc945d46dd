"""What ranks have for Horovod, TensorFlow and JAX where those are not installed: variables, ports, one line of advice.

With the frameworks themselves: ``tests/frameworks``.
"""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.config import ClusterConfig, parse_roles
from jupyter_disttrain.errors import LaunchError, RankFailure, UsageError
from jupyter_disttrain.framework_variables import framework_environment, tf_config

from .leftovers import our_processes

if TYPE_CHECKING:
    from jupyter_disttrain.config import Roles

    from .notebook_driver import Notebook

PLACES = "import os; os.environ['JAX_COORDINATOR_ADDRESS']"
MISSING = "raise ModuleNotFoundError('No module named horovod', name='horovod')"  # as its import does


@pytest.mark.parametrize(
    ("text", "roles"),
    [(None, ()), ("", ()), ("worker=2", (("worker", 2),)), ("chief=1, ps=2", (("chief", 1), ("ps", 2)))],
)
def test_roles_are_read(text: str | None, roles: Roles) -> None:
    assert parse_roles(text) == roles


@pytest.mark.parametrize("part", ["worker", "worker=0", "worker=x", "boss=1", "worker=-1", "=2"])
def test_a_role_that_can_t_be_read_is_named(part: str) -> None:
    with pytest.raises(UsageError, match=f"cannot read '{part}' in --tf-config ps=1,{part}; write each role once"):
        parse_roles(f"ps=1,{part}")
    with pytest.raises(UsageError, match="cannot read 'ps=2'"):
        parse_roles("ps=1,ps=2")


def test_roles_say_how_many_ranks() -> None:
    assert ClusterConfig(tf_roles=parse_roles("worker=2,ps=1")).count == 3
    with pytest.raises(UsageError, match=r"--tf-config worker=2,ps=1 is for 3 ranks, not 2; leave -n out"):
        ClusterConfig(n=2, tf_roles=parse_roles("worker=2,ps=1"))


def test_each_rank_has_its_role() -> None:
    places = ["a:1", "a:2", "b:1"]
    configs = [tf_config(rank, places, parse_roles("worker=2,ps=1")) for rank in range(3)]
    assert all(each["cluster"] == {"worker": ["a:1", "a:2"], "ps": ["b:1"]} for each in configs)
    assert [each["task"] for each in configs] == [
        {"type": "worker", "index": 0},
        {"type": "worker", "index": 1},
        {"type": "ps", "index": 0},
    ]
    assert json.loads(framework_environment(2, places, (("worker", 3),))["TF_CONFIG"])["task"]["index"] == 2
    assert "TF_CONFIG" not in framework_environment(2, places, ())


def test_tensorflow_that_is_missing_is_named_before_anything_runs(bare_notebook: Notebook) -> None:
    outcome = bare_notebook.run("%dist_init --tf-config worker=2")
    assert outcome.status == "error"
    assert "TF_CONFIG was asked for, and there is no TensorFlow: pip install 'tensorflow>=2.16'" in outcome.text
    with pytest.raises(LaunchError, match="or leave --tf-config out"):
        Cluster(tf_roles=(("worker", 1),), launcher="local", name="untaken")
    assert not [process for process in our_processes() if "untaken" in " ".join(process.cmdline())]


def test_horovod_that_is_missing_is_named_with_the_command_that_builds_it(cluster: Cluster) -> None:
    with pytest.raises(RankFailure, match=r"on this rank's host: jupyter disttrain horovod \(builds and installs it"):
        cluster.run(MISSING)
    assert cluster.run("repr(hvd)").results[0] == "<hvd: horovod.torch, started when it is used>"


def test_a_rank_s_port_is_its_own_until_a_server_takes_it(cluster: Cluster) -> None:
    (place,) = set(cluster.run(PLACES).results.values())
    host, _, port = place.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), 5)
    with socket.socket() as rude, pytest.raises(OSError, match="Address already in use"):
        rude.bind((host, int(port)))
    with socket.create_server((host, int(port))) as server:  # with SO_REUSEADDR
        assert server.getsockname()[1] == int(port)
