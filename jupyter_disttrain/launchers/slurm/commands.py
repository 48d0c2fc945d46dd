"""Run Slurm's commands.

Covers: running one, with times as numbers; the error when one fails.
Does not cover: parsing their output (``job_state``, ``queue``).
"""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING, NamedTuple

from ...errors import LaunchError
from ...protocol.time_limits import COMMAND_SECONDS
from ..batch_environment import slurm_environment

if TYPE_CHECKING:
    from collections.abc import Mapping


class SilentError(LaunchError):
    """Slurm did not reply in time; whether it carried out the request is unknown."""


class Answer(NamedTuple):
    """Result of a command."""

    code: int
    output: str
    complaint: str  # its stderr

    @property
    def trouble(self) -> str:
        """Why it failed, on one line."""
        lines = [line.strip() for line in (self.complaint or self.output).splitlines()]
        return "; ".join(filter(None, lines)) or f"it exited with code {self.code} and printed nothing"


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
    *command: str,
    text: str | None = None,
    environment: Mapping[str, str] | None = None,
    limit_s: float | None = None,
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
    SilentError
        If it does not end in time.
    """
    variables = slurm_environment() if environment is None else dict(environment)
    limit_s = COMMAND_SECONDS if limit_s is None else limit_s
    variables |= {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}  # times in seconds since the epoch, untranslated messages
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
            f"{command[0]} did not end within {limit_s:g} s; check with sdiag or sinfo whether Slurm responds"
        ) from error
    return Answer(done.returncode, done.stdout, done.stderr)
