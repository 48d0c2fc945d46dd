"""Ranks on nodes that Slurm has granted.

Covers: starting them in a job that was submitted for them or in the allocation around the notebook, one more rank on a
node, whether they run, what the job said, ending them.
Does not cover: submitting the job (``slurm.grant``).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipyparallel.cluster.launcher import EngineLauncher, LocalProcessLauncher
from traitlets import Dict, Instance, List, Unicode

from ..slurm.batch_script import StartScript
from ..slurm.grant import Grant, step_command
from ..slurm.watch import Poller
from .local import is_alive

if TYPE_CHECKING:
    from collections.abc import Sequence


def write_start_script(grant: Grant, command: Sequence[str], mpirun: Sequence[str], exports: dict[str, str]) -> None:
    """Write what starts the ranks, all at once: a job may be waiting for it."""
    script = StartScript(
        nodes=len(grant.nodes),
        per_node=grant.per_node,
        command=tuple(command),
        environment=exports,
        mpirun=tuple(mpirun),
    ).render()
    half = Path(f"{grant.start_file}.half")
    with os.fdopen(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as opened:
        opened.write(script)
    half.rename(grant.start_file)


class JobRanks(EngineLauncher):
    """The ranks of a job that was submitted for them, and ends with them."""

    grant = Instance(Grant)
    command = List(Unicode())  # of a rank
    mpirun = List(Unicode())  # empty: they are started by srun
    exports = Dict()  # for the program that starts them
    process = None  # of this machine, as other launchers have one

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.poller = Poller(self.grant.job)

    def find_args(self) -> list[str]:
        """Return the command that has started them, for ipyparallel's own log."""
        return ["sbatch"]

    def start(self, n: int) -> Any:
        """Have the job start the ranks, for which it waits."""
        self.n = n
        write_start_script(self.grant, self.command, self.mpirun, self.exports)
        self.notify_start(self.grant.job.job_id)
        return self.grant.job.job_id

    def alive(self) -> bool:
        """Whether the job runs, by the last that Slurm has said; it is asked again if that was long ago."""
        self.poller.tick()
        return not self.poller.over

    @property
    def runs(self) -> bool:
        """The same, for one who waits for the end."""
        self.poller.hurry()
        return self.alive()

    def get_output(self, remove: bool = False) -> str:  # noqa: ARG002  (it is one of the logs that are kept)
        """Return what the job's script has said."""
        try:
            return Path(self.grant.log).read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def stop(self) -> None:
        """End the job, and wait until its nodes are free."""
        state = self.grant.job.cancel()
        log = Path(self.grant.log)
        if log.exists() and not log.stat().st_size:
            log.unlink()
        self.notify_stop({"exit_code": state.exit_code, "identifier": self.grant.job.job_id})

    def signal(self, sig: int) -> None:
        """Refuse: ranks are signalled one by one, through their nannies."""
        raise NotImplementedError


class AllocationRanks(LocalProcessLauncher, EngineLauncher):
    """The ranks in the allocation around the notebook, which outlives them."""

    grant = Instance(Grant)
    command = List(Unicode())
    mpirun = List(Unicode())
    exports = Dict()

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.poller = Poller(self.grant.job)

    def find_args(self) -> list[str]:
        """Return the command that starts all of them."""
        allocation = self.grant.allocation
        assert allocation is not None
        prefix = allocation.prefix(len(self.grant.nodes), self.grant.per_node)
        return [*prefix, "/bin/bash", self.grant.start_file]

    def start(self, n: int) -> Any:
        """Start the ranks."""
        self.n = n
        write_start_script(self.grant, self.command, self.mpirun, self.exports)
        return super().start()

    def alive(self) -> bool:
        """Whether what started them still runs."""
        return is_alive(self)

    @property
    def runs(self) -> bool:
        """The same: all ranks end with it."""
        return self.alive()

    def get_env(self) -> dict[str, str]:
        """Return nothing: their environment is in the scripts."""
        return {}


class StepRank(LocalProcessLauncher, EngineLauncher):
    """One more rank on a node of the job, in place of one that died."""

    grant = Instance(Grant)
    host = Unicode()
    command = List(Unicode())

    def find_args(self) -> list[str]:
        """Return the command that starts it."""
        return step_command(self.grant, self.host, list(self.command))

    def start(self, n: int) -> Any:
        """Start it."""
        assert n == 1
        return super().start()

    def alive(self) -> bool:
        """Whether what started it still runs."""
        return is_alive(self)

    @property
    def runs(self) -> bool:
        """The same."""
        return self.alive()

    def get_env(self) -> dict[str, str]:
        """Return nothing: its environment is in a file that its command names."""
        return {}
