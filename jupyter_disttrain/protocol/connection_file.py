"""Read and write the file by which a notebook joins the ranks of a job.

Covers: the file's content, reading it, whether the job still runs, removing it.
Does not cover: writing it at the start of a job (``features.batch_jobs.join``), joining
(``features.batch_jobs.client``).

Anyone who can read it can run code as the job's user, so it is readable only by that user.
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

from ..errors import UsageError
from ..private_files import check_private, read_own
from .messages import channel_url
from .time_limits import JOB_FILE_CONNECT_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Self

FIRST_THAT_ENDS = 5  # version of Open MPI whose calls can be aborted; also the first with its options over hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTrace:
    """The fields of a job's file that every version of this package writes."""

    cluster_id: str
    host: str  # host of rank 0, and of the controller
    launcher: str  # what started the job: "mpirun", "srun", "torchrun"
    world_size: int
    connection: dict[str, Any]  # content of ipyparallel's client connection file

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the file of any version.

        Raises a ValueError if it is no job's file.
        """
        content = json.loads(text)
        try:
            trace = cls(**{each.name: content[each.name] for each in fields(cls)})
            channel_url({**trace.connection, "control": int(trace.connection["control"])}, "control")
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError from error
        return trace

    def answer(self) -> str:
        """Connect to its controller; returns ``"there"``, ``"refused"``, or the system's error message.

        Only a job that has ended refuses; a host that does not respond may be cut off instead.
        """
        host, _, port = channel_url(self.connection, "control").partition("://")[2].rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=JOB_FILE_CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            return "refused"
        except OSError as error:
            return "it does not respond" if isinstance(error, TimeoutError) else str(error.strerror or error)
        return "there"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile(JobTrace):
    """The content of a job's file."""

    version: str  # version of this package
    job: str  # identifies its processes among those of other jobs; empty where nothing does
    name: str  # name of the cluster
    address: str  # address on which the controller listens
    network: str  # network of that address, as in "10.1.0.0/16"
    backend: str  # see ``config``
    frees_mpi: bool  # MPI is started so that its calls can be aborted from outside, if its version can do that
    profile: str  # the folder beside it that holds what the cluster needs
    run: str  # the folder of the ranks' logs
    started_s: float  # seconds since the epoch

    @property
    def has_mpi(self) -> bool:
        """Whether the ranks are one MPI world."""
        return self.launcher == "mpirun"

    @classmethod
    def parse(cls, text: str, path: str = "the file") -> Self:
        """Parse what :meth:`write` wrote to ``path``.

        Raises a UsageError if it is something else, or of another version.
        """
        try:
            content = json.loads(text)
            version = content["version"]
            if version == package_version():
                return cls(**content)
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{path} is not the file of a job that was started with --join") from error
        raise UsageError(
            f"{path} was written by version {version} of jupyter_disttrain, and this is version {package_version()}; "
            "install the same version for the notebook and the job"
        )

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        fresh = path.with_name(f".{path.name}-{self.cluster_id}.new")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(asdict(self), file)
        fresh.replace(path)


def remove_own(path: Path, cluster_id: str) -> None:
    """Remove the file of a job that has ended, unless it is another job's by now."""
    with contextlib.suppress(OSError, ValueError):
        if JobTrace.parse(read_own(path)).cluster_id == cluster_id:
            path.unlink(missing_ok=True)


def check_beside(folder: Path, beside: Path) -> None:
    """Refuse a folder that another user made, or may write to.

    If ``beside``, which was made private in the same file system, has another mode, that keeps no modes: then only the
    owner of the folder is checked.

    Raises a PermissionError with the reason, or an OSError if there is no such folder.
    """
    keeps_modes = not beside.stat().st_mode & 0o077
    check_private(folder, 0o077 if keeps_modes else 0)


def can_end_calls(mpi: str) -> bool:
    """Whether calls of this MPI can be aborted from outside: Open MPI from 5 on.

    ``mpi`` is the version as the library reports it (``"Open MPI v5.0.8, ..."``) or ``mpiexec --version`` does
    (``"mpirun (Open MPI) 5.0.8"``).
    """
    found = re.search(r"Open MPI(?: v|\) )(\d+)", mpi)
    return found is not None and int(found[1]) >= FIRST_THAT_ENDS


def package_version() -> str:
    """Return the version of this package."""
    return metadata.version("jupyter_disttrain")
