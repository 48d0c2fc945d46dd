"""Record a cell's calls of Horovod for torch.

Covers: the operation that the main thread waits in, the number of operations since Horovod was started.
Does not cover: starting and stopping Horovod (``world``).

Horovod matches operations by name. Each rank numbers operations without a name: once ranks have called different
numbers of them, their operations never match again.
"""

from __future__ import annotations

import functools
import inspect
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MPI_OPS = "horovod.torch.mpi_ops"  # the module with the operations
GROUP = "horovod"  # used as the name of a process group


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that was started."""

    kind: str  # e.g. "allreduce"
    name: str | None
    tensor: Any  # or a list of them

    @property
    def title(self) -> str:
        """Its kind and its name in Horovod, e.g. a parameter's."""
        return f"hvd.{self.kind}" + (f" of {self.name!r}" if self.name else "")


class HorovodCalls:
    """The operations of the running cell."""

    def __init__(self) -> None:
        self._begun: dict[int, Operation] = {}  # by handle: started and not waited for yet
        self._wait: tuple[Operation, float] | None = None  # what the main thread waits in, since when (wall clock)
        self.is_join_cut_off = False  # never cleared: Horovod 0.28 keeps half a join over a shutdown and crashes later
        self._count: int | None = None  # since the start or a join; None if ranks may have called different numbers

    def reset(self, *, on_all_ranks: bool) -> None:
        """Restart the count, as Horovod was started; without ``on_all_ranks`` operations are not counted."""
        self._begun.clear()
        self._count = 0 if on_all_ranks else None

    @property
    def counted(self) -> dict[str, int]:
        """The number of operations on all ranks since Horovod was started or since a join."""
        return {} if self._count is None else {GROUP: self._count}

    @property
    def waiting(self) -> dict[str, Any] | None:
        """What the main thread waits in, as from ``flight_recorder.pending_collective``; None if it does not wait."""
        wait = self._wait
        if wait is None:
            return None
        operation, since_s = wait
        tensors = operation.tensor if isinstance(operation.tensor, (list, tuple)) else [operation.tensor]
        shown = [each for each in tensors if each is not None]
        return {
            "name": operation.title,
            "number": None,  # Horovod matches by name
            "is_p2p": True,  # so that it is not matched by its number
            "sizes": [list(each.shape) for each in shown],
            "dtypes": [str(each.dtype).rpartition(".")[2] for each in shown],
            "group": GROUP,
            "description": "",
            "waits_s": max(0.0, time.time() - since_s),
        }

    def watch(self, mpi_ops: Any) -> None:
        """Wrap the functions of ``horovod.torch.mpi_ops`` to record their calls."""
        for name, function in list(vars(mpi_ops).items()):
            if name.startswith("_") and name.endswith("_async") and callable(function):
                setattr(mpi_ops, name, self._note(function, name.strip("_").removesuffix("_async")))
        mpi_ops.synchronize = self._watch_wait(mpi_ops.synchronize)
        mpi_ops.barrier = self._synchronize(mpi_ops.barrier, is_last=False)
        mpi_ops.join = self._synchronize(mpi_ops.join, is_last=True)

    def _note(self, original: Callable[..., int], kind: str) -> Callable[..., int]:
        parameters = list(inspect.signature(original).parameters)
        name_at, set_at = parameters.index("name"), parameters.index("process_set")

        @functools.wraps(original)
        def begin(*args: Any) -> int:
            handle = original(*args)
            if self._count is not None and args[set_at].process_set_id == 0:
                self._count += 1
            self._begun[handle] = Operation(kind, args[name_at], args[0])
            return handle

        return begin

    def _watch_wait(self, original: Callable[[int], Any]) -> Callable[[int], Any]:
        @functools.wraps(original)
        def synchronize(handle: int) -> Any:
            operation = self._begun.pop(handle, None)
            if operation is not None:
                self._wait = operation, time.time()
            try:
                return original(handle)
            finally:
                if operation is not None:
                    self._wait = None

        return synchronize

    def _synchronize(self, original: Callable[..., Any], *, is_last: bool) -> Callable[..., Any]:
        """Wrap a blocking call of all ranks; before one with ``is_last`` (join), ranks may call different numbers."""

        @functools.wraps(original)
        def synchronized(*args: Any, **options: Any) -> Any:
            self._wait = Operation(original.__name__, None, None), time.time()
            try:
                result = original(*args, **options)
            except BaseException:  # including an interrupt
                self.is_join_cut_off = self.is_join_cut_off or is_last
                raise
            finally:
                self._wait = None
                self._count = 0 if is_last and self._count is not None else self._count
            return result

        return synchronized
