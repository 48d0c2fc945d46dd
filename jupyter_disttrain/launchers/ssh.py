"""Start ranks on hosts that are reached by ssh, without MPI.

Covers: the command for one host, one ssh for all its ranks.
Does not cover: whether the host can be used (``launchers.hosts.preflight``), MPI over hosts (``mpi``).

The hosts share nothing but the network. So the loss of one does not affect the others, and its ranks can be started
again there or on another host.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipyparallel.cluster.launcher import LocalEngineSetLauncher
from traitlets import List, Unicode

from ..protocol.time_limits import SSH_CONNECT_SECONDS
from .local import OneProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

# Variables that must be set before the environment's file is read: they locate Python and its modules.
EARLY = ("PYTHONPATH", "LD_LIBRARY_PATH", "PYTHONSAFEPATH")
SSH_OPTIONS = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={SSH_CONNECT_SECONDS}"]


def rank_command(environment_file: str, host: str = "", ranks: int = 1) -> list[str]:
    """Return the command that starts ranks on a host."""
    command = [sys.executable, "-m", "jupyter_disttrain.rank", "--environment", environment_file]
    return [*command, *(["--host", host] if host else []), *(["--ranks", str(ranks)] if ranks > 1 else [])]


def remote_command(command: Sequence[str], environment: dict[str, str], folder: str) -> str:
    """Return a command for a remote shell, which changes to the folder of the ranks."""
    early = [f"{name}={environment[name]}" for name in EARLY if environment.get(name)]
    # A login shell's set-up is what users configure, and may load modules; its output goes to the launcher's log.
    return f"cd {shlex.quote(folder)} && exec env {shlex.join([*early, *command])}"


class SSHRanks(LocalEngineSetLauncher):
    """The ranks of all hosts, one ssh for each host, which runs as long as one of its ranks."""

    hosts: List[Any] = List()  # of (name, ranks)
    ssh = List(Unicode())
    environment_file = Unicode()
    folder = Unicode()  # of the ranks; empty: that of this process

    def start(self, n: int) -> Any:
        """Start the ranks of every host."""
        self.n = n
        started = []
        for name, ranks in self.hosts:
            ranks_there = rank_command(self.environment_file, name, ranks)
            command = remote_command(ranks_there, self.environment, self.folder or str(Path.cwd()))
            launcher = self.launchers[name] = OneProcess(
                work_dir=self.work_dir,
                parent=self,
                log=self.log,
                profile_dir=self.profile_dir,
                cluster_id=self.cluster_id,
                identifier=name,
                output_file=str(Path(self.profile_dir) / "log" / f"ssh-{self.engine_set_id}-{name}.log"),
            )
            launcher.cmd_and_args = [*self.ssh, *SSH_OPTIONS, name, command]
            launcher.on_stop(self._notice_engine_stopped)
            started.append(launcher.start())
        self.notify_start(started)
        return started

    def alive(self) -> bool:
        """Whether every ssh still runs; none may end while ranks start."""
        return len(self.launchers) == len(self.hosts) and all(each.alive() for each in self.launchers.values())

    @property
    def runs(self) -> bool:
        """Whether any ssh still runs."""
        return any(each.alive() for each in self.launchers.values())
