"""The ranks recover alike under either launcher: one starts them, unless a test names both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ...support.recovery_tools import is_intact

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_disttrain import Cluster


@pytest.fixture(scope="module", params=["local"])
def three(three: Cluster) -> Cluster:
    """Three ranks with short timeouts."""
    return three


@pytest.fixture
def pids(three: Cluster, pids: dict[int, int]) -> Iterator[dict[int, int]]:
    """The process ids of the ranks, which must be the same after the test and hold their variables."""
    yield pids
    assert is_intact(three, pids)
