"""Record the user's clusters on disk.

Covers: the cluster file, which process holds a cluster's lease, unfinished cells, the list of running clusters.
Does not cover: joining a cluster (``client.attach``), ending one (``observer``).

Everything is in the cluster's private folders, readable only by the user, and is removed with them.
"""

from __future__ import annotations

import fcntl
import json
import socket
import threading
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from jupyter_core.paths import jupyter_runtime_dir

from ...config.cluster import ClusterConfig
from ...config.hosts import HostSlots
from ...config.slurm import SlurmOptions
from ...errors import LaunchError, UsageError
from ...file_lock import take_lock
from ...launchers.folders import Folders, answers
from ...private_files import make_private_below, read_own, replace_private
from ...protocol.ranks import RankInfo
from ..startup.progress import FILE as STARTING
from ..startup.progress import StartingFile
from ..startup.rank_table import RankEntry
from ..transport.ssh_tunnel import tunnel_of

if TYPE_CHECKING:
    from typing_extensions import Self


FILE = "cluster.json"
VERSION = metadata.version("jupyter_disttrain")
HOLDER = "holder"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """The description of a running cluster on disk."""

    version: str  # of this package
    cluster_id: str
    host: str  # host of the notebook that started it, and of its controller
    started_s: float  # seconds since the epoch
    notebook: str  # path of the notebook if Jupyter provides it; else empty
    holder_pid: int  # pid of the process that holds it, or held it last
    config: dict[str, Any]
    profile: str
    run: str
    local: str
    address: str
    placement: dict[str, Any]  # see ``placement.Placement``
    gpus: list[str]
    generation: int
    mpi_heals: bool  # MPI can be repaired: after a death, or in a job after an interrupt
    mpi_lost: str  # why MPI has no world of all ranks; empty if it has
    table: list[dict[str, Any]]
    births: dict[str, dict[str, str]]  # start times of its processes: see ``processes.Processes.births``

    def write(self) -> None:
        """Write the file atomically."""
        _write(Path(self.profile) / FILE, asdict(self))

    @classmethod
    def read(cls, profile: Path) -> Self:
        """Read the file in this profile folder; raises an OSError if there is none, or another user owns it."""
        return cls(**json.loads(read_own(profile / FILE)))

    @property
    def folders(self) -> Folders:
        """The cluster's folders."""
        return Folders(
            profile=Path(self.profile), run=Path(self.run), local=Path(self.local), cluster_id=self.cluster_id
        )

    @property
    def name(self) -> str:
        """The cluster's name."""
        return str(self.config["name"])

    @property
    def launcher(self) -> str:
        """The launcher that started its ranks."""
        job = self.config["job"]
        return f"{job} job" if job else str(self.config["launcher"])

    def load_config(self) -> ClusterConfig:
        """Return the configuration that the user requested."""
        fields = _with_tuples(self.config)
        fields["hosts"] = tuple(HostSlots(**host) for host in fields["hosts"])
        fields["slurm"] = fields["slurm"] and SlurmOptions(**fields["slurm"])
        return ClusterConfig(**fields)

    def load_table(self) -> list[RankEntry]:
        """Return the rank table; every rank is marked idle, although it may be running a cell."""
        return [RankEntry(**entry | {"info": RankInfo(**entry["info"])}) for entry in self.table]

    @property
    def is_held(self) -> bool:
        """Whether a running process holds it."""
        try:
            with (Path(self.profile) / HOLDER).open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    @property
    def holder(self) -> str:
        """The process that holds it, or held it last, as text."""
        return f"process {self.holder_pid}" + (f" ({self.notebook})" if self.notebook else "")


def _with_tuples(value: Any) -> Any:
    """Return JSON's lists as the tuples that they were."""
    if isinstance(value, dict):
        return {name: _with_tuples(each) for name, each in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def take_lease(profile: Path) -> BinaryIO:
    """Take the exclusive right to send cells to a cluster, until this process ends or closes the returned file.

    Raises a BlockingIOError if another process has it, a UsageError if the file system does not support locks, and a
    LaunchError if the file can't be written.
    """
    try:
        file = (profile / HOLDER).open("a+b")
    except OSError as error:
        raise LaunchError(f"cannot write {profile / HOLDER}: {error.strerror}; free or repair that disk") from error
    try:
        take_lock(file.fileno(), profile)
    except BaseException:  # any error: close the file, then raise it again
        file.close()
        raise
    return file


class CellLog:
    """The cells that were sent and have not ended, which a later notebook resumes.

    Without a path, the cluster ends with its notebook, so that no later notebook can join.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._cells: dict[str, dict[str, Any]] = {}
        self.last = 0  # number of the last cell
        if path is not None and path.exists():
            found = json.loads(read_own(path))
            self._cells, self.last = found["cells"], found["last"]

    @property
    def open_cells(self) -> list[dict[str, Any]]:
        """The cells that have not ended, in the order of their numbers."""
        return sorted(self._cells.values(), key=lambda cell: cell["number"])

    def add(self, cell: dict[str, Any]) -> None:
        """Record a cell that is about to be sent."""
        with self._lock:
            self._cells[str(cell["number"])] = cell
            self.last = cell["number"]
            self._write()

    def remove(self, number: int) -> None:
        """Record that a cell has ended on every rank."""
        with self._lock:
            if self._cells.pop(str(number), None) is not None:
                self._write()

    def _write(self) -> None:
        if self._path is not None:
            _write(self._path, {"cells": self._cells, "last": self.last})


def _write(path: Path, content: Any) -> None:
    replace_private(path, json.dumps(content))
    tunnel = tunnel_of(path.parent)
    if tunnel is not None:
        tunnel.push(path)


def remove(profile: Path) -> None:
    """Remove the description of a cluster whose ranks end, and which others take over."""
    (profile / FILE).unlink(missing_ok=True)


def list_job(profile: Path, cluster_id: str) -> Path:
    """List a job that this process holds among the clusters of this host; return the link to remove at the end.

    The job's folders are elsewhere.
    """
    folder = _folder()
    make_private_below(folder, folder.parent)
    link = folder / f"{cluster_id}@{socket.gethostname()}"
    link.unlink(missing_ok=True)  # that of a process that was killed
    link.symlink_to(profile)
    return link


def _folder() -> Path:
    return Path(jupyter_runtime_dir()) / "disttrain"


def running() -> list[ClusterFile]:
    """Return the user's clusters that run on this host and the jobs that are held here, oldest first."""
    folder = _folder()
    profiles = list(folder.iterdir()) if folder.is_dir() else []
    host = socket.gethostname()
    found = []
    for profile in profiles:
        is_link = profile.is_symlink()
        try:
            cluster = ClusterFile.read(profile)
        except (OSError, json.JSONDecodeError, TypeError, KeyError) as error:
            # It is just starting, has just ended, or was written by another version.
            if is_link and isinstance(error, FileNotFoundError) and profile.name.endswith(f"@{host}"):
                profile.unlink(missing_ok=True)  # its job has ended; other hosts may not see the job's folder
            continue
        is_ours = cluster.version == VERSION and cluster.host == host
        if is_ours and (cluster.is_held if is_link else answers(Path(cluster.local))):
            found.append(cluster)
    return sorted(found, key=lambda cluster: cluster.started_s)


def starting() -> list[StartingFile]:
    """Return the clusters of this user that are starting on this host."""
    found = []
    for path in _folder().glob(f"*/{STARTING}"):
        try:
            there = StartingFile.read(path.parent)
        except (OSError, ValueError, TypeError):
            continue  # it has just started or failed, or another version wrote the file
        if there is not None:
            found.append(there)
    return sorted(found, key=lambda each: each.cluster_id)


def unreadable() -> list[dict[str, str]]:
    """Return the names and versions of clusters on this host that another version of this package started."""
    found = []
    for path in _folder().glob(f"*/{FILE}"):
        try:
            content = json.loads(read_own(path))
        except (OSError, json.JSONDecodeError):
            continue  # it is just starting, or has just ended
        version = str(content.get("version", "an earlier version"))
        if version == VERSION or content.get("host") != socket.gethostname():
            continue
        if answers(Path(str(content.get("local", "/")))):
            name = str(content.get("config", {}).get("name", path.parent.name))
            found.append({"id": path.parent.name, "name": name, "version": version, "own": VERSION})
    return found


def find(which: str | None, *, free: bool = False) -> ClusterFile:
    """Return the running cluster with this name or id; None: the only one.

    With ``free``, consider only clusters that were started to outlive their notebook and that no running process holds.
    Raises a UsageError that lists what there is if there is none, or more than one.
    """
    there = running()
    named = [
        cluster for cluster in there if which in (None, cluster.name, cluster.cluster_id, cluster.folders.first_id)
    ]
    if free:
        named = [cluster for cluster in named if cluster.config["keep"]]
    chosen = [cluster for cluster in named if not (free and cluster.is_held)]
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        ids = ", ".join(cluster.cluster_id for cluster in chosen)
        raise UsageError(f"there are {len(chosen)} such clusters: {ids}; name one of them")
    if named:
        holder = named[0].holder
        raise UsageError(
            f"the cluster {named[0].name!r} is held by {holder}, which still runs; use it there, or shut that kernel "
            "down or restart it first"
        )
    others = [each["id"] for each in unreadable() if which in (None, each["name"], each["id"])]
    if others:
        were, them = ("was", "it") if len(others) == 1 else ("were", "them")
        raise UsageError(
            f"{', '.join(others)} {were} started by another version of jupyter_disttrain than {VERSION}; "
            f"install that version again to attach to {them}"
        )
    names = [cluster.name for cluster in there]
    listed = ", ".join(each.name if names.count(each.name) == 1 else each.cluster_id for each in there) or "none"
    what = f"no cluster {which!r} is running (running: {listed})"
    if which is None:
        what = (
            f"no running cluster can be attached to (these end with their notebook: {listed})"
            if there
            else "no cluster is running"
        )
    raise UsageError(
        f"{what}; start one that outlives its kernel with %dist_init --keep, or attach to the ranks of a batch job "
        "with %dist_attach FILE"
    )
