"""Who cancels a job whose notebook has gone before ranks run in it.

Covers: a small process beside the notebook, and the file that it touches as a sign of life.
Does not cover: the job's script, which looks at that file (``batch_script``); ranks, which end with their controller.

A notebook that is killed can't cancel what it has queued, and hours later the job would run for nothing. The process
reads from a pipe of the notebook's: when that ends, it cancels the job and removes what the notebook had made for it.
Where it was killed too, the job's script sees by the age of the file that nobody waits for it.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from .commands import find
from .environment import slurm_environment

if TYPE_CHECKING:
    from pathlib import Path

    from ..folders import Folders

SIGN = "waiting"  # the file, in a folder that goes with the cluster
BEAT_SECONDS = 2  # between two touches of it
STALE_SECONDS = 30  # without one, and nobody waits; a file system that is shared may be slow
_PROGRAM = """
sign=$1 scancel=$2 run=$3 job=
shift 3
while :; do
    touch "$sign" 2> /dev/null
    read -r -t {beat} word
    case $? in
        0) [ "$word" ] || exit 0; job=$word ;;
        1) break ;;
    esac
done
[ "$job" ] && "$scancel" "$job"
rm -rf -- "$@"
rmdir -- "$run"
"""

_on_duty: dict[str, Sentry] = {}  # by job: a grant is written as JSON, and can't hold one


class Sentry:
    """The process, from before a job is submitted until its ranks are started.

    Parameters
    ----------
    folders
        Of the cluster; without a notebook nobody else would remove them.

    Raises
    ------
    LaunchError
        If there is no scancel.
    """

    def __init__(self, folders: Folders) -> None:
        self.sign: Path = folders.profile / SIGN
        self.sign.touch()
        words = [str(self.sign), find("scancel"), str(folders.run), *map(str, folders.removable)]
        self._process = subprocess.Popen(  # noqa: S603
            ["/bin/bash", "-c", _PROGRAM.format(beat=BEAT_SECONDS), "sentry", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=slurm_environment(),  # its scancel is to ask the Slurm that the job was given to
            start_new_session=True,  # out of reach of the notebook's interrupts, and of who kills its process group
        )

    def guard(self, job_id: str) -> None:
        """Say which job it is."""
        _on_duty[job_id] = self
        self._say(f"{job_id}\n")

    def leave(self) -> None:
        """End it; the job is left alone. Does nothing the second time."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return
        self._say("\n")
        self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # somebody has killed it, and the notebook is still there to cancel its job


def relieve(job_id: str) -> None:
    """End the sentry of a job, if there is one: its ranks are started, or it is cancelled."""
    sentry = _on_duty.pop(job_id, None)
    if sentry is not None:
        sentry.leave()
