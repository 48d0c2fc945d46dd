"""Run a program in a separate process, which this rank waits for.

Covers: starting it with a rank's variables or with a node's, its exit, ending it.
Does not cover: scripts that run in the rank's own process (``in_process``).

The program's output goes to the rank's pipes, so it is shown as the rank's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import psutil

from ...protocol.environment import PREFIX
from ...protocol.messages import signal_text
from ...protocol.time_limits import PROGRAMS_GRACE_SECONDS
from ...rank.libraries.defaults import without_session_defaults
from ...rank.process_group.errors import ReleasedError
from ...rank_sessions import kill
from .errors import ScriptError, ScriptExit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


# Variables of one rank, which a launcher must not find.
_OF_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
_OF_RANK_BEGIN = ("TORCHELASTIC_", "GROUP_", "OMPI_COMM_WORLD_")
# By these ipykernel declares to the processes it starts that their output is a terminal's, and bars then move a cursor
# that a notebook doesn't have. Here as the user set them.
_COLOURS = {name: os.environ.get(name) for name in ("FORCE_COLOR", "CLICOLOR_FORCE")}
_OF_JOB_BEGIN = ("OMPI_", "PMIX_", "PRTE_", PREFIX)  # of the MPI job that this rank belongs to


class ProgramExit(ScriptExit):
    """A program in a separate process has exited with a code other than 0."""


class ProgramReleasedError(ScriptError, ReleasedError):
    """A program was ended because another rank's had failed."""


class Programs:
    """The program that this rank waits for, if any."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._released = False
        self._generation = 0
        self.name = ""

    @property
    def doing(self) -> str:
        """The program that the rank waits for, as text; empty if there is none."""
        process = self._process
        return "" if process is None else f"its program {self.name} (process {process.pid})"

    def run(
        self, command: Sequence[str], name: str, environment: Mapping[str, str], folder: str, generation: int
    ) -> None:
        """Run a program to its end; ``generation`` is that of the session's group.

        Raises
        ------
        ScriptError
            If it can't be started, or exits with a code other than 0.
        ProgramReleasedError
            If it was ended because another rank's had failed.
        """
        self._released, self._generation, self.name = False, generation, name
        try:
            process = subprocess.Popen(command, env=dict(environment), cwd=folder, stdin=subprocess.DEVNULL)  # noqa: S603
        except OSError as error:
            raise ScriptError(f"{name} can't be started in {folder}: {error.strerror}") from None
        self._process = process
        try:
            code = _wait_for_program(process)
        except BaseException:  # mostly an interrupt; it is raised again
            self._end()
            raise
        finally:
            self._process = None
        if self._released:
            raise ProgramReleasedError(f"{name} was ended because the program of another rank failed")
        if code:
            how = f"was killed by {signal_text(-code)}" if code < 0 else f"exited with code {code}"
            raise ProgramExit(f"{name} {how}")

    def release(self, generation: int) -> None:
        """End the program, because another rank's has failed; called on another thread.

        A release that arrives late, when a later program runs, must not affect that one.
        """
        process = self._process
        if process is None or generation < self._generation:
            return
        self._released = True
        family = _family(process.pid)
        process.terminate()
        timer = threading.Timer(PROGRAMS_GRACE_SECONDS, kill, [family])
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        """End a program that was interrupted, as its terminal would have done, and has not exited yet."""
        process = self._process
        assert process is not None
        family = _family(process.pid)
        try:
            try:
                _wait_for_program(process, PROGRAMS_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.terminate()
                _wait_for_program(process, PROGRAMS_GRACE_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # another interrupt of the user
            pass
        finally:
            kill(family)
            process.wait()


def _wait_for_program(process: subprocess.Popen[bytes], longest_s: float | None = None) -> int:
    """Wait for its exit; an interrupt ends this as if it were the user's code (``rank.interrupts.deferral``)."""
    return process.wait(longest_s)


def _family(pid: int) -> list[psutil.Process]:
    """Return a program and all its descendants."""
    try:
        program = psutil.Process(pid)
        return [program, *program.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def of_rank(identity: Mapping[str, str], port: int) -> dict[str, str]:
    """Return the environment of a program that takes this rank's place, as torchrun would set it."""
    return _outside_job() | dict(identity) | {"MASTER_PORT": str(port)}


def of_node(nodes: int, port: int) -> dict[str, str]:
    """Return the environment of a program that starts processes of its own, one such program on each node."""
    environment = _outside_job()
    kept = {name: value for name, value in environment.items() if name not in _OF_RANK}
    kept = {name: value for name, value in kept.items() if not name.startswith(_OF_RANK_BEGIN)}
    return kept | {"NNODES": str(nodes), "MASTER_PORT": str(port)}


def _outside_job() -> dict[str, str]:
    """Return this process's environment without what makes it a part of the session's MPI job."""
    found = without_session_defaults(os.environ)
    found = {name: value for name, value in found.items() if not name.startswith(_OF_JOB_BEGIN)}
    found.pop("PYTHONSAFEPATH", None)  # the rank's own: a script finds the modules beside it
    for name, value in _COLOURS.items():
        found.pop(name, None)
        found |= {} if value is None else {name: value}
    return found


def command_of(target: str, arguments: Sequence[str], *, is_module: bool) -> list[str]:
    """Return the command that runs a script or a module with this Python."""
    return [sys.executable, "-u", *(["-m"] if is_module else []), target, *arguments]
