"""List the launchers of ranks.

Covers: the launchers by name; a new one needs its name in ``config.cluster.LAUNCHER_NAMES``, and one that runs ranks as
a batch job also what ``slurm.allocated_nodes`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .local import LocalRanks
from .mpi import MPIRanks
from .slurm.launcher import JobRanks, StepRanks
from .ssh import SSHRanks

if TYPE_CHECKING:
    from ipyparallel.cluster.launcher import EngineLauncher

LAUNCHERS: dict[str, type[EngineLauncher]] = {
    "local": LocalRanks,
    "mpi": MPIRanks,
    "ssh": SSHRanks,
    "slurm": JobRanks,
    "slurm step": StepRanks,
}
