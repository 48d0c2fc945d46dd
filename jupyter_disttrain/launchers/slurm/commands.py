"""Run Slurm's commands.

Covers: running one, with times as numbers; its environment; the error when one fails.
Does not cover: parsing their output (``job_state``), the user's defaults for sbatch (``job``), the variables of ranks
(``launchers.rank_environment``).

In a job, or in a step of one, nearly every option of srun is set as a variable: with SLURM_GPUS=8 of ``salloc -G8``
each step on one node requests 8 GPUs there. The set of variables differs between versions, so all are removed except
those that locate Slurm and identify the user.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING, NamedTuple

from ...errors import LaunchError
from ...protocol.time_limits import COMMAND_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping

# A job needs no access to a notebook's server, and Slurm stores a job's environment.
_SECRETS = frozenset({"JUPYTERHUB_API_TOKEN", "JPY_API_TOKEN", "JUPYTER_TOKEN", "JUPYTERHUB_COOKIE_SECRET"})
_OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "PMIX_", "PMI_")  # prefixes of variables that belong to the job around us
# Not SLURM_CLUSTERS: all commands are about the cluster of this host.
_KEPT_OF_A_JOB = frozenset({"SLURM_CONF", "SLURM_JWT"})


class Answer(NamedTuple):
    """Result of a command."""

    code: int | None  # None: it did not reply in time; whether Slurm carried out the request is unknown
    output: str
    complaint: str  # its stderr

    @property
    def trouble(self) -> str:
        """Why it failed, on one line; empty if it succeeded."""
        if self.code == 0:
            return ""
        lines = [line.strip() for line in (self.complaint or self.output).splitlines()]
        return "; ".join(filter(None, lines)) or f"it exited with code {self.code} and printed nothing"


def slurm_environment() -> dict[str, str]:
    """Return this process's environment for Slurm's commands: without tokens and variables of the job around it."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT_OF_A_JOB or not (name in _SECRETS or name.startswith(_OF_A_JOB))
    }


def find(command: str) -> str:
    """Return the path of one of Slurm's commands.

    Raises
    ------
    LaunchError
        If there is none; the message names the remedy.
    """
    path = shutil.which(command)
    if path is None:
        raise LaunchError(
            f"no {command} was found on PATH, so this host is not part of a Slurm cluster, or its module is not "
            "loaded; run the notebook on a login node, load the module, or start without Slurm: %dist_init --launcher "
            "mpi"
        )
    return path


def ask(
    *command: str, text: str = "", environment: Mapping[str, str] | None = None, limit_s: float | None = None
) -> Answer:
    """Run one of Slurm's commands in a session of its own, which the notebook's interrupts do not reach.

    Parameters
    ----------
    command
        Its name and arguments.
    text
        Its stdin.
    environment
        Replaces :func:`slurm_environment`.
    limit_s
        Time limit in seconds; None: long enough for a busy site.

    Raises
    ------
    LaunchError
        If the command does not exist.
    """
    limit_s = COMMAND_SECONDS if limit_s is None else limit_s
    try:
        done = subprocess.run(  # noqa: S603
            [find(command[0]), *command[1:]],
            input=text,
            # Times in seconds since the epoch, untranslated messages.
            env={**(environment or slurm_environment()), "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        late = f"{command[0]} did not end within {limit_s:g} s; check with sdiag or sinfo whether Slurm responds"
        return Answer(None, "", late)
    return Answer(done.returncode, done.stdout, done.stderr)
