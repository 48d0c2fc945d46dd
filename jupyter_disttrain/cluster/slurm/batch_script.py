"""What a job does, as text.

Covers: the script that is submitted, the one that starts the ranks once the nodes are known.
Does not cover: handing anything to Slurm (``job``).

There is no secret in them, since Slurm keeps scripts and environments: the ranks read theirs from a file that only its
owner can read, and how to reach the controller from another.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .sentry import STALE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping

WAIT_SECONDS = 300  # of a job for the notebook, which asks the nodes what they have
UNSEEN_SECONDS = 30  # of a job that does not see the notebook's files: meanwhile the notebook finds that out too
LOOKS_PER_SECOND = 5
_PLAIN = re.compile(r"[\w@%+=:,./\[\]-]+")
_WAIT = """\
# Which network the ranks use can be said only now that the nodes are known: the notebook writes it into a file.
# Until then it has another file touched every few seconds. Both times are the file server's, if there is one.
start={start} sign={sign}
for attempt in {{1..{attempts}}}; do
    [ -r "$start" ] && exec /bin/bash "$start"
    if [ -e "$sign" ]; then
        touch "$sign.job"
        if (( $(stat -c %Y "$sign.job") - $(stat -c %Y "$sign") > {stale_s} )); then
            echo "the notebook that submitted this job has gone" >&2
            exit 0
        fi
    elif (( attempt > {unseen} )); then
        echo "$(hostname) does not see $sign: the notebook has gone, or this host does not share its folders" >&2
        exit 1
    fi
    sleep {pause_s}
done
echo "the notebook did not write $start within {seconds} s" >&2
exit 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchScript:
    """What is submitted."""

    cluster_id: str
    nodes: int
    per_node: int  # ranks
    folder: str  # where the ranks run
    log: str  # the file with what the job says; %j is its number
    start_file: str  # the script that starts the ranks
    sign_file: str  # that is touched as long as the notebook is there
    survives_nodes: bool = False  # the ranks of other nodes go on when one fails

    @property
    def name(self) -> str:
        """The job's, unless a person gives it another."""
        return f"disttrain-{self.cluster_id}"

    def render(self) -> str:
        """Return the script."""
        options = (
            f"--job-name={self.name}",
            f"--nodes={self.nodes}",
            f"--ntasks-per-node={self.per_node}",
            f"--chdir={self.folder}",
            f"--output={self.log}",
            "--open-mode=append",
            "--export=ALL",
            "--no-requeue",  # a second time it would have ranks that nobody knows
            *(("--no-kill",) if self.survives_nodes else ()),
        )
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#SBATCH {quote_option(option)}" for option in options),
                f"# The ranks of {self.cluster_id}; written by jupyter_disttrain.",
                _WAIT.format(
                    start=shlex.quote(self.start_file),
                    sign=shlex.quote(self.sign_file),
                    attempts=WAIT_SECONDS * LOOKS_PER_SECOND,
                    unseen=UNSEEN_SECONDS * LOOKS_PER_SECOND,
                    pause_s=1 / LOOKS_PER_SECOND,
                    stale_s=STALE_SECONDS,
                    seconds=WAIT_SECONDS,
                ),
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartScript:
    """What starts the ranks on the nodes of a job: the same command once per rank."""

    nodes: int
    per_node: int
    command: tuple[str, ...]  # of a rank
    environment: Mapping[str, str]  # for the program that starts them
    mpirun: tuple[str, ...] = ()  # Open MPI's, with its first options; empty: they are started by srun

    def render(self) -> str:
        """Return the script."""
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"export {name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())),
                f"exec {self._start_text()}",
                "",
            ]
        )

    def _start_text(self) -> str:
        if self.mpirun:
            return shlex.join([*mpirun_words(self.mpirun, self.nodes, self.per_node), *self.command])
        # srun does not take it from the job since Slurm 22.05.
        cpus = "${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}"
        return f"{shlex.join(srun_words(self.nodes, self.per_node))} {cpus} {shlex.join(self.command)}"


def srun_words(nodes: int, per_node: int) -> list[str]:
    """Return how srun starts ranks of which each, and each node, may die without the others."""
    return [
        "srun",
        "--mpi=none",  # with pmix the death of a rank is the death of all
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",  # for as long as it takes, once the first rank has ended
        "--cpu-bind=none",
        f"--nodes={nodes}",
        f"--ntasks={nodes * per_node}",
        f"--ntasks-per-node={per_node}",
        "--distribution=block",  # ranks in the order of the nodes
    ]


def mpirun_words(mpirun: tuple[str, ...], nodes: int, per_node: int) -> list[str]:
    """Return how Open MPI's mpirun starts ranks of which each may die without the others."""
    return [
        *mpirun,
        "--continuous",
        "--map-by",
        f"ppr:{per_node}:node:oversubscribe",
        "--bind-to",
        "none",
        "-n",
        str(nodes * per_node),
    ]


def quote_option(option: str) -> str:
    """Quote an option as sbatch reads it: a backslash counts within single quotes too."""
    if _PLAIN.fullmatch(option):
        return option
    name, sign, value = option.partition("=")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{sign}"{escaped}"'
