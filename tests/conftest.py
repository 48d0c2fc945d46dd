"""Fixtures with real clusters and real kernels, for all tests."""

from __future__ import annotations

import functools
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster

from .support.notebook_driver import Notebook
from .support.shell_tools import end, left_idle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# A test that does not depend on the launcher names one, with indirect=True or in the conftest.py of its folder.
LAUNCHERS = ["mpi", "local"]

pytest_plugins = [
    "tests.support.leftovers",
    "tests.support.join_tools",
    "tests.support.stage_tools",
    "tests.lab.fixtures",
]


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the tests in the background has them ignore interrupts, and their kernels would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def started() -> Iterator[Callable[[str], Cluster]]:
    """Start two ranks by a launcher at the first call; later calls return the same ones."""
    with ExitStack() as stack:
        yield functools.cache(lambda launcher: stack.enter_context(Cluster(n=2, launcher=launcher)))


@pytest.fixture(scope="module", params=LAUNCHERS)
def cluster(request: pytest.FixtureRequest, started: Callable[[str], Cluster]) -> Cluster:
    """Two ranks, by every launcher, shared by all modules."""
    return started(request.param)


@pytest.fixture(scope="module")
def torchless() -> Iterator[Cluster]:
    """Two ranks without torch, which a reset replaces quickly, for tests that do not depend on the launcher."""
    with Cluster(n=2, launcher="local", backend="none", name="torchless") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def shared_notebook() -> Iterator[Notebook]:
    """A kernel with two ranks; tests use ``notebook``."""
    with Notebook() as notebook:
        notebook.run("%dist_init -n 2").check()
        yield notebook


@pytest.fixture(params=["mpi", "local"])
def plain(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two ranks without torch, which a test may break."""
    with Cluster(n=2, launcher=request.param, backend="none", name="plain") as cluster:
        yield cluster


@pytest.fixture(params=["mpi", "local"])
def persistent(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two ranks that survive their notebook."""
    cluster = Cluster(n=2, launcher=request.param, keep=True, grace_s=0.5, name="kept")
    yield cluster
    end(cluster)


@pytest.fixture
def light() -> Iterator[Cluster]:
    """Two ranks that survive their notebook, without torch."""
    cluster = Cluster(n=2, launcher="local", backend="none", keep=True, name="light")
    yield cluster
    end(cluster)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the notebook's working directory in this test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def notebook(shared_notebook: Notebook) -> Notebook:
    """The kernel with two ranks, checked to be alive."""
    assert shared_notebook.alive, "an earlier test ended the kernel"
    return shared_notebook


@pytest.fixture
def bare_notebook() -> Iterator[Notebook]:
    """A kernel of this test's own, without ranks."""
    with Notebook() as notebook:
        yield notebook


@pytest.fixture(scope="module", params=LAUNCHERS)
def three(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three ranks with short timeouts; a test that leaves them unusable fails."""
    with Cluster(n=3, launcher=request.param, grace_s=0.5, hang_after_s=0.5, name="three") as cluster:
        yield cluster


@pytest.fixture
def pids(three: Cluster) -> Iterator[dict[int, int]]:
    """The process ids of the ranks before the test, each with a variable that must be kept."""
    yield three.run("import os; kept = rank * 11; os.getpid()").results
    assert left_idle(three)
