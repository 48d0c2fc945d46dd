"""Run a command to its end.

Covers: its output, a time limit, ending its children with it.
Does not cover: commands of Slurm (``launchers.slurm.commands``), processes that go on (``launchers.local``).
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING

from .protocol.time_limits import COMMAND_GRACE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def run_command(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a session of its own, which is ended at an interrupt or after ``timeout_s`` seconds.

    Raises an OSError if it can't be started, and a subprocess.TimeoutExpired if it takes longer.
    """
    with subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException:  # a timeout or an interrupt, raised again: the command must not run on
            process.terminate()  # mpiexec then ends its processes, which are in other process groups
            with suppress(subprocess.TimeoutExpired):
                process.wait(COMMAND_GRACE_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # of its children
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
