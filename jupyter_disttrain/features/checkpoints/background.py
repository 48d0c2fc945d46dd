"""Write versions of a checkpoint in background threads, while cells run.

Covers: the process group of the writing threads, waiting for them, the outcome of a version.
Does not cover: what is in a version (``rank``), its folder (``versions``).

A rank's death, or an interrupt that releases ranks, ends the session's process group and the writers' group as well.
The writers' group is not formed again with the others: a thread unaware of this would continue in the new group,
where no other rank takes part.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ...protocol.ranks import label_ranks
from ...rank.process_group.errors import is_of_group
from ...rank.process_group.subgroups import BESIDE
from .versions import CheckpointError, disk_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

CUT_OFF = "the checkpoint that was being written in the background was aborted; the previous version remains the latest"


class Beside:
    """Write one version at a time in a thread."""

    def __init__(self) -> None:
        self._group: Any = None
        self._writing: _Writing | None = None  # the version that was begun last

    def write(self, state: Mapping[str, Any], folder: Path, finish: Callable[[], object]) -> None:
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
        import torch.distributed as dist  # noqa: PLC0415
        from torch.distributed.checkpoint.state_dict_saver import async_save  # noqa: PLC0415

        # Only some ranks may have the group: a rank is new, or an interrupt came while they made it.
        if not all(_of_all(self._has_group)):
            self._group = dist.new_group(backend="gloo", group_desc=BESIDE)
        writing = self._writing = _Writing(finish, folder)
        try:
            done: Any = async_save(dict(state), checkpoint_id=folder, process_group=self._group)
        except BaseException:  # including an interrupt: there is no thread of this rank to wait for
            self._writing = self._group = None
            raise
        done.add_done_callback(writing.end)

    def wait(self) -> None:
        """Wait until the version that was begun last is written; called on all ranks.

        Raises
        ------
        CheckpointError
            If it could not be written on any rank; not if writing was aborted, which is reported when it happens.
        """
        writing = self._writing
        if not all(_of_all(writing is not None and self._has_group)) and writing is not None:
            writing.give_up()  # its thread may wait forever for a rank that takes no part or has left the group
            self._group = None
        outcomes = _of_all("" if writing is None else writing.outcome.result())
        self._writing = None
        for rank, failure in enumerate(outcomes):
            if failure:
                raise CheckpointError(f"the previous checkpoint was not saved: rank {rank}: {failure}")

    @property
    def _has_group(self) -> bool:
        """Whether the group exists and was not destroyed."""
        from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

        return self._group in c10d._world.pg_map  # noqa: SLF001


class _Writing:
    """One version that a thread writes."""

    def __init__(self, finish: Callable[[], object], folder: Path) -> None:
        self._finish = finish
        self._folder = folder
        self._turns = threading.Lock()  # between the writing thread and the one that gives up
        self.outcome: Future[str] = Future()  # why it was not saved; empty if it was saved or aborted

    def end(self, done: Future[Any]) -> None:
        """Set the outcome from the thread's result."""
        with self._turns:
            if not self.outcome.done():
                self.outcome.set_result(self._come_to(done))

    def give_up(self) -> None:
        """Stop waiting for the thread, whose collective other ranks do not join."""
        with self._turns:
            if not self.outcome.done():
                self.outcome.set_result(_cut_off())

    def _come_to(self, done: Future[Any]) -> str:
        error = None if done.cancelled() else done.exception()
        if done.cancelled() or (error is not None and _is_left_alone(error)):
            return _cut_off()
        if error is None:
            try:
                self._finish()
            except Exception as failed:  # noqa: BLE001  (called in a thread; wait() would otherwise block forever)
                error = failed
        if error is None:
            return ""
        text = reason_of(error, self._folder)
        sys.stderr.write(f"the checkpoint was not saved: {text}\n")
        return text


def reason_of(error: BaseException, folder: Path) -> str:
    """Return why a version could not be written; torch puts the tracebacks of all ranks into its error."""
    failures = getattr(error, "failures", None)
    if not isinstance(failures, dict):
        return _reason_of_one(error, folder)
    by_reason: dict[str, list[int]] = {}
    for rank, (failure, _) in sorted(failures.items()):
        by_reason.setdefault(_reason_of_one(failure, folder), []).append(rank)
    return "; ".join(f"{label_ranks(ranks)}: {reason}" for reason, ranks in by_reason.items())


def _reason_of_one(error: BaseException, folder: Path) -> str:
    return disk_error(error, folder) or f"{type(error).__name__}: {error}"


def _is_left_alone(error: BaseException) -> bool:
    """Whether other ranks can't be reached any more; a death or an interrupt is reported elsewhere."""
    # torch raises ValueError for a destroyed group; an error with a file has its own type.
    return is_of_group(error) or isinstance(error, ValueError)


def _cut_off() -> str:
    sys.stderr.write(f"{CUT_OFF}\n")  # equal on all ranks, so that it is shown once
    return ""


def _of_all(own: Any) -> list[Any]:
    """Return every rank's value, by rank."""
    import torch.distributed as dist  # noqa: PLC0415

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
