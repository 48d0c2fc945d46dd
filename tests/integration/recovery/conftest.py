"""The ranks recover alike under either launcher: one starts them, unless a test names both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from jupyter_disttrain import Cluster


@pytest.fixture(scope="module", params=["local"])
def three(three: Cluster) -> Cluster:
    """Three ranks with short timeouts."""
    return three
