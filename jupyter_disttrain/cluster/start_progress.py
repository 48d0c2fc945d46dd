"""Report how far the start of a cluster has come.

Covers: the line that says it, the file by which other processes of this user see a cluster that is starting.
Does not cover: a cluster that has started (``registry``), the display of the line (``notebook.status_line``).
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import psutil

from ..private_files import read_own
from ..ranks import counted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from typing_extensions import Self

    from ..config import ClusterConfig
    from .folders import Folders

FILE = "starting.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingFile:
    """What a cluster that is starting writes of itself."""

    cluster_id: str
    name: str
    notebook: str  # its path, where Jupyter names it; else empty
    host: str
    pid: int  # of the process that starts it
    began_s: float  # of that process: tells it from a later one with the same pid
    text: str  # e.g. "starting: 3 of 4 ranks, importing torch"

    @classmethod
    def read(cls, profile: Path) -> Self | None:
        """Return what the cluster with this profile folder says; None if its start has ended or was cut off.

        Raises
        ------
        OSError, ValueError, TypeError
            If the file can't be read, or another version wrote it.
        """
        there = cls(**json.loads(read_own(profile / FILE)))
        if there.host != socket.gethostname():
            return None
        try:
            runs = psutil.Process(there.pid).create_time() == there.began_s
        except psutil.NoSuchProcess:
            return None
        return there if runs else None


class StartProgress:
    """How far the start has come.

    Parameters
    ----------
    config
        What is asked for.
    on_wait
        Called with a line on what is waited for before ranks can be started, such as the queue of Slurm, each time it
        changes.
    on_start
        Called with a line on how many ranks have come up, each time it changes.
    """

    def __init__(self, config: ClusterConfig, on_wait: Callable[[str], None], on_start: Callable[[str], None]) -> None:
        self._config = config
        self._on_wait, self._on_start = on_wait, on_start
        self._folders: Folders | None = None
        self._text = ""
        self._n: int | None = config.count
        self._began_s = psutil.Process().create_time()

    def open(self, folders: Folders) -> None:
        """Write the file from now on."""
        self._folders = folders
        self._starting("")

    def waits(self, text: str) -> None:
        """Report what is waited for before ranks can be started."""
        if self._note(text):
            self._on_wait(text)

    def decided(self, n: int) -> None:
        """Take the number of ranks."""
        self._n = n
        self._starting("")

    def came(self, ready: int) -> None:
        """Report how many ranks are ready to join the group; the processes of the others have been started."""
        without_torch = self._config.backend == "none"
        self._starting(f"{ready} of {counted(self._n or 0, 'rank')}{'' if without_torch else ', importing torch'}")

    def forms(self) -> None:
        """Report that all ranks have come up."""
        self._starting(f"{counted(self._n or 0, 'rank')}, forming the process group")

    def close(self) -> None:
        """Remove the file: the start has ended, well or not."""
        if self._folders is not None:
            (self._folders.profile / FILE).unlink(missing_ok=True)
            self._folders = None

    def _starting(self, what: str) -> None:
        what = f": {what}" if what else f" {counted(self._n, 'rank')}" if self._n else ""
        if self._note(f"starting{what}"):
            self._on_start(f"starting{what}")

    def _note(self, text: str) -> bool:
        """Write what has changed; returns whether anything has."""
        if text == self._text:
            return False
        self._text = text
        if self._folders is not None:
            self._write(self._folders, text)
        return True

    def _write(self, folders: Folders, text: str) -> None:
        told = StartingFile(
            cluster_id=folders.cluster_id,
            name=self._config.name,
            notebook=os.environ.get("JPY_SESSION_NAME", ""),
            host=socket.gethostname(),
            pid=os.getpid(),
            began_s=self._began_s,
            text=text,
        )
        fresh = folders.profile / f"{FILE}.new"
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(told), file)
        fresh.replace(folders.profile / FILE)
