"""Clusters for scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", params=["warm", "cold"])
def either(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Ranks whose scripts are forked from the warm process, or are started."""
    with Cluster(n=2, launcher="local", name="scripts", warm=request.param == "warm") as cluster:
        yield cluster
