"""Write versions of a checkpoint in background threads, while cells run.

Covers: the process group of the writing threads, waiting for them, the outcome of a version.
Does not cover: what is in a version (``rank``), its folder (``versions``).

A rank's death, or an interrupt that releases ranks, ends the session's process group and the writers' group as well.
The writers' group is not formed again with the others: a thread unaware of this would continue in the new group,
where no other rank takes part.
"""

from __future__ import annotations

import sys
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from ...rank.process_group.errors import is_of_group
from ...rank.process_group.subgroups import BESIDE
from .planners import PickledOnceSavePlanner
from .versions import CheckpointError, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Equal on all ranks, so that it is shown once.
CUT_OFF = "the checkpoint that was being written in the background was aborted; the previous version remains the latest"


class Beside:
    """Write one version at a time in a thread."""

    def __init__(self) -> None:
        self._group: Any = None
        # Why the version that was begun last was not saved; empty if it was saved, or cut off by the end of the group.
        self._outcome: Future[str] | None = None

    def write(self, state: dict[str, Any], folder: Path, finish: Callable[[], object]) -> None:
        """Copy a state dict and start to write it to a version's folder; called on all ranks, after :meth:`wait`.

        ``finish`` is called once all ranks have written.
        """
        # Only some ranks may have the group: a rank is new, or an interrupt came while they made it.
        group = self._group if all(_of_all(self._has_group)) else dist.new_group(backend="gloo", group_desc=BESIDE)
        self._group = None  # if this rank fails here, others may wait in it
        outcome: Future[str] = Future()

        def end(written: Future[Any]) -> None:
            if outcome.set_running_or_notify_cancel():  # else wait() has given it up
                outcome.set_result(_end(written, finish, folder))

        planner = PickledOnceSavePlanner()
        written: Any = state_dict_saver.async_save(state, checkpoint_id=folder, planner=planner, process_group=group)
        self._group, self._outcome = group, outcome
        written.add_done_callback(end)

    def wait(self) -> None:
        """Wait until the version that was begun last is written; called on all ranks.

        Raises a CheckpointError if a rank could not write it; not if it was aborted, which is reported when it happens.
        """
        outcome = self._outcome
        if not all(_of_all(outcome is not None and self._has_group)) and outcome is not None:
            self._group = None
            if outcome.cancel():  # its thread may wait forever for a rank that takes no part or has left the group
                outcome = None
                sys.stderr.write(f"{CUT_OFF}\n")
        failures = _of_all("" if outcome is None else outcome.result())
        self._outcome = None
        for rank, failure in enumerate(failures):
            if failure:
                raise CheckpointError(f"the previous checkpoint was not saved: rank {rank}: {failure}")

    @property
    def _has_group(self) -> bool:
        """Whether the group exists and was not destroyed."""
        return self._group in c10d._world.pg_map  # noqa: SLF001


def _end(written: Future[Any], finish: Callable[[], object], folder: Path) -> str:
    """Finish a version that was written; return why it was not saved."""
    is_written = False
    try:
        written.result()
        is_written = True
        finish()
    except (Exception, CheckpointException) as error:  # noqa: BLE001  (in a thread; wait() would block forever)
        # A death or an interrupt is reported elsewhere. torch raises ValueError for a destroyed group.
        if not is_written and (isinstance(error, (CancelledError, ValueError)) or is_of_group(error)):
            sys.stderr.write(f"{CUT_OFF}\n")
            return ""
        text = reason_of(error, folder)
        sys.stderr.write(f"the checkpoint was not saved: {text}\n")
        return text
    return ""


def _of_all(own: Any) -> list[Any]:
    """Return every rank's value, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
