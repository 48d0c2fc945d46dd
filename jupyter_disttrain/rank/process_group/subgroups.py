"""Record every process group of this rank and release them.

Covers: recording groups as the session or a cell makes them; aborting all of them, those on GPUs concurrently.
Does not cover: sockets (``sockets``), the session's own group (``group``).
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

import torch
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from ..interrupts.deferral import outwards
from ..libraries.import_hooks import on_import
from ..user_code import is_own
from .sockets import EventLoop, epoll_descriptors, event_loops, shut_down

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta


BESIDE = "disttrain beside"  # description of the process group of threads that write a checkpoint in the background


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """A process group that this rank is in."""

    name: str
    ranks: tuple[int, ...]  # empty for the default group
    backend: str
    timeout: timedelta
    tag: str | None
    description: str | None
    made_at: str  # the line of the cell that made it; empty for the session's own group
    held: weakref.ref[Any]  # the ProcessGroup; weak, so that a destroyed group is freed
    loops: tuple[EventLoop, ...]


def leave_defaults_open() -> None:
    """Have the functions of ``torch.distributed.nn`` use the default group at the time of the call.

    Their default argument is the default group at the time of the import, which any optimizer triggers. In a program
    that imports them before it makes a group, the default is None.
    """
    on_import("torch.distributed.nn.functional", _open_defaults)


def _open_defaults(module: Any) -> None:
    for function in vars(module).values():
        if isinstance(function, types.FunctionType) and function.__defaults__:
            defaults = (None if isinstance(each, ProcessGroup) else each for each in function.__defaults__)
            function.__defaults__ = tuple(defaults)


class Groups:
    """The process groups of this rank."""

    def __init__(self) -> None:
        self._records: dict[str, GroupRecord] = {}
        self._before: set[int] | None = None  # epoll descriptors from before the group that is being made, if any
        self._is_made_on_gpu = False  # that group connects while it is made, as it is bound to a GPU
        self._hook()

    def _hook(self) -> None:
        # init_process_group and new_group call this function, and so does DeviceMesh unless it splits a group.
        original: Callable[..., Any] = c10d._new_process_group_helper  # noqa: SLF001

        signature = inspect.signature(original)

        @functools.wraps(original)
        def helper(*args: Any, **options: Any) -> Any:
            asked = signature.bind(*args, **options).arguments
            self._is_made_on_gpu = getattr(asked.get("device_id"), "type", "cpu") != "cpu"
            before = self._before = epoll_descriptors()
            try:
                pg, prefix_store = original(*args, **options)
            finally:
                self._before, self._is_made_on_gpu = None, False
            if isinstance(pg, c10d.ProcessGroup):
                self._records = self.live  # without those that were destroyed
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
        """The groups that were not destroyed, by name.

        Other threads read this while the main thread makes groups, so it changes no record.
        """
        names: dict[Any, str] = dict(c10d._world.pg_names)  # noqa: SLF001  (dict() copies in one step)
        known = dict(self._records)
        live = {name: each for name, each in known.items() if names.get(each.held()) == name}
        return live | {name: _record_of(pg, name) for pg, name in names.items() if name not in live}

    @property
    def of_cells(self) -> dict[str, GroupRecord]:
        """The live groups that cells see; they are formed again after a release."""
        return {name: record for name, record in self.live.items() if record.description != BESIDE}

    def keep_line(self, name: str, made_at: str) -> None:
        """Set the line that made a group to that of the group that it replaces."""
        self._records[name] = replace(self._records[name], made_at=made_at)

    @property
    def have_devices(self) -> bool:
        """Whether a group has collectives on a GPU, which ending connections does not end; one being made, too."""
        return self._is_made_on_gpu or any(_devices_of(record.held()) for record in self.live.values())

    def abort_devices(self, limit_s: float) -> list[str]:
        """Abort the groups' collectives on GPUs; return the groups whose abort did not return within ``limit_s``.

        All aborts start at the same time, because one may wait for the device while a kernel of another group occupies
        it. NCCL requires the same order on all ranks.
        """
        aborts = {
            name: threading.Thread(target=_abort_devices, args=(held,), name=f"abort of group {name}", daemon=True)
            for name, record in sorted(self.live.items(), reverse=True)
            if _devices_of(held := record.held())
        }
        for abort in aborts.values():
            abort.start()
        deadline = time.monotonic() + limit_s
        for abort in aborts.values():
            abort.join(max(0.0, deadline - time.monotonic()))
        return [name for name, abort in aborts.items() if abort.is_alive()]

    def release(self) -> None:
        """Shut down every group's connections, so that a thread that waits in a collective on the CPU gets an error.

        Called on the control thread while the main thread waits. Includes a group that is being made.
        """
        before = self._before
        being_made = [] if before is None else event_loops(epoll_descriptors() - before)
        for loop in (*(loop for record in self.live.values() for loop in record.loops), *being_made):
            shut_down(loop)


def _record_of(pg: Any, name: str) -> GroupRecord:
    """Describe a group that was split from another, as DeviceMesh does with NCCL; it has no event loop of its own."""
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
    """Return the devices other than the CPU on which a group runs collectives; Gloo copies GPU tensors to the CPU."""
    if pg is None:
        return []
    devices = [device for device in pg._device_types if device.type != "cpu"]  # noqa: SLF001
    return [device for device in devices if pg._get_backend(device).name() != "gloo"]  # noqa: SLF001


def _abort_devices(pg: Any) -> None:
    """Abort NCCL communicators; Gloo's own abort has no effect while a thread waits in it."""
    for device in _devices_of(pg):
        try:
            pg._get_backend(torch.device(device.type)).abort()  # noqa: SLF001
        except RuntimeError as error:  # e.g. from CUDA after its context is lost: there is nothing left to abort
            sys.stderr.write(f"the abort of a process group reported: {error}\n")


def _cell_line_of_caller() -> str:
    """Return the number and text of a cell's innermost line on the stack; empty if no cell's code is on it."""
    for frame in outwards(sys._getframe()):  # noqa: SLF001
        filename = frame.f_code.co_filename
        if is_own(filename):
            text = linecache.getline(filename, frame.f_lineno).strip()
            return f"line {frame.f_lineno}: {text}" if text else f"line {frame.f_lineno}"
    return ""
