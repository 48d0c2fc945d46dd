"""Run ``jupyter disttrain`` in a separate process, and clean up clusters that a test leaves."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from jupyter_disttrain.client.registry import cluster_file

if TYPE_CHECKING:
    from jupyter_disttrain import Cluster


def end(cluster: Cluster) -> None:
    """End a cluster, even if another process owns it now."""
    cluster.shutdown()
    for left in cluster_file.running():
        if left.cluster_id == cluster.cluster_id:
            assert command("stop", left.cluster_id).returncode == 0


def left_idle(cluster: Cluster, setup: str = "") -> bool:
    """Return whether a test left no cell running; otherwise end it, for the next test, with new ranks if needed.

    ``setup``: code to run on new ranks.
    """
    if not cluster.running_cells:
        return True
    cluster.interrupt_and_wait()
    if cluster.running_cells:
        cluster.reset()
        cluster.run(setup)
    return False


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``jupyter disttrain``."""
    program = [sys.executable, "-m", "jupyter_disttrain.cli", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
