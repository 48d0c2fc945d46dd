"""Run the mpiexec of a script's MPI job, in the notebook's process.

Covers: starting it, reporting to the ranks that it has ended, ending it with the cell.
Does not cover: its command (``launchers.mpi``), the processes that it starts (``mpi_process``).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from ...errors import ClusterClosedError
from ...launchers.mpi import program_job
from ...protocol.requests import EndProgram
from ...protocol.time_limits import MPI_JOB_SECONDS, PROGRAMS_GRACE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...client.cells.cell_run import CellRun
    from ...client.startup.launch import Launch

COMMAND = [sys.executable, "-m", "jupyter_disttrain.features.scripts.mpi_process"]


class MpiJob:
    """The mpiexec of one run; ``sockets`` are the names of the ranks' sockets, in the order of ``ranks``."""

    def __init__(self, launch: Launch, ranks: Sequence[int], sockets: Sequence[str], folder: str) -> None:
        self._launch, self._ranks = launch, ranks
        state, program = launch.state, [*COMMAND, ",".join(sockets)]
        command, environment = program_job(launch.config, state.placement, state.folders.local, ranks, program)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed when mpiexec has ended)
        self._process = subprocess.Popen(  # noqa: S603
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    def follow(self, run: CellRun) -> None:
        """End the programs when mpiexec ends, and mpiexec when the cell has ended."""
        threading.Thread(target=self._follow, args=(run,), name="disttrain mpiexec", daemon=True).start()

    def _follow(self, run: CellRun) -> None:
        try:
            while not run.done:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(MPI_JOB_SECONDS)
                    self.report_end(run.number)
                    break
        finally:
            self.end()

    def report_end(self, cell: int) -> None:
        """Have the ranks of this cell end their programs, as mpiexec has ended."""
        code = self._process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        because = f"mpiexec {how}{self._last_lines()}"
        with suppress(ClusterClosedError):  # it ends its programs itself
            for rank in self._ranks:
                engine = self._launch.table[rank].engine
                self._launch.open_link.request(engine, EndProgram(cell=cell, because=because))

    def end(self) -> None:
        """End mpiexec, which ends by itself once all its processes have."""
        for step in (self._process.poll, self._process.terminate, self._process.kill):
            step()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(PROGRAMS_GRACE_SECONDS)
                break
        self._output.close()

    def _last_lines(self) -> str:
        if self._output.closed:
            return ""
        self._output.seek(0)
        text = self._output.read().decode(errors="replace").strip()
        return f": {' '.join(text.split())[-500:]}" if text else ""
