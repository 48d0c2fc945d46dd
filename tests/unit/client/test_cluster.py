"""The public interface of :class:`jupyter_disttrain.Cluster`."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.client.lifecycle import Lifecycle
from jupyter_disttrain.client.registry.cluster_file import ClusterFile
from jupyter_disttrain.client.session import Session
from jupyter_disttrain.config.cluster import ClusterConfig
from jupyter_disttrain.config.hosts import parse_hosts
from jupyter_disttrain.config.slurm import SlurmOptions
from jupyter_disttrain.features.checkpoints.client import Checkpoints
from jupyter_disttrain.features.reloading.client import Reloading
from jupyter_disttrain.features.scripts.client import Scripts
from jupyter_disttrain.features.staging.client import Staging

MOST_NAMES = 39


def composed() -> Cluster:
    """Return a cluster whose ranks were not started."""
    cluster = Cluster.__new__(Cluster)
    cluster._compose(Lifecycle(Session(ClusterConfig(n=2, name="composed"))))
    return cluster


def test_a_cluster_has_few_public_names() -> None:
    children = psutil.Process().children()
    names = [name for name in dir(composed()) if not name.startswith("_")]
    assert len(names) <= MOST_NAMES, names
    assert psutil.Process().children() == children


def test_a_feature_is_one_object_for_the_life_of_the_cluster() -> None:
    cluster = composed()
    for name, kind in {
        "checkpoints": Checkpoints,
        "reloading": Reloading,
        "scripts": Scripts,
        "staging": Staging,
    }.items():
        feature = getattr(cluster, name)
        assert isinstance(feature, kind)
        assert getattr(cluster, name) is feature  # it keeps what it did


@pytest.mark.parametrize(
    "config",
    [
        ClusterConfig(n=3, gpus=(0, 2), share_gpus=True, tf_roles=(("chief", 1), ("worker", 2))),
        ClusterConfig(hosts=parse_hosts("a:2,b"), spares=("c",), launcher="ssh", controller_ports=(40000, 40007)),
        ClusterConfig(launcher="slurm", slurm=SlurmOptions(nodes=2, more=("--qos=low",)), forward=("A", "B=1")),
    ],
)
def test_configuration_is_read_from_the_cluster_file_as_it_was(config: ClusterConfig) -> None:
    there = SimpleNamespace(config=json.loads(json.dumps(asdict(config))))
    assert ClusterFile.load_config(cast("Any", there)) == config
