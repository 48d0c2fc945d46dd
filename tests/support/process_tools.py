"""Helpers for processes and files: which belong to a cluster, which have ended."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain.client.startup.launch import Launch

from .leftovers import our_processes

if TYPE_CHECKING:
    from collections.abc import Callable

    from .notebook_driver import Notebook

FAST = "--backend none"
OTHER_UID = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def send_sigint() -> None:
    """Send this process an interrupt, as Ctrl-C does."""
    os.kill(os.getpid(), signal.SIGINT)


def change_owner(path: Path) -> None:
    """Change the owner of a file or folder, and all below it, to another user."""
    for each in (path, *path.rglob("*")):
        os.chown(each, OTHER_UID, OTHER_UID, follow_symlinks=False)


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Wait for a condition without an event: the end of processes that are not our children."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def own_children(text: str) -> list[psutil.Process]:
    """Return the running descendants of this process with a string in their command lines."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it ends at this moment, or has ended and is not reaped yet
            if text in process.cmdline():
                found.append(process)
    return found


def first_id(cluster_id: str) -> str:
    """Return the id of a cluster before any reset: that of its controller and its folders."""
    return re.sub(r"\.\d+$", "", cluster_id)


def processes_of_cluster(cluster_id: str) -> list[psutil.Process]:
    """Return the processes of one cluster, whose id is in their arguments or environments; after resets also."""
    cluster_id = first_id(cluster_id)
    found = []
    for process in our_processes():
        try:
            texts = [*process.cmdline(), process.environ().get("DISTTRAIN_CLIENT", "")]
        except psutil.Error:
            continue
        if any(cluster_id in text for text in texts):
            found.append(process)
    return found


def controllers_of(cluster_id: str) -> list[psutil.Process]:
    """The controller and its child processes; each is listed before any is killed."""
    return [
        process for process in processes_of_cluster(cluster_id) if "transport.controller" in " ".join(process.cmdline())
    ]


def folders() -> set[str]:
    runtime = Path(os.environ["JUPYTER_RUNTIME_DIR"]) / "disttrain"
    return {path.name for path in runtime.iterdir()} if runtime.exists() else set()


def shelves() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("disttrain-*")}


def nothing_is_left_of(cluster_id: str) -> bool:
    return (
        not processes_of_cluster(cluster_id)
        and first_id(cluster_id) not in folders()
        and f"disttrain-{first_id(cluster_id)}" not in shelves()
    )


def start(notebook: Notebook, options: str = f"-n 2 {FAST}") -> str:
    """Start ranks in a kernel; return the cluster's id."""
    before = folders()
    notebook.run(f"%dist_init {options}").check()
    (cluster_id,) = folders() - before
    assert processes_of_cluster(cluster_id)
    return cluster_id


def are_gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def interrupt_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a start after the placement of ranks, before anything is started."""
    start = Launch.start

    def interrupted(launch: Launch) -> None:
        assert launch.folders.profile.exists()
        signal.raise_signal(signal.SIGINT)
        start(launch)

    monkeypatch.setattr(Launch, "start", interrupted)
