"""Start ranks as plain processes of this machine, without MPI.

Covers: the process that forks all ranks, base classes for launchers of one local process.
Does not cover: the environment of the ranks (``launchers.rank_environment``).
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ipyparallel.cluster.launcher import LocalEngineLauncher, LocalEngineSetLauncher, LocalProcessLauncher
from traitlets import Unicode

from ..protocol.messages import signal_text
from ..protocol.time_limits import LOCAL_DYING_SECONDS

WELL_ENDED = "exited with code 0"
RANK_COMMAND = [sys.executable, "-m", "jupyter_disttrain.rank"]


def is_alive(launcher: LocalProcessLauncher) -> bool:
    """Whether a launcher's process runs."""
    thread = launcher._wait_thread  # noqa: SLF001  (the thread waits for the process and ends with it)
    return thread is not None and bool(thread.is_alive())


class WithAnyLog(LocalProcessLauncher):
    """A process whose output may not be UTF-8, e.g. of a login shell, a library or a localized batch system."""

    _output: str | None

    def get_output(self, remove: bool = False) -> str:
        """Return its output; undecodable bytes are replaced."""
        if self._output is None and self.output_file:
            with suppress(FileNotFoundError):
                self._output = Path(self.output_file).read_text(errors="replace")
        return str(super().get_output(remove=remove))

    @property
    def exit_text(self) -> str:
        """How it ended, e.g. "was killed by SIGKILL: ..."; empty while it runs, or if that is unknown."""
        if self._wait_thread is not None:
            self._wait_thread.join(LOCAL_DYING_SECONDS)
        code = None if is_alive(self) or self.process is None else self.process.wait(0)
        if code is None:
            return ""
        return f"was killed by {signal_text(-code)}" if code < 0 else f"exited with code {code}"


class OneProcess(WithAnyLog):
    """One process of this machine that starts ranks and runs as long as they do."""

    def alive(self) -> bool:
        """Whether it still runs."""
        return is_alive(self)

    @property
    def runs(self) -> bool:
        """The same as :meth:`alive`: all ranks end with it."""
        return self.alive()


class RanksOfThisMachine(WithAnyLog, LocalEngineLauncher):
    """The process that forks all ranks."""


class LocalRanks(LocalEngineSetLauncher):
    """One process that forks all ranks: importing the same modules in each would take most of their start.

    The client assigns the identities, so the order of the ranks does not matter.
    """

    launcher_class = RanksOfThisMachine
    folder = Unicode()  # of the ranks; empty: that of this process

    def start(self, n: int) -> Any:
        """Start ``n`` ranks with exactly ``environment``: ipyparallel would add this process's variables to it."""
        self.work_dir = self.folder or "."
        others = [part for name in sorted(os.environ.keys() - self.environment.keys()) for part in ("-u", name)]
        self.engine_cmd = [*(["/usr/bin/env", *others] if others else []), *RANK_COMMAND, "--ranks", str(n)]
        started = super().start(1)
        self.n = n
        return started

    def alive(self) -> bool:
        """Whether a rank still runs; ipyparallel's own state is only updated by its event loop."""
        return any(is_alive(launcher) for launcher in self.launchers.values())

    @property
    def runs(self) -> bool:
        """The same as :meth:`alive`: the process ends when all ranks have ended."""
        return self.alive()

    @property
    def exit_text(self) -> str:
        """How the process ended; empty while it runs, or if that is unknown."""
        return next((text for each in self.launchers.values() if (text := each.exit_text)), "")

    def get_env(self) -> dict[str, str]:
        """Return only the ranks' environment; ipyparallel would add to it."""
        return dict(self.environment)
