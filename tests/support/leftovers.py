"""Check what is left after all tests, in each process that runs tests and across them.

Covers: processes, threads, ports, cluster files, temporary files, shared memory and the resources of a lab; each
leftover fails the run.
Does not cover: what other programs on this machine leave.

A plugin of ``conftest.py``. With ``pytest -n 2`` each worker checks its own resources; shared memory, which all
share, is checked by the controlling process after they have ended.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from jupyter_disttrain.protocol.time_limits import WARM_IDLE_SECONDS

from ..lab import places

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHE_OF_TORCH = "torchinductor_"  # a folder created by every program with torch
CELLS_OF_IPYKERNEL = "ipykernel_"  # the folder of the cells of a notebook that was debugged
SHARED_MEMORY = Path("/dev/shm")

first_seen_in: dict[str, str] = {}  # folder -> the test after which it was first seen
shared_before: set[Path] = set()
shared_left: list[str] = []


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Separate folders for these tests, so that leftovers can be seen."""
    home = tmp_path_factory.mktemp("jupyter")
    names = {
        "JUPYTER_RUNTIME_DIR": home / "runtime",
        "JUPYTER_DATA_DIR": home / "data",
        "IPYTHONDIR": home / "ipython",
        "TMPDIR": home / "temporary",
    }
    names["TMPDIR"].mkdir()
    # A warm process serves all starts with the same variables of torch: those of other workers must not count here.
    names["TORCH_TESTS"] = home
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: str(path) for name, path in names.items()})
    tempfile.tempdir = None  # so that it is looked up again
    yield home
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    tempfile.tempdir = None


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left(own_folders: Path) -> Iterator[None]:
    """Check after the last test that no process, thread, port or file of ours exists."""
    yield
    deadline = time.monotonic() + WARM_IDLE_SECONDS + 10
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
    of_others = CACHE_OF_TORCH, CELLS_OF_IPYKERNEL
    temporary = [path for path in found if not path.name.startswith(of_others) and not is_probe(path)]
    assert not temporary, f"temporary files left: {temporary}, of {[first_seen_in.get(p.name) for p in temporary]}"
    labs = [line for place in places.claimed for line in places.left_of(place)]
    assert not labs, f"left of a lab: {labs}"


@pytest.fixture(autouse=True)
def folders_are_noted(request: pytest.FixtureRequest, own_folders: Path) -> Iterator[None]:
    """Record which folders each test created, so that a leftover can be explained."""
    yield
    clusters = own_folders / "runtime" / "disttrain"
    folders = [folder for folder in (clusters, own_folders / "temporary", SHARED_MEMORY) if folder.exists()]
    for path in (path for folder in folders for path in folder.iterdir()):
        first_seen_in.setdefault(path.name, request.node.nodeid)


def pytest_sessionstart(session: pytest.Session) -> None:
    if not is_worker(session.config):
        shared_before.update(SHARED_MEMORY.iterdir())


def pytest_sessionfinish(session: pytest.Session) -> None:
    if is_worker(session.config):
        session.config.workeroutput["first_seen_in"] = first_seen_in  # type: ignore[attr-defined]
        return
    new = set(SHARED_MEMORY.iterdir()) - shared_before
    for path in sorted(path for path in new if not belongs_to_others(path.name)):
        inside = [each.name for each in path.iterdir()] if path.is_dir() else ""
        shared_left.append(f"{path} {inside}, first seen after {first_seen_in.get(path.name)}")
    if shared_left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect from a finished worker after which test it first saw each folder."""
    for name, test in getattr(node, "workeroutput", {}).get("first_seen_in", {}).items():
        first_seen_in.setdefault(name, test)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if shared_left:
        terminalreporter.section("shared memory left, so this run fails", red=True, bold=True)
        for line in shared_left:
            terminalreporter.write_line(line)


def is_probe(path: Path) -> bool:
    """Return whether tempfile made this file to probe a directory, in a process that was killed at that moment."""
    return (
        re.fullmatch(r"[a-z0-9_]{8}", path.name) is not None and path.is_file() and path.read_bytes() in (b"", b"blat")
    )


def is_worker(config: pytest.Config) -> bool:
    """Return whether another process assigns the tests to this one."""
    return hasattr(config, "workerinput")


def belongs_to_others(name: str) -> bool:
    """Return whether a file in shared memory names a running process other than this one."""
    numbers = re.findall(r"(?<=[-_])\d+(?=[-_])", name)
    return any(int(number) != os.getpid() and Path("/proc", number).exists() for number in numbers)


def our_processes() -> list[psutil.Process]:
    """Return the controllers, nannies, ranks and launchers that these tests started, whatever their parent is."""
    runtime = os.environ["JUPYTER_RUNTIME_DIR"]
    ours = []
    for process in psutil.process_iter():
        try:
            arguments = process.cmdline()
            is_ours = any("jupyter_disttrain" in text or "prterun" in text for text in arguments)
            if is_ours and process.environ().get("JUPYTER_RUNTIME_DIR") == runtime and process.pid != os.getpid():
                ours.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            continue
    return ours
