"""Cancel a job whose notebook has ended before ranks run in it.

Covers: a small process beside the notebook, and the file that it touches as a heartbeat.
Does not cover: the job's script, which checks that file (``batch_script``); ranks, which end with their controller.

A notebook that is killed can't cancel the job it has queued, and hours later the job would run for nothing. The process
reads from a pipe of the notebook's: when that ends, it cancels the job and removes what the notebook had created for
it. If the process was killed too, the job's script detects by the age of the file that no notebook waits for it.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from ...protocol.time_limits import SENTRY_BEAT_SECONDS
from ..batch_environment import slurm_environment
from .commands import find

if TYPE_CHECKING:
    from pathlib import Path

    from ..folders import Folders

SIGN = "waiting"  # name of the file, in a folder that is removed with the cluster
_PROGRAM = """
sign=$1 scancel=$2 run=$3 job=
shift 3
while :; do
    touch "$sign" 2> /dev/null
    read -r -t {beat} line
    case $? in
        0) [ "$line" ] || exit 0; job=$line ;;
        1) break ;;
    esac
done
[ "$job" ] && "$scancel" "$job"
rm -rf -- "$@"
rmdir -- "$run"
"""

_on_duty: dict[str, Sentry] = {}  # by job: AllocatedNodes are stored as JSON, and can't hold a process


class Sentry:
    """The process, from before a job is submitted until its ranks are started.

    Parameters
    ----------
    folders
        The cluster's folders, which the process removes if the notebook has ended.

    Raises
    ------
    LaunchError
        If there is no scancel.
    """

    def __init__(self, folders: Folders) -> None:
        self.sign: Path = folders.profile / SIGN
        self.sign.touch()
        arguments = [str(self.sign), find("scancel"), str(folders.run), *map(str, folders.removable)]
        self._process = subprocess.Popen(  # noqa: S603
            ["/bin/bash", "-c", _PROGRAM.format(beat=SENTRY_BEAT_SECONDS), "sentry", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=slurm_environment(),  # its scancel must use the Slurm that received the job
            start_new_session=True,  # survives the notebook's interrupts, and signals to its process group
        )

    def guard(self, job_id: str) -> None:
        """Send the process the job's number."""
        _on_duty[job_id] = self
        self._write(f"{job_id}\n")

    def leave(self) -> None:
        """End the process without cancelling the job; a second call does nothing."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return
        self._write("\n")
        self._process.stdin.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it was killed; the notebook still runs and can cancel its job


def relieve(job_id: str) -> None:
    """End the sentry of a job, if there is one: its ranks are started, or it is cancelled."""
    sentry = _on_duty.pop(job_id, None)
    if sentry is not None:
        sentry.leave()
