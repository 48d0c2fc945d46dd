"""Generate the scripts of a job.

Covers: the script that is submitted, with its options; the one that starts the ranks once the nodes are known.
Does not cover: submitting (``job``).

They contain no secrets, since Slurm stores scripts and environments: the ranks read their environment from a file that
only its owner can read, and the controller's address from another.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from ...protocol.time_limits import UNSEEN_SECONDS, WAIT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CHECKS_PER_SECOND = 5
_WAIT = """\
#!/bin/bash
# The ranks of {cluster_id}; written by jupyter_disttrain.
# Which network the ranks use is known only now that the nodes are known: the notebook writes it into a file.
start={start}
for attempt in {{1..{attempts}}}; do
    if ls "${{start%/*}}" > /dev/null 2>&1; then  # a new file is seen over NFS once its folder is read
        [ -r "$start" ] && exec /bin/bash "$start"
    elif (( attempt > {unseen} )); then
        echo "$(hostname) can't read ${{start%/*}}: the notebook has ended, or this host does not share its folders" >&2
        exit 1
    fi
    sleep {pause_s}
done
echo "the notebook did not write $start within {seconds} s" >&2
exit 1
"""
_BY_SRUN = (
    "srun",
    "--mpi=none",  # with pmix the death of one rank ends all
    "--no-kill",
    "--kill-on-bad-exit=0",
    "--wait=0",  # no time limit once the first rank has ended
    "--cpu-bind=none",
    "--distribution=block",  # ranks in the order of the nodes
)


def job_options(
    cluster_id: str, nodes: int, per_node: int, *, folder: str, log: str, survives_nodes: bool = False
) -> tuple[str, ...]:
    """Return sbatch's options for ranks in ``folder``; on the command line they override the user's variables.

    ``log`` is the job's log file, with ``%j`` for its number; with ``survives_nodes`` the ranks of other nodes continue
    when one fails.
    """
    return (
        f"--job-name={job_name(cluster_id)}",
        f"--nodes={nodes}",
        f"--ntasks-per-node={per_node}",
        f"--chdir={folder}",
        f"--output={log}",
        "--open-mode=append",
        "--export=ALL",
        "--no-requeue",  # ranks of a second run would belong to no client
        *(("--no-kill",) if survives_nodes else ()),
    )


def job_name(cluster_id: str) -> str:
    """Return the name of a cluster's job, unless the user sets another."""
    return f"disttrain-{cluster_id}"


def batch_script(cluster_id: str, start_file: str) -> str:
    """Return the script that is submitted: it waits for ``start_file``, the script that starts the ranks."""
    return _WAIT.format(
        cluster_id=cluster_id,
        start=shlex.quote(start_file),
        attempts=WAIT_SECONDS * CHECKS_PER_SECOND,
        unseen=UNSEEN_SECONDS * CHECKS_PER_SECOND,
        pause_s=1 / CHECKS_PER_SECOND,
        seconds=WAIT_SECONDS,
    )


def start_script(
    nodes: int, per_node: int, command: Sequence[str], environment: Mapping[str, str], mpirun: Sequence[str] = ()
) -> str:
    """Return the script that starts the ranks, each with ``command``, so that they outlive the death of others.

    ``environment`` is that of the program that starts them: Open MPI's ``mpirun``, with its first options, or srun.
    """
    count = nodes * per_node
    if mpirun:
        placed = ("--map-by", f"ppr:{per_node}:node:oversubscribe", "--bind-to", "none", "-n", str(count))
        start = shlex.join([*mpirun, "--continuous", *placed])
    else:
        start = shlex.join([*_BY_SRUN, f"--nodes={nodes}", f"--ntasks={count}", f"--ntasks-per-node={per_node}"])
        # Since Slurm 22.05 srun does not inherit it from the job.
        start += " ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}"
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    return "\n".join(["#!/bin/bash", *exports, f"exec {start} {shlex.join(command)}", ""])
