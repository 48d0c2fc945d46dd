"""Explain errors of srun for a node that could not be queried, and suggest remedies.

Covers: a node of a job that sent no reply.
Does not cover: a node that replied (``preflight``), hosts behind ssh (``ssh_errors``).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..hosts.report import SILENT

if TYPE_CHECKING:
    from ..hosts.report import HostReport, HostRequirements

NOT_RUN = "execve"  # in slurmstepd's error when it can't start a program
_LONGEST = 300  # characters of srun's output in a message
_PREFIX = re.compile(r"^(?:srun|slurmstepd(?:-[\w.-]+)?): (?:error: )?")
_NOISE = (
    "Terminated",
    "Job step aborted",
    "task 0: Exited",
    "launch/slurm",
    "couldn't chdir",
    "lacks support for",
)  # follow-up errors


def explain_step(report: HostReport, wanted: HostRequirements) -> tuple[str, str]:
    """Return the problem with a node that could not be queried, and the remedy.

    Neither contains the node's name, so that the same problem of several nodes is reported once.
    """
    output = _last(report.failure)
    if "this is Python" in report.failure:
        version = output.partition("this is ")[2]
        return (
            f"{wanted.python} is {version} there, here it is {wanted.python_version}",
            "install the same environment on all nodes",
        )
    if NOT_RUN in report.failure:
        return (
            f"{wanted.python} can't be run there ({output})",
            "install the same environment at that path, or put it into a folder that all nodes share",
        )
    by_hand = f"run it in an allocation: srun --nodelist=NODE {wanted.python} --version"
    if report.exit_code is None:
        ports = "check that nodes can reach this machine's ports (SrunPortRange), and that no file system hangs"
        so_far = "" if report.failure == SILENT else f"; its output so far: {output}"
        return f"srun returned no reply within {wanted.limit_s:g} s{so_far}", f"{by_hand}; {ports}"
    return f"srun could not start the process there, or it failed (exit code {report.exit_code}): {output}", by_hand


def _last(output: str) -> str:
    """Return the last line that has a reason, without the prefix of the program."""
    lines = [_PREFIX.sub("", line.strip()) for line in output.splitlines() if line.strip()]
    why = [line for line in lines if not any(phrase in line for phrase in _NOISE)]
    return ["", *lines[-1:], *why][-1][:_LONGEST]
