"""The folders of a cluster.

Covers: the private folder that lives as long as the cluster, the folder of logs that is kept after it.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from jupyter_core.paths import jupyter_data_dir, jupyter_runtime_dir

from ..errors import LaunchError
from ..locks import check_locks, remove_unheld
from ..private_files import make_private_below
from ..shelf import NANNIES, NOTEBOOK, PREFIX, ROOT

BROUGHT_METRICS = "metrics"
KEPT_RUNS = 20  # folders of logs; the oldest go first
LONGEST_TEMPORARY = 70  # characters: the path of a Unix socket may have 107
REMOVAL_SECONDS = 5.0
STALE_SECONDS = 600.0  # since a folder was last written to; a younger one may be of a cluster that is just starting


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Where a cluster keeps what it needs."""

    profile: Path  # ipyparallel's profile: connection files, the launchers' logs; removed with the cluster
    run: Path  # one log per rank; kept
    local: Path  # of this host alone: the sockets, and in shared memory the shelf for large values; removed
    cluster_id: str

    @classmethod
    def make(cls, name: str) -> Folders:
        """Make both, readable by this user alone.

        Raises
        ------
        LaunchError
            If a folder can't be made; the message names it and the reason.
        """
        cluster_id = f"{name}-{os.getpid()}-{os.urandom(3).hex()}"
        local = _make_local(cluster_id)  # first: by it the next start finds what a notebook that was killed here left
        profile = Path(jupyter_runtime_dir()) / "disttrain" / cluster_id
        runs = Path(jupyter_data_dir()) / "disttrain" / "runs"
        run = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{cluster_id}"
        try:
            top, data = Path(jupyter_runtime_dir()), Path(jupyter_data_dir())
            for folder in (profile, profile / "security", profile / "log", profile / "pid", profile / "startup"):
                make_private_below(folder, top)
            make_private_below(run, data)
            _probe(profile / "security" / "probe")
            check_locks(profile)
            _write(local / NOTEBOOK, os.urandom(16).hex().encode())
        except BaseException as error:  # an interrupt too leaves nothing
            for folder in (profile, run, local):
                shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise LaunchError(
                f"cannot write {error.filename}: {error.strerror}; free or repair that disk or folder, "
                "or name others with JUPYTER_RUNTIME_DIR and JUPYTER_DATA_DIR"
            ) from error
        _prune(runs, profile.parent, keep=KEPT_RUNS)
        _sweep(profile.parent)
        return cls(profile=profile, run=run, local=local, cluster_id=cluster_id)

    @property
    def engine_file(self) -> Path:
        """The connection file that the ranks read."""
        return self.profile / "security" / f"ipcontroller-{self.cluster_id}-engine.json"

    @property
    def client_file(self) -> Path:
        """The connection file that clients read."""
        return self.profile / "security" / f"ipcontroller-{self.cluster_id}-client.json"

    @property
    def ledger(self) -> Path:
        """The file of the cells that have not ended."""
        return self.local / "open_cells.json"

    @property
    def stop_mark(self) -> Path:
        """The file that is there once another process than the notebook's ends the cluster."""
        return self.profile / "stopping"

    def rank_log(self, rank: int) -> Path:
        """Return where a rank's log is, once the rank has said something."""
        return self.run / f"rank{rank}.log"

    @property
    def metrics(self) -> Path:
        """Where what ranks have logged is read: beside the logs; through a tunnel, which brings it, in its folder."""
        brought = self.profile / BROUGHT_METRICS
        return brought if brought.is_dir() else self.run

    @property
    def shelf(self) -> Path | None:
        """The folder for large values; None where there is no shared memory."""
        return self.local if self.local.parent == ROOT else None

    @property
    def shelf_token(self) -> str:
        """What is written in the host's own folder, and in no namesake of it on another host."""
        return (self.local / NOTEBOOK).read_text()

    @property
    def environment_file(self) -> Path:
        """The environment of ranks on other hosts; it may hold secrets of the user's own."""
        return self.profile / "security" / "environment.json"

    @property
    def shelf_name(self) -> str | None:
        """The path of the shelf; None without one."""
        return None if self.shelf is None else str(self.shelf)

    @property
    def sockets(self) -> str:
        """What the names of the controller's sockets begin with."""
        return str(self.local / "s")

    @property
    def removable(self) -> list[Path]:
        """What must not outlive the cluster."""
        return [self.profile, self.local]

    def remove(self) -> None:
        """Remove what must not outlive the cluster, and a folder of logs in which there is none."""
        for folder in self.removable:
            remove_folder(folder)
        try:
            self.run.rmdir()
        except OSError:
            return  # there are logs in it


def remove_folder(folder: Path) -> None:
    """Remove a folder; processes that are just ending, MPI's above all, may still put files into it meanwhile."""
    deadline = time.monotonic() + REMOVAL_SECONDS
    shutil.rmtree(folder, ignore_errors=True)
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
        shutil.rmtree(folder, ignore_errors=True)  # what is left even so, the sweep of a later start takes


def _probe(path: Path) -> None:
    """Find out now whether the disk takes a connection file: the controller could not say."""
    _write(path, bytes(4096))
    path.unlink()


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        error.filename = str(path.parent)  # a full disk is told without a name
        raise


def _make_local(cluster_id: str) -> Path:
    """Make the host's own folder: home folders may be remote, where no socket can be."""
    folder = ROOT / f"{PREFIX}{cluster_id}"
    try:
        folder.mkdir(mode=0o700)
    except OSError:
        # No shared memory here, so large values travel as messages.
        own = tempfile.gettempdir()
        return Path(tempfile.mkdtemp(prefix="disttrain-", dir=own if len(own) < LONGEST_TEMPORARY else "/tmp"))  # noqa: S108
    return folder


def _prune(runs: Path, profiles: Path, keep: int) -> None:
    """Remove old logs; those of a cluster that runs stay, however old it is."""
    running = tuple(f"-{profile.name}" for profile in profiles.iterdir())
    folders = sorted((folder for folder in runs.iterdir() if folder.is_dir()), key=lambda folder: folder.name)
    for folder in folders[:-keep]:
        if folder.name.endswith(running):
            continue
        shutil.rmtree(folder, ignore_errors=True)  # another notebook may be removing it too


def _sweep(profiles: Path) -> None:
    """Remove what clusters of this host left whose notebook and controller were killed at once.

    The host's own folder decides: the profiles may be on a file system that hosts share, each with its own processes.
    """
    for local in ROOT.glob(f"{PREFIX}*"):
        cluster_id = local.name.removeprefix(PREFIX)
        try:
            found = local.lstat()
        except FileNotFoundError:
            continue  # its own cluster has just removed it
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            continue  # another user's, of which not even the names of its files may be asked
        if (local / NANNIES).exists():
            remove_unheld(local, NANNIES)  # of a cluster whose notebook and controller are on another host
            continue
        is_young = time.time() - found.st_mtime < STALE_SECONDS
        if is_young or _owner_runs(cluster_id) or answers(local):
            continue
        for folder in (profiles / cluster_id, local):
            shutil.rmtree(folder, ignore_errors=True)  # another notebook may be removing it too


def _owner_runs(cluster_id: str) -> bool:
    pid = cluster_id.rpartition("-")[0].rpartition("-")[2]
    return pid.isdigit() and psutil.pid_exists(int(pid))


def answers(local: Path) -> bool:
    """Whether a controller listens on any of its sockets; a kept cluster outlives its notebook."""
    for path in local.glob("s-*"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)  # a controller that was stopped takes no more connections, and is there
            if probe.connect_ex(str(path)) in (0, errno.EAGAIN):
                return True
    return False
