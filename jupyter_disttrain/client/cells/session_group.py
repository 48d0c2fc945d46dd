"""Restore the session's process group between cells.

Covers: a cell that ended the group on all ranks, or on some; the code of a barrier.
Does not cover: the group itself (``rank.process_group.group``), ranks that are stuck in it
(``client.recovery.supervisor``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import UsageError
from ...protocol.ranks import format_ranks, label_ranks
from ...protocol.states import RankState
from ..recovery.remedies import remedy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..startup.launch import Launch


def barrier_code(launch: Launch) -> str:
    """Return code of a barrier of all ranks.

    Raises
    ------
    UsageError
        If the ranks have neither a process group nor an MPI world.
    """
    if launch.config.backend != "none":
        return "__import__('torch.distributed').distributed.barrier()"  # a cell may have used the name dist
    if not launch.config.has_mpi:
        raise UsageError("these ranks have no process group; start them without --backend none")
    if launch.state.mpi_lost:
        raise UsageError(f"MPI has no world of all ranks: {launch.state.mpi_lost}; {remedy(launch.config)}")
    return "__import__('mpi4py.MPI').MPI.COMM_WORLD.Barrier()"


def restore_group(launch: Launch, ranks: Sequence[int], form: Callable[[], None]) -> None:
    """Call ``form`` if all ranks have ended the process group, before the next cell runs on ``ranks``.

    Raises
    ------
    UsageError
        If some of ``ranks`` have ended the group and others not: a collective of theirs would never end.
    """
    without = {entry.info.rank for entry in launch.table if not entry.group}
    if not without:
        return
    if len(without) == len(launch.table) and all(entry.state == RankState.IDLE for entry in launch.table):
        form()
        return
    gone, kept = sorted(without & set(ranks)), sorted(set(ranks) - without)
    if gone and kept:
        raise UsageError(
            f"{label_ranks(gone)} ended the process group and {label_ranks(kept)} did not, so a collective would wait "
            f"forever; also run dist.destroy_process_group() with %%rank {format_ranks(kept)}, so that all ranks form "
            "a new group, or run %dist_reset"
        )
