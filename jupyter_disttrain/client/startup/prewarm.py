"""Start the warm process of this machine before its ranks are requested.

Covers: which warm process ranks will be forked from, keeping it until the notebook ends.
Does not cover: the warm process (``rank.warm``), hosts other than the notebook's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...launchers.placement import Placement
from ...launchers.rank_environment import import_environment
from ...protocol.time_limits import COMMAND_GRACE_SECONDS
from .gpus import choose_gpus

if TYPE_CHECKING:
    from ...config.cluster import ClusterConfig

COMMAND = [sys.executable, "-m", "jupyter_disttrain.rank.warm.keep_alive"]


class Prewarmed:
    """Keeps the warm process for the ranks of a configuration; it is also used again by later clusters.

    The process that keeps it waits for the end of its stdin, and so ends with this one, however this one ends.
    """

    def __init__(self, config: ClusterConfig) -> None:
        gpus = choose_gpus(config)
        environment = import_environment(config, config.count or len(gpus) or 2, gpus, Placement())
        self._process = subprocess.Popen(  # noqa: S603
            [*COMMAND, str(Path.cwd())], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            cwd="/", env=os.environ | environment, start_new_session=True,
        )  # fmt: skip

    def close(self) -> None:
        """Let the warm process end once no rank needs it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(COMMAND_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
