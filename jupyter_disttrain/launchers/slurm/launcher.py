"""Start ranks on nodes that Slurm has granted.

Covers: starting them in a job that was submitted for them or in the allocation around the notebook, one more rank on a
node, whether they run, the job's output.
Does not cover: submitting the job and ending it (``allocated_nodes``).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ipyparallel.cluster.launcher import EngineLauncher
from traitlets import Instance, Unicode

from ...protocol.environment import MPI_HEALS, MPI_PREFIX
from ...protocol.time_limits import HURRIED_POLL_SECONDS
from ..local import OneProcess
from ..mpi import MPIRanks
from ..ssh import EARLY, rank_command
from .allocated_nodes import AllocatedNodes, step_command
from .batch_script import start_script
from .cancel_on_exit import relieve
from .monitor import JobMonitor

_FOR_MPIRUN = ("OMPI_", "PRTE_", "PMIX_", MPI_PREFIX)  # prefixes of variables that mpirun reads itself


def write_script(allocated: AllocatedNodes, environment: dict[str, str], environment_file: str, network: str) -> bool:
    """Write the script that starts all ranks, atomically: a job waits for it, and then ends with its ranks.

    Returns whether MPI can be repaired.
    """
    exports = {name: environment[name] for name in EARLY if name in environment}
    mpirun: list[str] = []
    heals = False
    if allocated.starts_with == "mpirun":  # it was checked to be Open MPI's before the job
        # MPIRanks has the settings of Open MPI over a network, and its version.
        mpi = MPIRanks(hosts=[("", 0)], network=network, environment=environment)
        heals = mpi.heals
        exports |= {name: value for name, value in mpi.get_env().items() if name.startswith(_FOR_MPIRUN)}
        exported = [argument for name in (MPI_HEALS, *EARLY) if name in exports for argument in ("-x", name)]
        mpirun = [*mpi.mpi_cmd, *(["--with-ft", "ulfm"] if heals else []), *exported]
    text = start_script(len(allocated.nodes), allocated.per_node, _rank(environment_file), exports, mpirun)
    half = Path(f"{allocated.start_file}.half")
    with os.fdopen(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as opened:
        opened.write(text)
    half.rename(allocated.start_file)
    relieve(allocated.start_file)  # from here on the job ends with its ranks, and those with the controller
    return heals


def _rank(environment_file: str) -> list[str]:
    """Return the command of one rank."""
    # Slurm's name of the node, which orders the ranks: the host's own name may differ.
    return ["/bin/sh", "-c", 'exec "$@" --host "$SLURMD_NODENAME"', "rank", *rank_command(environment_file)]


class JobRanks(EngineLauncher):
    """The ranks of a job that was submitted for them, and ends with them."""

    allocated = Instance(AllocatedNodes)
    environment_file = Unicode()
    network = Unicode()
    heals = False
    process = None  # there is no local process; other launchers have one

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.monitor = JobMonitor(self.allocated)

    def find_args(self) -> list[str]:
        """Return the command that started the job, for ipyparallel's log."""
        return ["sbatch"]

    def start(self, n: int) -> Any:
        """Let the job start the ranks: it waits for the script."""
        self.n = n
        self.heals = write_script(self.allocated, self.environment, self.environment_file, self.network)
        self.notify_start(self.allocated.job_id)
        return self.allocated.job_id

    def alive(self) -> bool:
        """Whether the job runs, by Slurm's last reply; Slurm is queried again if that is old."""
        self.monitor.tick()
        return not self.monitor.over

    @property
    def runs(self) -> bool:
        """The same as :meth:`alive`, with more frequent queries, for a caller that waits for the end."""
        self.monitor.tick(HURRIED_POLL_SECONDS)
        return not self.monitor.over

    @property
    def fate(self) -> str:
        """Why the job is over, once it is."""
        return self.monitor.over

    def get_output(self, remove: bool = False) -> str:  # noqa: ARG002  (the log is kept)
        """Return the output of the job's script."""
        try:
            return Path(self.allocated.log).read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def stop(self) -> None:
        """Record the end; the owner of the allocation ends the job."""
        self.notify_stop({"exit_code": None, "identifier": self.allocated.job_id})


class StepRanks(OneProcess, EngineLauncher):
    """Ranks that a process of this machine starts on granted nodes.

    They are all ranks, in the allocation around the notebook, which outlives them; or, with ``host``, one more on a
    node to replace one that died.
    """

    allocated = Instance(AllocatedNodes)
    environment_file = Unicode()
    network = Unicode()
    host = Unicode()
    folder = Unicode()
    heals = False

    def find_args(self) -> list[str]:
        """Return the command that starts the ranks."""
        if self.host:
            return step_command(self.allocated, self.host, _rank(self.environment_file))
        return [*self.allocated.env, "/bin/bash", self.allocated.start_file]

    def start(self, n: int) -> Any:
        """Start the ranks; srun takes the folder of one from its own."""
        self.n = n
        if self.host:
            self.work_dir = self.folder
        else:
            self.heals = write_script(self.allocated, self.environment, self.environment_file, self.network)
        return super().start()

    def get_env(self) -> dict[str, str]:
        """Return the variables that Python itself reads; the others are in a file that the command names."""
        return {name: self.environment.get(name, "") for name in EARLY}
