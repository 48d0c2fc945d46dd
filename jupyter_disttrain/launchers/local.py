"""Start ranks as plain processes of this machine, without MPI.

Covers: the process that forks all ranks, the base class for launchers of one local process.
Does not cover: the environment of the ranks (``launchers.rank_environment``).
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ipyparallel.cluster.launcher import LocalEngineLauncher, LocalProcessLauncher
from traitlets import Unicode

from ..protocol.rank_death import signal_text
from ..protocol.time_limits import LOCAL_DYING_SECONDS

WELL_ENDED = "exited with code 0"
RANK_COMMAND = [sys.executable, "-m", "jupyter_disttrain.rank"]


class OneProcess(LocalProcessLauncher):
    """A process of this machine that starts ranks and runs as long as they do.

    Its output may not be UTF-8, e.g. of a login shell, a library or a localized batch system.
    """

    _output: str | None

    def get_output(self, remove: bool = False) -> str:
        """Return its output; undecodable bytes are replaced."""
        if self._output is None and self.output_file:
            with suppress(FileNotFoundError):
                self._output = Path(self.output_file).read_text(errors="replace")
        return str(super().get_output(remove=remove))

    def alive(self) -> bool:
        """Whether it still runs."""
        thread = self._wait_thread  # it waits for the process and ends with it
        return thread is not None and bool(thread.is_alive())

    @property
    def runs(self) -> bool:
        """The same as :meth:`alive`: all ranks end with it."""
        return self.alive()

    @property
    def exit_text(self) -> str:
        """How it ended, e.g. "was killed by SIGKILL: ..."; empty while it runs, or if that is unknown."""
        if self._wait_thread is not None:
            self._wait_thread.join(LOCAL_DYING_SECONDS)
        code = None if self.alive() or self.process is None else self.process.wait(0)
        if code is None:
            return ""
        return f"was killed by {signal_text(-code)}" if code < 0 else f"exited with code {code}"


class LocalRanks(OneProcess, LocalEngineLauncher):
    """One process that forks all ranks: importing the same modules in each would take most of their start.

    The client assigns the identities, so the order of the ranks does not matter.
    """

    folder = Unicode()  # of the ranks; empty: that of this process

    def start(self, n: int) -> Any:
        """Start ``n`` ranks with exactly ``environment``: ipyparallel would add this process's variables to it."""
        self.n = n
        self.work_dir = self.folder or "."
        others = [part for name in sorted(os.environ.keys() - self.environment.keys()) for part in ("-u", name)]
        self.engine_cmd = [*(["/usr/bin/env", *others] if others else []), *RANK_COMMAND, "--ranks", str(n)]
        return super().start()

    def get_env(self) -> dict[str, str]:
        """Return only the ranks' environment; ipyparallel would add to it."""
        return dict(self.environment)
