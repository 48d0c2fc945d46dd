"""The public interface of :class:`jupyter_disttrain.Cluster`."""

from __future__ import annotations

import psutil

from jupyter_disttrain import Cluster
from jupyter_disttrain.client.lifecycle import Lifecycle
from jupyter_disttrain.client.session import Session
from jupyter_disttrain.config.cluster import ClusterConfig
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
