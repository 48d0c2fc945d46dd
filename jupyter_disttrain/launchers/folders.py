"""Create and remove the folders of a cluster.

Covers: the private folders that are removed with the cluster, the folder of logs that is kept, removing folders that
killed clusters left behind.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from jupyter_core.paths import jupyter_data_dir, jupyter_runtime_dir

from ..errors import LaunchError
from ..file_lock import check_locks
from ..private_files import make_private_below
from ..protocol.shared_memory import NANNIES, NOTEBOOK, PREFIX, ROOT
from ..protocol.time_limits import BIRTH_SECONDS, FOLDERS_STALE_SECONDS, REMOVAL_SECONDS
from ..rank_sessions import FOLDER as SESSIONS
from ..rank_sessions import end_abandoned, remove_unheld

if TYPE_CHECKING:
    from collections.abc import Iterable

BROUGHT_METRICS = "metrics"
KEPT_RUNS = 20  # number of log folders to keep; the oldest are removed first
LONGEST_TEMPORARY = 70  # characters of the temporary folder's path: the path of a Unix socket may have 107
_MADE = "%Y%m%d-%H%M%S"  # the start of the name of a folder of logs
_RUN = re.compile(r"\d{8}-\d{6}-.+-\d+-[0-9a-f]{6}(\.\d+)?")
_SOCKETS = ("s-", "s:")  # the beginnings of the names of the controller's sockets
_RESETS = re.compile(r"(?<=-[0-9a-f]{6})\.(\d+)$")  # what each reset changes in the id of a cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """The folders of a cluster."""

    profile: Path  # ipyparallel's profile: connection files, the launchers' logs; removed with the cluster
    run: Path  # one log per rank; kept
    local: Path  # on this host only: the sockets and, in shared memory, large values; removed with the cluster
    cluster_id: str  # with a number at its end after a reset

    @classmethod
    def make(cls, name: str) -> Folders:
        """Create all folders, readable by this user only.

        Raises a LaunchError if a folder can't be created; the message names it and the reason.
        """
        cluster_id = f"{name}-{os.getpid()}-{os.urandom(3).hex()}"
        local = make_local(cluster_id)  # first: the next start finds the folders of a killed notebook by it
        profile = Path(jupyter_runtime_dir()) / "disttrain" / cluster_id
        runs = Path(jupyter_data_dir()) / "disttrain" / "runs"
        run = runs / f"{time.strftime(_MADE)}-{cluster_id}"
        try:
            top, data = Path(jupyter_runtime_dir()), Path(jupyter_data_dir())
            for folder in (profile, profile / "security", profile / "log", profile / "pid", profile / "startup"):
                make_private_below(folder, top)
            make_private_below(run, data)
            _probe(profile / "security" / "probe")
            check_locks(profile)
            _write(local / NOTEBOOK, os.urandom(16).hex().encode())
        except BaseException as error:  # also a KeyboardInterrupt must leave nothing behind
            for folder in (profile, run, local):
                shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise _unwritable(error) from error
        _prune(runs, profile.parent, keep=KEPT_RUNS)
        _sweep(profile.parent)
        return cls(profile=profile, run=run, local=local, cluster_id=cluster_id)

    def renewed(self) -> Folders:
        """Return the folders for ranks that replace all of these: with another id, and a new folder of logs.

        Raises a LaunchError if that can't be created.
        """
        found = _RESETS.search(self.cluster_id)
        cluster_id = f"{self.first_id}.{int(found[1]) + 1 if found else 2}"
        run = self.run.with_name(f"{time.strftime(_MADE)}-{cluster_id}")
        try:
            make_private_below(run, Path(jupyter_data_dir()))
        except OSError as error:
            raise _unwritable(error) from error
        _prune(self.run.parent, self.profile.parent, keep=KEPT_RUNS)
        return replace(self, run=run, cluster_id=cluster_id)

    @property
    def first_id(self) -> str:
        """The id before any reset: that of the controller, and in the names of these folders."""
        return _RESETS.sub("", self.cluster_id)

    @property
    def engine_file(self) -> Path:
        """The connection file that the ranks read."""
        return self.profile / "security" / f"ipcontroller-{self.first_id}-engine.json"

    @property
    def client_file(self) -> Path:
        """The connection file that clients read."""
        return self.profile / "security" / f"ipcontroller-{self.first_id}-client.json"

    @property
    def cell_log(self) -> Path:
        """The file that lists the cells that have not ended."""
        return self.local / "open_cells.json"

    @property
    def stop_mark(self) -> Path:
        """The file that exists once another process than the notebook's ends the cluster."""
        return self.profile / "stopping"

    def rank_log(self, rank: int) -> Path:
        """Return the path of a rank's log, which exists once the rank has printed something."""
        return self.run / f"rank{rank}.log"

    @property
    def metrics(self) -> Path:
        """The folder of the metrics files: that of the logs, or of the copies that a tunnel has fetched."""
        brought = self.profile / BROUGHT_METRICS
        return brought if brought.is_dir() else self.run

    @property
    def shelf_token(self) -> str:
        """A random text in ``local``, which a folder of the same path on another host does not have."""
        return (self.local / NOTEBOOK).read_text()

    @property
    def environment_file(self) -> Path:
        """The file with the environment of the ranks; it may contain the user's secrets."""
        return self.profile / "security" / "environment.json"

    @property
    def shelf_name(self) -> str | None:
        """The path of the folder for large values; None without shared memory."""
        return str(self.local) if self.local.parent == ROOT else None

    @property
    def sockets(self) -> str:
        """The prefix of the paths of the controller's sockets."""
        return str(self.local / _SOCKETS[0][0])

    def of_ranks(self) -> list[Path]:
        """Return what ranks have left in the folder on this host: large values, files of MPI and of libraries."""
        kept = (NOTEBOOK, SESSIONS)
        return [path for path in self.local.iterdir() if path.name not in kept and not path.name.startswith(_SOCKETS)]

    @property
    def removable(self) -> list[Path]:
        """The folders that must not outlive the cluster."""
        return [self.profile, self.local]

    def remove(self) -> None:
        """Remove the folders that must not outlive the cluster, and the folder of logs if it is empty."""
        for folder in self.removable:
            remove_folder(folder)
        self.remove_logs_if_empty()

    def remove_logs_if_empty(self) -> None:
        """Remove the folder of logs if it has none."""
        try:
            self.run.rmdir()
        except OSError:
            return  # it has logs


def remove_paths(paths: Iterable[Path]) -> None:
    """Remove files and folders of ranks that have ended."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)  # MPI's own processes may be removing it too
        else:
            path.unlink(missing_ok=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder, to which ending processes, above all MPI's, may still write at the same time."""
    end_abandoned(folder)
    deadline = time.monotonic() + REMOVAL_SECONDS
    shutil.rmtree(folder, ignore_errors=True)
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
        shutil.rmtree(folder, ignore_errors=True)  # `_sweep` at a later start removes what is still left


def _probe(path: Path) -> None:
    """Fail now if the disk has no room for a connection file: the controller could not report it."""
    _write(path, bytes(4096))
    path.unlink()


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        error.filename = str(path.parent)  # the error of a full disk names no file
        raise


def _unwritable(error: OSError) -> LaunchError:
    return LaunchError(
        f"cannot write {error.filename}: {error.strerror}; free or repair that disk or folder, "
        "or set JUPYTER_RUNTIME_DIR and JUPYTER_DATA_DIR to others"
    )


def make_local(cluster_id: str) -> Path:
    """Create the folder on this host: home folders may be on a remote file system, which can't hold sockets."""
    folder = ROOT / f"{PREFIX}{cluster_id}"
    try:
        folder.mkdir(mode=0o700)
    except OSError:
        # No shared memory here, so large values are sent as messages.
        own = tempfile.gettempdir()
        return Path(tempfile.mkdtemp(prefix="disttrain-", dir=own if len(own) < LONGEST_TEMPORARY else "/tmp"))  # noqa: S108
    return folder


def _prune(runs: Path, profiles: Path, keep: int) -> None:
    """Remove old logs, except those of running clusters, since their last reset, and folders that are not ours.

    A notebook with another JUPYTER_RUNTIME_DIR may share the folder of logs; its clusters are known by their process.
    """
    running = tuple(f"-{profile.name}" for profile in profiles.iterdir())
    found = [folder for folder in runs.iterdir() if folder.is_dir() and _RUN.fullmatch(folder.name)]
    folders = sorted(found, key=lambda folder: (folder.name[:15], len(folder.name), folder.name))
    newest = {_RESETS.sub("", folder.name[15:]): folder for folder in folders}
    for folder in folders[:-keep]:
        made_s = time.mktime(time.strptime(folder.name[:15], _MADE))
        name = _RESETS.sub("", folder.name)
        if newest[name[15:]] == folder and (name.endswith(running) or _owner_runs(name, made_s)):
            continue
        shutil.rmtree(folder, ignore_errors=True)  # another notebook may be removing it too


def _sweep(profiles: Path) -> None:
    """Remove folders that clusters of this host left behind when their notebook and controller were both killed.

    The folders on this host decide which clusters are checked: the profiles may be on a file system that several hosts
    share, each with its own processes.
    """
    for local in ROOT.glob(f"{PREFIX}*"):
        cluster_id = local.name.removeprefix(PREFIX)
        try:
            found = local.lstat()
        except FileNotFoundError:
            continue  # its own cluster has just removed it
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            continue  # another user's folder, which can't even be listed
        if (local / NANNIES).exists():
            remove_unheld(local, NANNIES)  # the notebook and controller of this cluster are on another host
            continue
        is_young = time.time() - found.st_mtime < FOLDERS_STALE_SECONDS
        if is_young or _owner_runs(cluster_id, found.st_mtime) or answers(local):
            continue
        end_abandoned(local)
        for folder in (profiles / cluster_id, local):
            shutil.rmtree(folder, ignore_errors=True)  # another notebook may be removing it too


def _owner_runs(cluster_id: str, made_s: float) -> bool:
    """Whether the process that has made a cluster's folder runs; a process that started later has only its pid."""
    pid = cluster_id.rpartition("-")[0].rpartition("-")[2]
    try:
        return pid.isdigit() and psutil.Process(int(pid)).create_time() < made_s + BIRTH_SECONDS
    except psutil.NoSuchProcess:
        return False


def answers(local: Path) -> bool:
    """Whether a controller listens on a socket in this folder; a kept cluster outlives its notebook."""
    for path in local.glob("s-*"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)  # a stopped controller (SIGSTOP) accepts no connections but still exists
            if probe.connect_ex(str(path)) in (0, errno.EAGAIN):
                return True
    return False
