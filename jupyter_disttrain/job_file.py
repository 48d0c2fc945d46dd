"""The file by which a notebook joins the ranks of a job.

Covers: what the job's first process writes into it, reading it, whether the job still runs, removing it.
Does not cover: writing it (``engine.join``), joining (``cluster.job``).

Who can read it can run code as the job's user: so it is readable by that user alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from typing import TYPE_CHECKING, Any

from .messages import channel_url
from .private_files import check_private, read_own

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Self

CONNECT_SECONDS = 3.0
FIRST_THAT_ENDS = 5  # version of Open MPI, whose calls can be ended


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTrace:
    """What a job's file tells of the job, whichever version of this package has written it."""

    cluster_id: str
    host: str  # of rank 0, and of the controller
    launcher: str  # that started it: "mpirun", "srun", "torchrun"
    world_size: int
    connection: dict[str, Any]  # what ipyparallel's client connection file says

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what any version wrote.

        Raises
        ------
        ValueError
            If it is no job's file.
        """
        told = json.loads(text)
        try:
            trace = cls(**{each.name: told[each.name] for each in fields(cls)})
            channel_url({**trace.connection, "control": int(trace.connection["control"])}, "control")
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError from error
        return trace

    def answer(self) -> str:
        """Return what comes of a connection to its controller: ``"there"``, ``"refused"``, or what the system says."""
        host, _, port = channel_url(self.connection, "control").partition("://")[2].rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            return "refused"
        except OSError as error:
            return "it says nothing" if isinstance(error, TimeoutError) else str(error.strerror or error)
        return "there"

    def is_refused(self) -> bool:
        """Whether the job has ended; one whose host says nothing may be cut off."""
        return self.answer() == "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile(JobTrace):
    """What a job tells of itself."""

    version: str  # of this package
    job: str  # what tells its processes from those of any other job; empty where nothing does
    name: str  # of the cluster
    address: str  # at which the controller listens
    network: str  # around that address, as in "10.1.0.0/16"
    backend: str  # see ``config``
    frees_mpi: bool  # MPI is started so that a call of it can be ended from outside, if its version can do that
    profile: str  # the folder beside it that holds what the cluster needs
    run: str  # the folder of the ranks' logs
    started_s: float  # seconds since the epoch

    @property
    def has_mpi(self) -> bool:
        """Whether the ranks are one MPI world."""
        return self.launcher == "mpirun"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what :meth:`write` wrote.

        Raises
        ------
        ValueError
            If it is nothing of that kind; the message is empty, or the version that wrote it.
        """
        told = json.loads(text)
        if not isinstance(told, dict):
            raise ValueError  # noqa: TRY004  (it is about what is in the file)
        if told.get("version") != package_version():
            raise ValueError(str(told.get("version", "")))
        try:
            return cls(**told)
        except TypeError as error:
            raise ValueError from error

    def write(self, path: Path) -> None:
        """Write it, whole or not at all."""
        fresh = path.with_name(f".{path.name}-{self.cluster_id}.new")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(asdict(self), file)
        fresh.replace(path)


def remove_own(path: Path, cluster_id: str) -> None:
    """Remove the file of a job that has ended, unless it is another's by now."""
    with contextlib.suppress(OSError, ValueError):
        if JobTrace.parse(read_own(path)).cluster_id == cluster_id:
            path.unlink(missing_ok=True)


def check_beside(folder: Path, file: Path) -> None:
    """Refuse the folder of a job that another user has put beside its file, or may write to.

    Where the file itself, which is made with mode 0600, has another mode, its file system keeps none: then only the
    owner of the folder is checked.

    Raises
    ------
    PermissionError
        With the reason.
    OSError
        If there is no such folder.
    """
    keeps_modes = not file.stat().st_mode & 0o077
    check_private(folder, 0o077 if keeps_modes else 0)


def can_end_calls(mpi: str) -> bool:
    """Whether calls of this MPI can be ended from outside: of Open MPI from 5 on; ``mpi`` is what it says of itself."""
    found = re.search(r"Open MPI v(\d+)", mpi)
    return found is not None and int(found[1]) >= FIRST_THAT_ENDS


def package_version() -> str:
    """Return the version of this package."""
    return metadata.version("jupyter_disttrain")
