"""The session's process group, as the client looks after it between cells.

Covers: a cell that ended the group on all ranks, or on some; where ranks meet.
Does not cover: the group itself (``engine.process_group``), ranks that are stuck in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UsageError
from ..ranks import format_ranks, label_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .start import Launch


def barrier_code(launch: Launch) -> str:
    """Return code with which all ranks wait for each other.

    Raises
    ------
    UsageError
        If the ranks have nothing to meet in: no process group, and no MPI.
    """
    if launch.config.backend != "none":
        return "__import__('torch.distributed').distributed.barrier()"  # a cell may have used the name dist
    if not launch.config.has_mpi:
        raise UsageError("these ranks have no process group to meet in; start them without --backend none")
    if launch.mpi_lost:
        raise UsageError(f"MPI has no world of all ranks: {launch.mpi_lost}; %dist_reset makes one")
    return "__import__('mpi4py.MPI').MPI.COMM_WORLD.Barrier()"


def restore_group(launch: Launch, ranks: Sequence[int], form: Callable[[], None]) -> None:
    """Have all ranks ``form`` a new group if all have ended it, before the next cell runs on ``ranks``.

    Raises
    ------
    UsageError
        If some of ``ranks`` have ended the group and others not: what they do together would never end.
    """
    without = {entry.info.rank for entry in launch.table if not entry.group}
    if not without:
        return
    if len(without) == len(launch.table) and all(entry.state == "idle" for entry in launch.table):
        form()
        return
    gone, kept = sorted(without & set(ranks)), sorted(set(ranks) - without)
    if gone and kept:
        raise UsageError(
            f"{label_ranks(gone)} ended the process group and {label_ranks(kept)} did not, so a collective would wait "
            f"forever; run dist.destroy_process_group() with %%rank {format_ranks(kept)} too and all get a new one, "
            "or %dist_reset"
        )
