"""Record the user's clusters on disk.

Covers: the cluster file, which process holds a cluster's lease, unfinished cells, the list of running clusters.
Does not cover: joining a cluster (``client.attach``), ending one (``observer``).

Everything is in the cluster's private folders, readable only by the user, and is removed with them.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_core.paths import jupyter_runtime_dir

from ...config.cluster import ClusterConfig
from ...config.hosts import HostSlots
from ...config.slurm import SlurmOptions
from ...errors import LaunchError, UsageError
from ...launchers.folders import Folders, answers
from ...private_files import make_private_below, read_own
from ...process_table import runs, start_time
from ...protocol.file_lock import take_lock
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
_HERE = "@"  # separates cluster id, host and process in the name of a job's link


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
    births: dict[str, dict[str, float]]  # start times of its processes: see ``processes.Processes.births``

    def write(self) -> None:
        """Write the file atomically."""
        _write(Path(self.profile) / FILE, asdict(self))

    @classmethod
    def read(cls, profile: Path) -> Self:
        """Read the file of the cluster with this profile folder.

        Raises
        ------
        OSError
            If there is none, or another user owns it.
        """
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
        gpus = self.config["gpus"]
        roles = tuple((role, count) for role, count in self.config["tf_roles"])  # JSON has lists
        lists: dict[str, Any] = {"gpus": None if gpus is None else tuple(gpus), "tf_roles": roles}
        lists |= {name: tuple(self.config[name]) for name in ("spares", "forward")}
        ports = self.config["controller_ports"]
        lists["controller_ports"] = None if ports is None else (ports[0], ports[1])
        lists["hosts"] = tuple(HostSlots(**host) for host in self.config["hosts"])
        slurm = self.config["slurm"]
        lists["slurm"] = None if slurm is None else SlurmOptions(**slurm | {"more": tuple(slurm["more"])})
        return ClusterConfig(**self.config | lists)

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


class Lease:
    """The exclusive right to send cells to a cluster; it ends with the process that has it.

    Raises
    ------
    BlockingIOError
        If another process has it.
    UsageError
        If the file system does not support locks.
    LaunchError
        If the file can't be written.
    """

    def __init__(self, profile: Path) -> None:
        try:
            self._file = (profile / HOLDER).open("a+b")
        except OSError as error:
            raise LaunchError(f"cannot write {profile / HOLDER}: {error.strerror}; free or repair that disk") from error
        try:
            take_lock(self._file.fileno(), profile)
        except BaseException:  # any error: close the file, then raise it again
            self._file.close()
            raise

    def release(self) -> None:
        """Release the lease."""
        self._file.close()


class CellLog:
    """The cells that were sent and have not ended, which a later notebook resumes.

    Parameters
    ----------
    path
        The file; None if the cluster ends with its notebook, so that no later notebook can join.
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
    # One file per thread: the cell's thread and the supervisor's both write.
    temporary = path.with_suffix(f".new-{threading.get_native_id()}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(content, file)
    temporary.replace(path)
    tunnel = tunnel_of(path.parent)
    if tunnel is not None:
        tunnel.push(path)


class PresenceFile:
    """A link that lists a job which this process has joined among the clusters of this host.

    The job's folders are elsewhere, so the link to them exists while this process holds the job.
    """

    def __init__(self, profile: Path, cluster_id: str) -> None:
        folder = _folder()
        make_private_below(folder, folder.parent)
        process = f"{os.getpid()}-{start_time(os.getpid())}"
        self._path = folder / f"{cluster_id}{_HERE}{socket.gethostname()}{_HERE}{process}"
        self._path.unlink(missing_ok=True)
        self._path.symlink_to(profile)

    def remove(self) -> None:
        """Remove the link."""
        self._path.unlink(missing_ok=True)


def _folder() -> Path:
    return Path(jupyter_runtime_dir()) / "disttrain"


def _is_forgotten(link: Path) -> bool:
    """Whether a link belongs to a process of this host that has ended; the link is removed then.

    Hosts that share a home directory see each other's links, but can't check each other's processes.
    """
    cluster_and_host, _, process = link.name.rpartition(_HERE)
    host = cluster_and_host.rpartition(_HERE)[2]
    pid, _, started = process.partition("-")
    if host != socket.gethostname() or not pid.isdigit() or runs(int(pid), started):
        return False
    link.unlink(missing_ok=True)
    return True


def running() -> list[ClusterFile]:
    """Return the user's clusters that run on this host and the jobs that are held here, oldest first."""
    folder = _folder()
    profiles = list(folder.iterdir()) if folder.is_dir() else []
    found = []
    for profile in profiles:
        is_link = profile.is_symlink()
        if is_link and _is_forgotten(profile):
            continue
        try:
            cluster = ClusterFile.read(profile)
            if cluster.version != VERSION:
                continue
        except (OSError, json.JSONDecodeError, TypeError, KeyError):
            continue  # it is just starting, has just ended, or was written by another version
        is_there = cluster.is_held if is_link else answers(Path(cluster.local))
        if cluster.host == socket.gethostname() and is_there:
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
    """Return the running cluster with this name or id, or the only one.

    Parameters
    ----------
    which
        A name, an id, or None for the only one.
    free
        Consider only clusters that were started to outlive their notebook and that no running process holds.

    Raises
    ------
    UsageError
        If there is none, or more than one; the message lists what there is.
    """
    there = running()
    named = [cluster for cluster in there if which in (None, cluster.name, cluster.cluster_id)]
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
