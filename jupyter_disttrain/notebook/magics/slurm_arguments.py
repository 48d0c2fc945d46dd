"""Define the options of %dist_init for Slurm.

Covers: the options, parsing them.
Does not cover: valid values (``config.slurm``), the queue (``launchers.slurm``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...config.slurm import STARTS, SlurmOptions, parse_more, split_more
from ...errors import UsageError
from .arguments import option, refuse_unknown

if TYPE_CHECKING:
    import argparse

_OF_SLURM = (
    *("nodes", "ntasks_per_node", "gpus_per_node", "partition", "time", "account", "sbatch", "ranks_by", "new_job"),
)

SLURM_OPTIONS = (
    option(
        "-N", "--nodes", type=int, metavar="N", help="nodes of the Slurm job (default: those of the allocation, or 1)"
    ),
    option("--ntasks-per-node", type=int, metavar="N", help="ranks per node (default: one per requested GPU, or 1)"),
    option("--gpus-per-node", metavar="GPUS", help="GPUs per node, e.g. 4 or a100:4"),
    option("-p", "--partition", help="the partition to submit to (default: Slurm's)"),
    option("--time", metavar="LIMIT", help="time limit: minutes, HH:MM:SS or D-HH:MM:SS (default: the partition's)"),
    option("-A", "--account", help="the account to charge (default: Slurm's)"),
    option(
        "--sbatch",
        action="append",
        metavar="OPTIONS",
        help="other options of sbatch, e.g. '--qos=high --mem=64G'; long ones may also stand alone",
    ),
    option(
        "--ranks-by", choices=STARTS, help="mpirun: an MPI job; srun: no MPI, survives a node's loss (default: mpirun)"
    ),
    option("--new-job", action="store_true", help="submit a job even within an allocation"),
)


def slurm_of(args: argparse.Namespace, launcher: str) -> SlurmOptions | None:
    """Return the options for Slurm; None where it is not the launcher.

    Raises a UsageError if they can't be parsed, or are for Slurm and it is not the launcher.
    """
    if launcher != "slurm":
        refuse_unknown("dist_init", args.unknown)
        given = [name for name in _OF_SLURM if getattr(args, name) not in (None, False)]
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            them = "it" if len(given) == 1 else "them"
            raise UsageError(f"{options}: for a Slurm job; add --launcher slurm, or leave {them} out")
        return None
    return SlurmOptions(
        nodes=args.nodes,
        ntasks_per_node=args.ntasks_per_node,
        gpus_per_node=args.gpus_per_node,
        partition=args.partition,
        time=args.time,
        account=args.account,
        more=parse_more(args.unknown) + tuple(option for text in args.sbatch or () for option in split_more(text)),
        start=args.ranks_by or STARTS[0],
        new_job=args.new_job,
    )
