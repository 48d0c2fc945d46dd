"""Sessions whose ranks are only records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from jupyter_disttrain.client.lifecycle import Lifecycle
from jupyter_disttrain.client.session import Session
from jupyter_disttrain.config.cluster import ClusterConfig

from .recorded import RecordedLaunch, join_background

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Lifecycle]]:
    lifecycles: list[Lifecycle] = []
    monkeypatch.setattr("jupyter_disttrain.client.lifecycle.Launch", RecordedLaunch)
    monkeypatch.setattr(RecordedLaunch, "started", [], raising=False)

    def start(**options: Any) -> Lifecycle:
        lifecycle = Lifecycle(Session(ClusterConfig(n=2, launcher="local", backend="none", name="recorded", **options)))
        lifecycles.append(lifecycle)
        lifecycle.start()
        return lifecycle

    yield start
    join_background()
    for lifecycle in lifecycles:
        lifecycle.shutdown()
