"""Be one rank of a script's MPI job until the script ends: ``python -m ...mpi_process SOCKETS``, which mpiexec runs.

Covers: connecting to the session's rank, which has the script run as this process; ending as the script ends.
Does not cover: the rank's side (``mpi_connection``), starting mpiexec (``mpi_job``).

PMIx knows a process by its environment. So the script's process, which the warm process forks, is this rank of the job
when it has this process's environment.
"""

from __future__ import annotations

import os
import sys

from ...process_table import end_as
from .mpi_connection import connect_to

_RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


def main() -> None:
    """Wait for the script, which runs elsewhere."""
    rank = next((int(os.environ[name]) for name in _RANK if os.environ.get(name)), None)
    if rank is None:
        sys.exit("mpiexec has set no rank; mpi4py and mpiexec belong to different MPI installations")
    end_as(connect_to(sys.argv[1].split(",")[rank]))


if __name__ == "__main__":
    main()
