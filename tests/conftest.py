"""Real clusters, real kernels, and a look at what is left when all is done."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain import Cluster

from .notebook_driver import Notebook

if TYPE_CHECKING:
    from collections.abc import Iterator

LAUNCHERS = ["mpi", "local"]
CACHE_OF_TORCH = "torchinductor_"  # a folder that every program with torch shares


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the tests in the background has them ignore interrupts, and so would every kernel of theirs.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders of these tests alone, so that what they leave can be seen."""
    home = tmp_path_factory.mktemp("jupyter")
    names = {
        "JUPYTER_RUNTIME_DIR": home / "runtime",
        "JUPYTER_DATA_DIR": home / "data",
        "IPYTHONDIR": home / "ipython",
        "TMPDIR": home / "temporary",
    }
    names["TMPDIR"].mkdir()
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: str(path) for name, path in names.items()})
    tempfile.tempdir = None  # it is looked up anew
    yield home
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    tempfile.tempdir = None


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left(own_folders: Path) -> Iterator[None]:
    """After the last test no process, thread, port, file or shared memory of ours is there."""
    shared_before = set(Path("/dev/shm").iterdir())
    yield
    deadline = time.monotonic() + 10
    while (left := our_processes()) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=0.1)
    assert not left, f"processes left: {[process.cmdline() for process in left]}"
    threads = [thread.name for thread in threading.enumerate() if "disttrain" in thread.name]
    assert not threads, f"threads left: {threads}"
    listening = [conn for conn in psutil.Process().net_connections() if conn.status == psutil.CONN_LISTEN]
    assert not listening, f"ports left: {listening}"
    clusters = own_folders / "runtime" / "disttrain"
    files = list(clusters.rglob("*")) if clusters.exists() else []
    assert not files, f"files left: {files}, of {[first_seen_in.get(path.name) for path in clusters.iterdir()]}"
    found = (own_folders / "temporary").iterdir()
    temporary = [path for path in found if not path.name.startswith(CACHE_OF_TORCH)]
    assert not temporary, f"temporary files left: {temporary}, of {[first_seen_in.get(p.name) for p in temporary]}"
    shared = [path for path in set(Path("/dev/shm").iterdir()) - shared_before if not belongs_to_others(path.name)]
    inside = {path.name: [each.name for each in path.iterdir()] for path in shared if path.is_dir()}
    assert not shared, f"shared memory left: {shared}, {inside}, of {[first_seen_in.get(p.name) for p in shared]}"


first_seen_in: dict[str, str] = {}  # a folder: the test after which it was there first


@pytest.fixture(autouse=True)
def folders_are_noted(request: pytest.FixtureRequest, own_folders: Path) -> Iterator[None]:
    """Note whose the folders are, so that one that is left at the end can be explained."""
    yield
    clusters = own_folders / "runtime" / "disttrain"
    folders = [folder for folder in (clusters, own_folders / "temporary", Path("/dev/shm")) if folder.exists()]
    for path in (path for folder in folders for path in folder.iterdir()):
        first_seen_in.setdefault(path.name, request.node.nodeid)


def belongs_to_others(name: str) -> bool:
    """Whether a file in shared memory names a process that runs and isn't this one."""
    numbers = re.findall(r"(?<=[-_])\d+(?=[-_])", name)
    return any(int(number) != os.getpid() and psutil.pid_exists(int(number)) for number in numbers)


def our_processes() -> list[psutil.Process]:
    """Return the controllers, nannies, ranks and launchers that these tests started, wherever they hang by now."""
    runtime = os.environ["JUPYTER_RUNTIME_DIR"]
    ours = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            is_ours = any("jupyter_disttrain" in word or "prterun" in word for word in words)
            if is_ours and process.environ().get("JUPYTER_RUNTIME_DIR") == runtime and process.pid != os.getpid():
                ours.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            continue
    return ours


@pytest.fixture(scope="session", params=LAUNCHERS)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two ranks, by every launcher."""
    with Cluster(n=2, launcher=request.param) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def torchless() -> Iterator[Cluster]:
    """Two ranks without torch, which a reset brings back in no time, for what hangs on no launcher."""
    with Cluster(n=2, launcher="local", backend="none", name="torchless") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def shared_notebook() -> Iterator[Notebook]:
    """A kernel with the extension loaded and two ranks; tests use ``notebook``."""
    with Notebook() as notebook:
        notebook.run("%load_ext jupyter_disttrain")
        notebook.run("%dist_init -n 2").check()
        yield notebook


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the notebook's own for this test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def notebook(shared_notebook: Notebook) -> Notebook:
    """The kernel with two ranks, checked to be alive."""
    assert shared_notebook.alive, "an earlier test ended the kernel"
    return shared_notebook


@pytest.fixture
def bare_notebook() -> Iterator[Notebook]:
    """A kernel of this test's own, with the extension loaded and no ranks."""
    with Notebook() as notebook:
        notebook.run("%load_ext jupyter_disttrain").check()
        yield notebook


@pytest.fixture(scope="module", params=["mpi", "local"])
def three(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three ranks that soon lose patience; every test leaves them usable, or that is its failure."""
    with Cluster(n=3, launcher=request.param, grace_s=0.5, hang_after_s=0.5, name="three") as cluster:
        yield cluster


@pytest.fixture
def pids(three: Cluster) -> dict[int, int]:
    """The ranks' processes before the test, each with a variable that must stay."""
    return three.run("import os; kept = rank * 11; os.getpid()").results
