"""Start ranks as a job of PBS or LSF, which a notebook attaches to.

Covers: the scripts, with options of a site; submitting and ending them, by ipyparallel's launchers.
Does not cover: the queue (see qstat and bjobs), attaching (``client.attach``), Slurm (``launchers.slurm.launcher``).

Unlike for a job of Slurm, %dist_init does not wait for such a job: its ranks write a file once they run, and
``%dist_attach FILE`` joins them. See docs/slurm.md.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from ipyparallel.cluster.launcher import BatchEngineSetLauncher, LSFEngineSetLauncher, PBSEngineSetLauncher
from traitlets import Integer, List, Unicode

from ...errors import UsageError
from ...launchers.batch_environment import without_tokens
from ...launchers.mpi import find_mpiexec


class _BatchRanks(BatchEngineSetLauncher):
    """Common base of both launchers; ``options`` are lines of the script that a site or a user adds."""

    join_file = Unicode(help="The file that the ranks write, on a file system that the notebook can read.")
    nodes = Integer(1, min=1)
    ntasks_per_node = Integer(1, min=1, help="Ranks on each node.")
    options = List(Unicode(), config=True, help="More options of the batch system, e.g. ['-l walltime=2:00:00'].")
    mpirun = List(Unicode(), config=True, help="mpirun with its first options; empty: the one that is found.")

    mark = ""  # prefix of lines with options
    host_file = ""  # variable with the path of the host file

    def own_options(self) -> list[str]:
        """Return the options with the numbers of nodes and ranks, and the output file."""
        raise NotImplementedError

    def render(self) -> str:
        """Return the script.

        Raises
        ------
        UsageError
            If an option has more than one line, or no join file is set.
        """
        if not self.join_file:
            raise UsageError(
                "join_file is not set; name the file with which the notebook joins the ranks, e.g. "
                "join_file='/shared/run.json'"
            )
        for option in self.options:
            if not option.isprintable():
                raise UsageError(f"an option must be one line of text, not {option!r}")
        rank = [sys.executable, "-m", "jupyter_disttrain.rank", "--join", self.join_file]
        placed = ["--continuous", "--map-by", f"ppr:{self.ntasks_per_node}:node:oversubscribe", "--bind-to", "none"]
        start = shlex.join([*(self.mpirun or [find_mpiexec()]), *placed])
        queue = [f"-q {self.queue}"] if self.queue else []
        lines = [f"{self.mark} {option}" for option in (*self.own_options(), *queue, *self.options)]
        command = f'exec {start} --hostfile "${self.host_file}" {shlex.join(rank)}'
        return "\n".join(["#!/bin/bash", *lines, f"cd {shlex.quote(str(Path.cwd()))} || exit 1", command, ""])

    def write_batch_script(self, n: int = 1) -> None:
        """Write the script to the disk; its braces are escaped, as ipyparallel formats the template."""
        self.batch_template = self.render().replace("{", "{{").replace("}", "}}")
        super().write_batch_script(n)

    def _run_command(self, command: list[str], **options: Any) -> str:
        """Run a command of the batch system, without tokens: the batch system stores a job's environment."""
        return str(super()._run_command(command, **options | {"env": without_tokens()}))

    def submit(self) -> Any:
        """Submit the script to the batch system; returns the job's number."""
        return self.start(self.nodes * self.ntasks_per_node)


class PBSRanks(_BatchRanks, PBSEngineSetLauncher):
    """Ranks as a job of PBS; ``stop()`` ends it with qdel.

    Examples
    --------
    >>> job = PBSRanks(join_file="/shared/run.json", nodes=2, ntasks_per_node=4, queue="gpu")   # doctest: +SKIP
    >>> job.submit()                                                                           # doctest: +SKIP
    """

    mark = "#PBS"
    host_file = "PBS_NODEFILE"
    cpus_per_rank = Integer(1, min=1, config=True)

    def own_options(self) -> list[str]:
        """Return PBS's options for nodes, ranks and output."""
        cpus = self.cpus_per_rank * self.ntasks_per_node
        return [
            "-N disttrain",
            "-V",
            f"-l select={self.nodes}:ncpus={cpus}:mpiprocs={self.ntasks_per_node}",
            "-j oe",
            f"-o {self.output_file}",
        ]


class LSFRanks(_BatchRanks, LSFEngineSetLauncher):
    """Ranks as a job of LSF; ``stop()`` ends it with bkill."""

    mark = "#BSUB"
    host_file = "LSB_DJOB_HOSTFILE"

    def start(self, n: int = 1) -> Any:
        """Submit the script to bsub through its stdin; ipyparallel's own method would pass the tokens on."""
        self.write_batch_script(n)
        with Path(self.batch_file).open("rb") as script:
            command, environment = list(self.submit_command), without_tokens()
            done = subprocess.run(command, stdin=script, stdout=subprocess.PIPE, env=environment, check=False)  # noqa: S603
        job_id = self.parse_job_id(done.stdout.decode(errors="replace"))
        self.notify_start(job_id)
        return job_id

    def own_options(self) -> list[str]:
        """Return LSF's options for ranks and output."""
        return [
            "-J disttrain",
            "-env all",
            f"-n {self.nodes * self.ntasks_per_node}",
            f'-R "span[ptile={self.ntasks_per_node}]"',
            f"-o {self.output_file}",
        ]
