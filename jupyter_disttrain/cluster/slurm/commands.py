"""Slurm's own commands.

Covers: running one, with times as numbers; what it means that one fails.
Does not cover: what they say (``state``, ``queue``).
"""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING, NamedTuple

from ...errors import LaunchError
from .environment import slurm_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

STATE_SECONDS = 10.0  # for Slurm to say how a job is: a rank's death, and the end of a cluster, wait for the answer
COMMAND_SECONDS = 60.0  # slurmctld of a busy site answers late


class SilentError(LaunchError):
    """Slurm did not answer in time; whether it did what it was asked for is not known."""


class Answer(NamedTuple):
    """What a command said."""

    code: int
    said: str
    complaint: str  # what it wrote to its stderr

    @property
    def trouble(self) -> str:
        """Why it failed, on one line."""
        lines = [line.strip() for line in (self.complaint or self.said).splitlines()]
        return "; ".join(filter(None, lines)) or f"it exited with code {self.code} and said nothing"


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
            f"no {command} was found on PATH, so this host is no part of a Slurm cluster, or its module is not loaded; "
            "run the notebook on a login node, load the module, or start without Slurm: %dist_init --launcher mpi"
        )
    return path


def ask(
    *command: str,
    text: str | None = None,
    environment: Mapping[str, str] | None = None,
    limit_s: float | None = None,
) -> Answer:
    """Run one of Slurm's commands, out of reach of the notebook's interrupts.

    Parameters
    ----------
    command
        Its name and arguments.
    text
        What it reads from its stdin.
    environment
        In place of what Slurm's commands may have of this process's own.
    limit_s
        How long it may take, in seconds; None: as long as a busy site may need.

    Raises
    ------
    LaunchError
        If it is not there.
    SilentError
        If it does not end.
    """
    variables = slurm_environment() if environment is None else dict(environment)
    limit_s = COMMAND_SECONDS if limit_s is None else limit_s
    variables |= {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}  # seconds since the epoch, in no zone and no language
    try:
        done = subprocess.run(  # noqa: S603
            [find(command[0]), *command[1:]],
            input=text or "",
            env=variables,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SilentError(
            f"{command[0]} did not end within {limit_s:g} s; see by sdiag or sinfo whether Slurm answers"
        ) from error
    return Answer(done.returncode, done.stdout, done.stderr)
