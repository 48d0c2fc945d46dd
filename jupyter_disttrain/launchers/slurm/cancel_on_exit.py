"""Cancel a job whose notebook has ended before ranks run in it.

Covers: a small process beside the notebook.
Does not cover: ranks, which end with their controller.

A notebook that is killed can't cancel the job it has queued, and hours later the job would run for nothing. The
process reads from a pipe of the notebook's. At its end, unless ranks were started or the cluster's folder can't be
read, it cancels the job and removes what the notebook had created for it. If the process was killed too, the job's
script (``batch_script``) waits in vain and ends.
"""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING

from .commands import find, slurm_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..folders import Folders

_PROGRAM = """
while read -r line; do job=$line; done
[ -e "$1" ] || ! ls "${1%/*}" > /dev/null && exit
[ "$job" ] && "$2" "$job"
rm -rf -- "${@:4}"
rmdir -- "$3"
"""


@contextlib.contextmanager
def cancelled_on_exit(folders: Folders, start_file: str) -> Iterator[Callable[[str], None]]:
    """Run the process, and yield a function that sends it the job's number.

    Leaving the context, or dropping it, ends the process without cancelling the job. Once ``start_file``, the script
    that starts the ranks, exists, the job ends with its ranks. Raises a LaunchError if there is no scancel.
    """
    arguments = [start_file, find("scancel"), str(folders.run), *map(str, folders.removable)]
    with subprocess.Popen(  # noqa: S603
        ["/bin/bash", "-c", _PROGRAM, "cancel_on_exit", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env=slurm_environment(),  # its scancel must use the Slurm that received the job
        start_new_session=True,  # survives the notebook's interrupts, and signals to its process group
    ) as process:
        pipe = process.stdin
        assert pipe is not None

        def guard(job_id: str) -> None:
            with contextlib.suppress(BrokenPipeError):  # it was killed; the notebook still runs and can cancel its job
                pipe.write(f"{job_id}\n".encode())

        try:
            yield guard
        finally:
            process.kill()
