"""Ranks as plain processes of this machine, without MPI."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ipyparallel.cluster.launcher import LocalEngineLauncher, LocalEngineSetLauncher, LocalProcessLauncher

from ...messages import signal_words

DYING_SECONDS = 0.5  # for a process, whose sockets close before its end can be seen
RANK_COMMAND = [sys.executable, "-m", "jupyter_disttrain.engine"]


def is_alive(launcher: LocalProcessLauncher) -> bool:
    """Whether a launcher's process runs."""
    thread = launcher._wait_thread  # noqa: SLF001  (it waits for the process and ends with it)
    return thread is not None and bool(thread.is_alive())


class WithAnyLog(LocalProcessLauncher):
    """A process that may say what is no UTF-8: a login shell, a library, a batch system in the site's language."""

    _output: str | None

    def get_output(self, remove: bool = False) -> str:
        """Return what it has said, as far as it can be read."""
        if self._output is None and self.output_file:
            with suppress(FileNotFoundError):
                self._output = Path(self.output_file).read_text(errors="replace")
        return str(super().get_output(remove=remove))

    @property
    def exit_words(self) -> str:
        """How it ended, e.g. "was killed by SIGKILL: ..."; empty while it runs, or if that can't be told."""
        if self._wait_thread is not None:
            self._wait_thread.join(DYING_SECONDS)
        code = None if is_alive(self) or self.process is None else self.process.wait(0)
        if code is None:
            return ""
        return f"was killed by {signal_words(-code)}" if code < 0 else f"exited with code {code}"


class OneProcess(WithAnyLog):
    """One process of this machine that starts ranks and runs as long as they do."""

    def alive(self) -> bool:
        """Whether it still runs."""
        return is_alive(self)

    @property
    def runs(self) -> bool:
        """The same: all ranks end with it."""
        return self.alive()


class RanksOfThisMachine(WithAnyLog, LocalEngineLauncher):
    """The process that becomes all ranks."""


class LocalRanks(LocalEngineSetLauncher):
    """One process that forks all ranks: to import the same for each would take most of their start.

    They are told who they are, so no order has to be kept.
    """

    launcher_class = RanksOfThisMachine

    def start(self, n: int) -> Any:
        """Start ``n`` ranks."""
        self.engine_cmd = [*RANK_COMMAND, "--ranks", str(n)]
        started = super().start(1)
        self.n = n
        return started

    def alive(self) -> bool:
        """Whether a rank still runs; ipyparallel's own state is as old as the last turn of its event loop."""
        return any(is_alive(launcher) for launcher in self.launchers.values())

    @property
    def runs(self) -> bool:
        """The same: the process ends when all ranks have ended."""
        return self.alive()

    @property
    def exit_words(self) -> str:
        """How the process ended; empty while it runs, or if that can't be told."""
        return next((words for each in self.launchers.values() if (words := each.exit_words)), "")

    def get_env(self) -> dict[str, str]:
        """Return the ranks' environment whole; ipyparallel would add to it."""
        return dict(self.environment)
