"""Generate the scripts of a job.

Covers: the script that is submitted, the one that starts the ranks once the nodes are known.
Does not cover: submitting (``job``).

They contain no secrets, since Slurm stores scripts and environments: the ranks read their environment from a file that
only its owner can read, and the controller's address from another.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...protocol.time_limits import SENTRY_STALE_SECONDS, UNSEEN_SECONDS, WAIT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping

CHECKS_PER_SECOND = 5
_PLAIN = re.compile(r"[\w@%+=:,./\[\]-]+")
_WAIT = """\
# Which network the ranks use is known only now that the nodes are known: the notebook writes it into a file.
# Until then it has another file touched every few seconds. Both times are the file server's, if there is one.
start={start} sign={sign}
for attempt in {{1..{attempts}}}; do
    [ -r "$start" ] && exec /bin/bash "$start"
    if [ -e "$sign" ]; then
        touch "$sign.job"
        if (( $(stat -c %Y "$sign.job") - $(stat -c %Y "$sign") > {stale_s} )); then
            echo "the notebook that submitted this job has ended" >&2
            exit 0
        fi
    elif (( attempt > {unseen} )); then
        echo "$(hostname) can't read $sign: the notebook has ended, or this host does not share its folders" >&2
        exit 1
    fi
    sleep {pause_s}
done
echo "the notebook did not write $start within {seconds} s" >&2
exit 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchScript:
    """The script that is submitted."""

    cluster_id: str
    nodes: int
    per_node: int  # ranks per node
    folder: str  # working directory of the ranks
    log: str  # the job's log file; %j is its number
    start_file: str  # the script that starts the ranks
    sign_file: str  # touched as long as the notebook runs
    survives_nodes: bool = False  # the ranks of other nodes continue when one fails

    @property
    def name(self) -> str:
        """The job's name, unless the user sets another."""
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
            "--no-requeue",  # ranks of a second run would belong to no client
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
                    attempts=WAIT_SECONDS * CHECKS_PER_SECOND,
                    unseen=UNSEEN_SECONDS * CHECKS_PER_SECOND,
                    pause_s=1 / CHECKS_PER_SECOND,
                    stale_s=SENTRY_STALE_SECONDS,
                    seconds=WAIT_SECONDS,
                ),
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartScript:
    """The script that starts the ranks on the nodes of a job: the same command once per rank."""

    nodes: int
    per_node: int
    command: tuple[str, ...]  # the command of a rank
    environment: Mapping[str, str]  # for the program that starts the ranks
    mpirun: tuple[str, ...] = ()  # Open MPI's mpirun with its first options; empty: srun starts the ranks

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
            return shlex.join([*mpirun_command(self.mpirun, self.nodes, self.per_node), *self.command])
        # Since Slurm 22.05 srun does not inherit it from the job.
        cpus = "${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}"
        return f"{shlex.join(srun_command(self.nodes, self.per_node))} {cpus} {shlex.join(self.command)}"


def srun_command(nodes: int, per_node: int) -> list[str]:
    """Return the srun command for ranks that outlive the death of other ranks and nodes."""
    return [
        "srun",
        "--mpi=none",  # with pmix the death of one rank ends all
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",  # no time limit once the first rank has ended
        "--cpu-bind=none",
        f"--nodes={nodes}",
        f"--ntasks={nodes * per_node}",
        f"--ntasks-per-node={per_node}",
        "--distribution=block",  # ranks in the order of the nodes
    ]


def mpirun_command(mpirun: tuple[str, ...], nodes: int, per_node: int) -> list[str]:
    """Return the mpirun command of Open MPI for ranks that outlive the death of other ranks."""
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
    """Quote an option for sbatch: a backslash is special within single quotes too."""
    if _PLAIN.fullmatch(option):
        return option
    name, sign, value = option.partition("=")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{sign}"{escaped}"'
