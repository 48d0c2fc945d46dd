"""Cancel a job whose notebook has ended before ranks run in it.

Covers: a small process beside the notebook.
Does not cover: ranks, which end with their controller.

A notebook that is killed can't cancel the job it has queued, and hours later the job would run for nothing. The
process reads from a pipe of the notebook's: when that ends, it cancels the job and removes what the notebook had
created for it. If the process was killed too, the job's script (``batch_script``) waits in vain and ends.
"""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING

from .commands import find, slurm_environment

if TYPE_CHECKING:
    from ..folders import Folders

_PROGRAM = """
while read -r line; do job=$line; done
[ "$job" ] && "$1" "$job"
rm -rf -- "${@:3}"
rmdir -- "$2"
"""

# By the file that starts the ranks: AllocatedNodes are stored as JSON, and can't hold a process.
_processes: dict[str, subprocess.Popen[bytes]] = {}


def cancel_on_exit(folders: Folders, start_file: str) -> None:
    """Run the process, until :func:`relieve` ends it; raises a LaunchError if there is no scancel."""
    arguments = [find("scancel"), str(folders.run), *map(str, folders.removable)]
    _processes[start_file] = subprocess.Popen(  # noqa: S603
        ["/bin/bash", "-c", _PROGRAM, "cancel_on_exit", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env=slurm_environment(),  # its scancel must use the Slurm that received the job
        start_new_session=True,  # survives the notebook's interrupts, and signals to its process group
    )


def guard(start_file: str, job_id: str) -> None:
    """Send the process the job's number."""
    pipe = _processes[start_file].stdin
    assert pipe is not None
    with contextlib.suppress(BrokenPipeError):  # it was killed; the notebook still runs and can cancel its job
        pipe.write(f"{job_id}\n".encode())


def relieve(start_file: str) -> None:
    """End the process without cancelling the job, if it runs: the ranks are started, or the job is cancelled."""
    process = _processes.pop(start_file, None)
    if process is not None:
        with process:  # closes its pipe, and waits for its end
            process.kill()
