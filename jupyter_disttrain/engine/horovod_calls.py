"""What a cell calls of Horovod on torch's tensors.

Covers: the operation that the main thread waits in, how many were called since Horovod was started.
Does not cover: starting and ending Horovod (``horovod_world``).

Horovod matches operations by name. Those without one are counted on each rank: ranks that have called different numbers
of them never meet again.
"""

from __future__ import annotations

import functools
import inspect
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP = "horovod"  # what stands in the place of a process group's name


@dataclass(frozen=True, slots=True)
class Operation:
    """One that was begun."""

    kind: str  # e.g. "allreduce"
    name: str | None
    tensor: Any  # or a list of them

    @property
    def title(self) -> str:
        """Its kind, with the name that Horovod knows it by, e.g. a parameter's."""
        return f"hvd.{self.kind}" + (f" of {self.name!r}" if self.name else "")


class HorovodCalls:
    """The operations of the cell that runs."""

    def __init__(self) -> None:
        self._begun: dict[int, Operation] = {}  # and not waited for, by handle
        self._wait: tuple[Operation, float] | None = None  # and since when, by the wall clock
        self.is_join_cut_off = False  # for good: Horovod 0.28 keeps half of it over a shutdown, and crashes later
        self._count: int | None = None  # since the start, or a join; None if ranks need not have called the same number

    def begin_anew(self, *, on_all_ranks: bool) -> None:
        """Count from here: Horovod was started; operations on some ranks alone are not counted."""
        self._begun.clear()
        self._count = 0 if on_all_ranks else None

    @property
    def counted(self) -> dict[str, int]:
        """How many operations of all ranks were called since Horovod was started, or since a join."""
        return {} if self._count is None else {GROUP: self._count}

    @property
    def waiting(self) -> dict[str, Any] | None:
        """What the main thread waits in, as ``where.pending_collective`` tells of torch's own; None if in nothing."""
        wait = self._wait
        if wait is None:
            return None
        operation, since_s = wait
        tensors = operation.tensor if isinstance(operation.tensor, (list, tuple)) else [operation.tensor]
        shown = [each for each in tensors if each is not None]
        return {
            "name": operation.title,
            "number": None,  # ranks meet by names
            "is_p2p": True,  # so that it is not looked for by its number
            "sizes": [list(each.shape) for each in shown],
            "dtypes": [str(each.dtype).rpartition(".")[2] for each in shown],
            "group": GROUP,
            "description": "",
            "waits_s": max(0.0, time.time() - since_s),
        }

    def watch(self, mpi_ops: Any) -> None:
        """Take note of what is called in ``horovod.torch.mpi_ops``."""
        for name, function in list(vars(mpi_ops).items()):
            if name.startswith("_") and name.endswith("_async") and callable(function):
                setattr(mpi_ops, name, self._note(function, name.strip("_").removesuffix("_async")))
        mpi_ops.synchronize = self._watch_wait(mpi_ops.synchronize)
        mpi_ops.barrier = self._meet(mpi_ops.barrier, is_last=False)
        mpi_ops.join = self._meet(mpi_ops.join, is_last=True)

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

    def _meet(self, original: Callable[..., Any], *, is_last: bool) -> Callable[..., Any]:
        """Wrap what waits for all ranks by itself; ``is_last``: until then they may call different numbers."""

        @functools.wraps(original)
        def meet(*args: Any, **options: Any) -> Any:
            self._wait = Operation(original.__name__, None, None), time.time()
            try:
                result = original(*args, **options)
            except BaseException:  # an interrupt too cuts it off; it goes on to the caller
                self.is_join_cut_off = self.is_join_cut_off or is_last
                raise
            finally:
                self._wait = None
                self._count = 0 if is_last and self._count is not None else self._count
            return result

        return meet
