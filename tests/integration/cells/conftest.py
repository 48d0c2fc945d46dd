"""The launcher makes no difference to a cell: the shared ranks are started by one, unless a test names others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from jupyter_disttrain import Cluster


@pytest.fixture(scope="module", params=["local"])
def cluster(cluster: Cluster) -> Cluster:
    """Two ranks, shared by all modules."""
    return cluster


@pytest.fixture(scope="module", params=["local"])
def three(three: Cluster) -> Cluster:
    """Three ranks with short timeouts."""
    return three
