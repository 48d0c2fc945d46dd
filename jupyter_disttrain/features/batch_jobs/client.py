"""Join the ranks of a job that another launcher has started, by the file that the job wrote.

Covers: reading the file, whether the job can be reached, identifying the ranks when the first notebook joins.
Does not cover: the job's side (``features.batch_jobs.join``), attaching again later (``client.attach``), tunnels
(``client.transport.ssh_tunnel``).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...client.registry.cluster_file import ClusterFile
from ...client.startup.gpus import devices_of_job
from ...client.startup.launch import Launch
from ...client.startup.rank_table import decide, with_unique_hosts
from ...client.transport.ssh_tunnel import Tunnel, split, tunnel_of
from ...config.cluster import ClusterConfig
from ...config.hosts import HostSlots, split_command
from ...errors import LaunchError, UsageError
from ...launchers.folders import Folders
from ...launchers.placement import Placement
from ...private_files import read_own
from ...protocol.connection_file import JobFile, can_end_calls, check_beside
from ...protocol.ranks import counted
from ...protocol.shared_memory import NOTEBOOK
from ...protocol.time_limits import JOB_MEET_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...protocol.messages import RankHello
    from ...protocol.ranks import RankInfo


def is_file(which: str) -> bool:
    """Whether this is a job's file, on this host or as ``HOST:FILE``, and not a cluster's name or id."""
    return split(which) is not None or "/" in which or Path(which).is_file()


def find(which: str, ssh: str) -> JobFile | ClusterFile:
    """Return the cluster of a job's file: as an earlier notebook left it, or as the job started it.

    If the file is on another host, this opens a tunnel, which :func:`let_go` closes again. Raises a UsageError if the
    cluster can't be joined, and a LaunchError if ssh fails.
    """
    remote = split(which)
    if remote is not None:
        job_file = Tunnel(*remote, split_command(ssh)).job_file
        return _left_by_notebook(job_file, which) or job_file
    path = full_path(which)
    job_file = _read(Path(path))
    _check_reached(job_file, path)
    there = _left_by_notebook(job_file, path)
    if there is not None and there.is_held:
        raise UsageError(
            f"the ranks of {path} are held by {there.holder} on {there.host}, which still runs; use them there, or "
            "shut that kernel down or restart it first"
        )
    return there or job_file


def _read(path: Path) -> JobFile:
    try:
        job_file = JobFile.parse(read_own(path), str(path))
    except FileNotFoundError:
        raise UsageError(
            f"there is no {path}: the job has not started, has ended, or wrote its file elsewhere; rank 0 prints the "
            "path when it starts with --join"
        ) from None
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}; only the user who started the job may attach to it"
        ) from error
    # The same folder, wherever its file system is mounted on this host.
    return replace(job_file, profile=str(path.with_name(Path(job_file.profile).name)))


def full_path(which: str) -> str:
    """Return the path of a job's file as shown in messages."""
    return which if split(which) else str(Path(which).expanduser().absolute())


def let_go(there: JobFile | ClusterFile) -> None:
    """Close the tunnel, if any, to a cluster that could not be joined."""
    tunnel = tunnel_of(Path(there.profile))
    if tunnel is not None:
        tunnel.close()


def _check_reached(job_file: JobFile, path: str) -> None:
    outside = f"%dist_attach {job_file.host}:{path} connects through ssh"
    if ipaddress.ip_address(job_file.address).is_loopback and job_file.host != socket.gethostname():
        raise UsageError(
            f"the job of {path} can be reached only on {job_file.host}, at {job_file.address}; {outside}, or start it "
            "with --interface"
        )
    answer = job_file.answer()
    if answer == "refused":
        raise UsageError(f"the job that wrote {path} has ended; start it again, and remove that file")
    if answer != "there":
        raise UsageError(
            f"{job_file.host} does not reply at {job_file.address} ({answer}): the network probably blocks this "
            f"machine; {outside}"
        )
    if not Path(job_file.profile).is_dir():
        raise UsageError(
            f"{path} exists, but the folder {job_file.profile} beside it does not; the file can't be used outside the "
            f"job's file system: {outside}"
        )
    try:
        check_beside(Path(job_file.profile), Path(path))
    except OSError as error:
        raise UsageError(
            f"the folder {job_file.profile} beside {path} can't be used: {error.strerror}; start the job with its file "
            "in a folder where no other user may write"
        ) from error


def _left_by_notebook(job_file: JobFile, path: str) -> ClusterFile | None:
    """Return the cluster file of an earlier notebook, with paths valid on this host; None if there was none."""
    profile = Path(job_file.profile)
    try:
        there = ClusterFile.read(profile)
    except FileNotFoundError:
        return None
    return replace(there, profile=str(profile), local=str(_own_part(profile)), config=there.config | {"job_file": path})


def _own_part(profile: Path) -> Path:
    """Return the client's own folder; it is in the job's folder, because the next notebook may be on another host."""
    return profile if tunnel_of(profile) else profile / "client"


def config_of(job_file: JobFile, path: str) -> ClusterConfig:
    """Return the configuration of a job's cluster."""
    return ClusterConfig(
        n=job_file.world_size,
        launcher="mpi" if job_file.has_mpi else "local",
        backend=job_file.backend,
        name=job_file.name,
        keep=True,
        start_timeout_s=JOB_MEET_SECONDS,
        job=job_file.launcher,
        job_file=path,
    )


class JobLaunch(Launch):
    """The launch of a job's cluster whose ranks have not been identified yet."""

    def __init__(self, job_file: JobFile, config: ClusterConfig) -> None:
        self._job_file = job_file
        super().__init__(config)

    def decide(self) -> None:
        """Set folders, addresses and world size from the job's file."""
        job_file, state = self._job_file, self.state
        profile = Path(job_file.profile)
        # Not in shared memory, so large values are sent as messages.
        local = _own_part(profile)
        local.mkdir(mode=0o700, exist_ok=True)
        (local / NOTEBOOK).write_text(os.urandom(16).hex())
        state.folders = Folders(profile=profile, run=Path(job_file.run), local=local, cluster_id=job_file.cluster_id)
        self._taken.callback(state.folders.remove)
        state.started_s = job_file.started_s
        state.placement = Placement(listen=job_file.address, network=job_file.network)
        state.gpus = []
        state.n, state.address = job_file.world_size, job_file.address
        state.is_decided = True

    def start(self) -> None:
        """Identify all ranks; when it returns, they have joined their process group.

        Raises a LaunchError, and the job continues, if not all ranks connect, or one can't join the group; a UsageError
        if another notebook has just joined the job.
        """
        self.state.processes = self._make_processes()
        self._take_lease()
        try:
            self._connect(self.folders.cluster_id)
            hellos, nannies = self.registration.wait_for_all(self.state.n, self._check_time)
            self.assignment.introduce(self._assign(hellos), nannies)
        except BaseException:  # also a KeyboardInterrupt: the job must be left so that others can join it
            if self.table:  # the ranks may be identified already, and then send no more hellos
                for entry in self.table:
                    entry.group = "broken"
                self.write()
            self.leave()
            raise
        self.state.is_started = True
        self.write()
        self._show()

    def _assign(self, hellos: Sequence[RankHello]) -> list[tuple[RankInfo, RankHello]]:
        """Assign ranks as the job's launcher has numbered them; learn the hosts from the hellos."""
        job_file, state = self._job_file, self.state
        hellos = with_unique_hosts(sorted(hellos, key=lambda hello: hello.launch_rank or 0))
        names = [hello.launch_host for hello in hellos]
        state.placement = replace(
            state.placement,
            hosts=tuple(HostSlots(name=name, slots=names.count(name)) for name in dict.fromkeys(names)),
            addresses={job_file.host: job_file.address},
            description=f"network {job_file.network}",
        )
        state.mpi_heals = job_file.frees_mpi and all(can_end_calls(hello.mpi or "") for hello in hellos)
        backend, count, state.note_of_devices = devices_of_job(self.config, hellos)
        state.gpus = [str(gpu) for gpu in range(count)]
        return decide(hellos, backend, count, list(dict.fromkeys(names)))

    def _check_time(self, arrived: int = 0) -> None:
        if time.monotonic() > self.state.start_deadline:
            raise LaunchError(
                f"{arrived} of {counted(self.state.n, 'rank')} of {self.config.job_file} connected within "
                f"{self.config.start_timeout_s:g} s; check the job's output for the others, then run %dist_attach "
                "again"
            )
