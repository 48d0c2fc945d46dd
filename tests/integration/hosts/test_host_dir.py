"""The cluster's folder on another host, used by processes of this one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from jupyter_disttrain.protocol.environment import LOCAL_DIR

NANNY = "from jupyter_disttrain.rank.startup.host_dir import HostFolder; f = HostFolder(); print(flush=True); input()"


def test_folder_is_removed_when_all_its_nannies_are_killed(tmp_path: Path) -> None:
    folder = tmp_path / "disttrain-killed"
    nannies = [
        subprocess.Popen(
            [sys.executable, "-c", NANNY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {LOCAL_DIR: str(folder)},
        )
        for _ in range(2)
    ]
    for at, nanny in enumerate(nannies):
        assert nanny.stdout is not None
        nanny.stdout.readline()
        assert folder.exists()
        if at:
            (folder / "segment").write_text("MPI's")
    nannies[0].kill()
    nannies[0].communicate()  # its watcher holds no pipe of it
    assert (folder / "segment").exists()
    nannies[1].kill()
    nannies[1].communicate()
    deadline = time.monotonic() + 20
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
