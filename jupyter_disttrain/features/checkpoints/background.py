"""Write versions of a checkpoint in background threads, while cells run.

Covers: the process group of the writing threads, waiting for them, the outcome of a version.
Does not cover: what is in a version (``rank``), its folder (``versions``).

A rank's death, or an interrupt that releases ranks, ends the session's process group and the writers' group as well.
The writers' group is not formed again with the others: a thread unaware of this would continue in the new group,
where no other rank takes part.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint import state_dict_saver

from ...rank.process_group.errors import is_of_group
from ...rank.process_group.subgroups import BESIDE
from .versions import CheckpointError, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CUT_OFF = "the checkpoint that was being written in the background was aborted; the previous version remains the latest"


class Beside:
    """Write one version at a time in a thread."""

    def __init__(self) -> None:
        self._group: Any = None
        # Why the version that was begun last was not saved; empty if it was saved, or cut off by the end of the group.
        self._outcome: Future[str] | None = None

    def write(self, state: dict[str, Any], folder: Path, finish: Callable[[], object]) -> None:
        """Copy a state and start to write it; called on all ranks, after :meth:`wait`.

        Parameters
        ----------
        state
            The state dict that ``torch.distributed.checkpoint`` saves.
        folder
            The version's folder.
        finish
            Called once all ranks have written.
        """
        # Only some ranks may have the group: a rank is new, or an interrupt came while they made it.
        if not all(_of_all(self._has_group)):
            self._group = dist.new_group(backend="gloo", group_desc=BESIDE)
        outcome = self._outcome = Future()

        def end(written: Future[Any]) -> None:
            if outcome.set_running_or_notify_cancel():  # else wait() has given it up
                outcome.set_result(_end(written, finish, folder))

        try:
            written: Any = state_dict_saver.async_save(state, checkpoint_id=folder, process_group=self._group)
        except BaseException:  # including an interrupt: there is no thread of this rank to wait for
            self._outcome = self._group = None
            raise
        written.add_done_callback(end)

    def wait(self) -> None:
        """Wait until the version that was begun last is written; called on all ranks.

        Raises
        ------
        CheckpointError
            If it could not be written on any rank; not if writing was aborted, which is reported when it happens.
        """
        outcome = self._outcome
        if not all(_of_all(outcome is not None and self._has_group)) and outcome is not None:
            self._group = None
            if outcome.cancel():  # its thread may wait forever for a rank that takes no part or has left the group
                outcome = None
                _report_cut_off()
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
    error = None if written.cancelled() else written.exception()
    # A death or an interrupt is reported elsewhere. torch raises ValueError for a destroyed group.
    if written.cancelled() or (error is not None and (is_of_group(error) or isinstance(error, ValueError))):
        _report_cut_off()
        return ""
    if error is None:
        try:
            finish()
        except Exception as failed:  # noqa: BLE001  (called in a thread; wait() would otherwise block forever)
            error = failed
        else:
            return ""
    text = reason_of(error, folder)
    sys.stderr.write(f"the checkpoint was not saved: {text}\n")
    return text


def _report_cut_off() -> None:
    sys.stderr.write(f"{CUT_OFF}\n")  # equal on all ranks, so that it is shown once


def _of_all(own: Any) -> list[Any]:
    """Return every rank's value, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
