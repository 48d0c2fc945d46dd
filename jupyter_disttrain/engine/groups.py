"""Every process group of this rank: who made it, and how it is released.

Covers: taking note of groups as they are made, by the session or by a cell; aborting all of them, those of GPUs side by
side.
Does not cover: sockets (``sockets``), the session's own group (``process_group``).
"""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
import threading
import time
import types
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .on_import import on_import
from .own_code import is_own
from .sockets import EventLoop, epoll_descriptors, event_loops, shut_down

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta


BESIDE = "disttrain beside"  # describes the group of threads that write a checkpoint beside the cells


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """A process group that this rank is in."""

    name: str
    ranks: tuple[int, ...]  # empty for the default group
    backend: str
    timeout: timedelta
    tag: str | None
    description: str | None
    made_at: str  # the cell's line that made it; empty for the session's own
    held: weakref.ref[Any]  # the group: one that a person has destroyed must not live on here
    loops: tuple[EventLoop, ...]

    @property
    def is_beside(self) -> bool:
        """Whether it is of threads that write a checkpoint, and no cell knows of it."""
        return self.description == BESIDE


def leave_defaults_open() -> None:
    """Have the functions of ``torch.distributed.nn`` use the default group of the moment in which they are called.

    Theirs is that of the moment in which they are imported, which any optimizer does: none in a program that imports it
    before it makes a group.
    """
    on_import("torch.distributed.nn.functional", _open_defaults)


def _open_defaults(module: Any) -> None:
    from torch.distributed import ProcessGroup  # noqa: PLC0415

    for function in vars(module).values():
        if isinstance(function, types.FunctionType) and function.__defaults__:
            defaults = (None if isinstance(each, ProcessGroup) else each for each in function.__defaults__)
            function.__defaults__ = tuple(defaults)


class Groups:
    """The process groups of this rank."""

    def __init__(self) -> None:
        self._records: dict[str, GroupRecord] = {}
        self._before: set[int] | None = None  # the epoll instances there were when a group began to be made
        self._hook()

    def _hook(self) -> None:
        from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

        # The function through which init_process_group and new_group go, and DeviceMesh but where it splits a group.
        original: Callable[..., Any] = c10d._new_process_group_helper  # noqa: SLF001

        signature = inspect.signature(original)

        @functools.wraps(original)
        def helper(*args: Any, **options: Any) -> Any:
            before = self._before = epoll_descriptors()
            try:
                pg, prefix_store = original(*args, **options)
            finally:
                self._before = None
            if isinstance(pg, c10d.ProcessGroup):
                asked = signature.bind(*args, **options).arguments
                self._records[asked["group_name"]] = GroupRecord(
                    name=asked["group_name"],
                    ranks=tuple(asked["global_ranks_in_group"]),
                    backend=str(asked["backend"]),
                    timeout=asked["timeout"],
                    tag=asked.get("pg_tag"),
                    description=asked.get("group_desc"),
                    made_at=_cell_line_of_caller(),
                    held=weakref.ref(pg),
                    loops=tuple(event_loops(epoll_descriptors() - before)),
                )
            return pg, prefix_store

        c10d._new_process_group_helper = helper  # noqa: SLF001

    @property
    def live(self) -> dict[str, GroupRecord]:
        """The groups that nobody has destroyed, by name."""
        from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

        names: dict[Any, str] = dict(c10d._world.pg_names)  # noqa: SLF001
        self._records = {name: each for name, each in self._records.items() if names.get(each.held()) == name}
        for pg, name in names.items():
            if name not in self._records:
                self._records[name] = _record_of(pg, name)
        return dict(self._records)

    @property
    def of_cells(self) -> dict[str, GroupRecord]:
        """Those of them that cells know, and that are made anew after a release."""
        return {name: record for name, record in self.live.items() if not record.is_beside}

    def keep_line(self, name: str, made_at: str) -> None:
        """Take over the line that made a group from the group in whose place it stands."""
        self._records[name] = replace(self._records[name], made_at=made_at)

    @property
    def have_devices(self) -> bool:
        """Whether a group has collectives that are done on a GPU, so that no connection ends them."""
        return any(_devices_of(record.held()) for record in self.live.values())

    def abort_devices(self, limit_s: float) -> list[str]:
        """Abort what groups do on GPUs; returns the groups whose abort has not come back in time.

        All aborts begin at once: one may wait for the device, which a kernel of another group occupies. NCCL wants them
        in the same order on all ranks.
        """
        records = sorted(self.live.items(), reverse=True)
        aborts = {
            name: threading.Thread(target=_abort_devices, args=(held,), name=f"abort of group {name}", daemon=True)
            for name, record in records
            if _devices_of(held := record.held())
        }
        for abort in aborts.values():
            abort.start()
        deadline = time.monotonic() + limit_s
        for abort in aborts.values():
            abort.join(max(0.0, deadline - time.monotonic()))
        return [name for name, abort in aborts.items() if abort.is_alive()]

    def release(self) -> int:
        """End every group's connections, so that whoever waits in a collective of the CPU gets an error.

        Called on the control thread while the main thread waits. Groups that are just being made are reached as well.
        Returns how many were ended.
        """
        ended = 0
        for record in self.live.values():
            ended += sum(map(shut_down, record.loops))
        before = self._before
        if before is not None:
            ended += sum(map(shut_down, event_loops(epoll_descriptors() - before)))
        return ended


def _record_of(pg: Any, name: str) -> GroupRecord:
    """Describe a group that was split off another, as DeviceMesh does with NCCL; it has no event loop of its own."""
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

    backend = c10d._world.pg_map[pg][0]  # noqa: SLF001
    return GroupRecord(
        name=name,
        ranks=tuple(c10d._world.pg_group_ranks.get(pg, ())),  # noqa: SLF001
        backend=str(backend),
        timeout=c10d._get_default_timeout(c10d.Backend(backend)),  # noqa: SLF001
        tag=None,
        description=pg.group_desc,
        made_at="",
        held=weakref.ref(pg),
        loops=(),
    )


def _devices_of(pg: Any) -> list[Any]:
    """Return the devices other than the CPU on which a group does collectives: Gloo copies what is on a GPU."""
    if pg is None:
        return []
    devices = [device for device in pg._device_types if device.type != "cpu"]  # noqa: SLF001
    return [device for device in devices if pg._get_backend(device).name() != "gloo"]  # noqa: SLF001


def _abort_devices(pg: Any) -> None:
    """Abort NCCL communicators; Gloo's own abort does nothing while somebody waits."""
    import torch  # noqa: PLC0415

    for device in _devices_of(pg):
        try:
            pg._get_backend(torch.device(device.type)).abort()  # noqa: SLF001
        except RuntimeError as error:  # e.g. of CUDA, whose context is lost: there is nothing left to abort
            sys.stderr.write(f"a process group was aborted, and reports: {error}\n")


def _cell_line_of_caller() -> str:
    """Return the innermost line of a cell on the stack: number and text."""
    frame = sys._getframe()  # noqa: SLF001
    while frame is not None:
        filename = frame.f_code.co_filename
        if is_own(filename):
            text = linecache.getline(filename, frame.f_lineno).strip()
            return f"line {frame.f_lineno}: {text}" if text else f"line {frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""
