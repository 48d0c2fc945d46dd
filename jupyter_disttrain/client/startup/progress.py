"""Report the progress of a cluster's start.

Covers: the progress text, the file from which other processes of this user see a cluster that is starting.
Does not cover: a cluster that has started (``client.registry.cluster_file``), the display of the line
(``notebook.views.status_line``).
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ...private_files import read_own, replace_private
from ...process_table import runs, start_time
from ...protocol.ranks import counted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from typing_extensions import Self

    from ...config.cluster import ClusterConfig
    from ...launchers.folders import Folders

FILE = "starting.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingFile:
    """The description of a starting cluster on disk."""

    cluster_id: str
    name: str
    notebook: str  # path of the notebook if Jupyter provides it; else empty
    host: str
    pid: int  # pid of the process that starts it
    pid_started: str  # its start time: a later process may have the same pid
    text: str  # e.g. "starting: 3 of 4 ranks, importing torch"

    @classmethod
    def read(cls, profile: Path) -> Self | None:
        """Return the file in this profile folder; None if the start has ended or was aborted.

        Raises an OSError, a ValueError or a TypeError if the file can't be read, or another version wrote it.
        """
        there = cls(**json.loads(read_own(profile / FILE)))
        return there if there.host == socket.gethostname() and runs(there.pid, there.pid_started) else None


class StartProgress:
    """Progress of the start.

    ``on_wait`` is called with a line on what the start waits for before ranks can be started, such as the queue of
    Slurm, ``on_start`` with a line on how many ranks have started; both each time the line changes.
    """

    def __init__(self, config: ClusterConfig, on_wait: Callable[[str], None], on_start: Callable[[str], None]) -> None:
        self._config = config
        self._on_start = on_start
        self._on_wait = on_wait
        self._folders: Folders | None = None  # while there is a file
        self._text = ""
        self._n: int | None = config.count

    def open(self, folders: Folders) -> None:
        """Create the file, which is updated from now on."""
        self._folders = folders
        self._starting("")

    def waits(self, text: str) -> None:
        """Report what the start waits for before ranks can be started."""
        self._report(text, self._on_wait)

    def decided(self, n: int) -> None:
        """Set the number of ranks."""
        self._n = n
        self._starting("")

    def came(self, ready: int) -> None:
        """Report how many ranks are ready to join the group; the processes of the others have been started."""
        without_torch = self._config.backend == "none"
        self._starting(f"{ready} of {counted(self._n or 0, 'rank')}{'' if without_torch else ', importing torch'}")

    def forms(self) -> None:
        """Report that all ranks are ready, and form the process group now."""
        self._starting(f"{counted(self._n or 0, 'rank')}, forming the process group")

    def close(self) -> None:
        """Remove the file: the start has succeeded or failed."""
        if self._folders is not None:
            (self._folders.profile / FILE).unlink(missing_ok=True)
            self._folders = None

    def _starting(self, what: str) -> None:
        what = f": {what}" if what else f" {counted(self._n, 'rank')}" if self._n else ""
        self._report(f"starting{what}", self._on_start)

    def _report(self, text: str, on_change: Callable[[str], None]) -> None:
        if text == self._text:
            return
        self._text = text
        if self._folders is not None:
            there = StartingFile(
                cluster_id=self._folders.cluster_id,
                name=self._config.name,
                notebook=os.environ.get("JPY_SESSION_NAME", ""),
                host=socket.gethostname(),
                pid=os.getpid(),
                pid_started=start_time(os.getpid()),
                text=text,
            )
            replace_private(self._folders.profile / FILE, json.dumps(asdict(there)))
        on_change(text)
