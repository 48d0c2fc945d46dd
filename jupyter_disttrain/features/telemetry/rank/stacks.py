"""Report what this rank is doing now.

Covers: the main thread's stack from the cell's own line on, the collective it waits in.
Does not cover: comparing ranks (``client.recovery.hang_explanation``).

Served on the control thread, so it works while the main thread waits in C code that has released the GIL, as every
collective does. A rank that does not reply even here holds the GIL, or is stopped.
"""

from __future__ import annotations

import linecache
import sys
import threading
from typing import TYPE_CHECKING, Any

from ....protocol.time_limits import FLIGHT_RECORDER_LIMIT_SECONDS
from ....rank.interrupts.blocked_in_c import BlockedInC
from ....rank.interrupts.deferral import outwards
from ....rank.mpi.current_call import mpi_call
from ....rank.process_group.flight_recorder import called, pending_collective, pending_on_device
from ....rank.process_group.gloo_abort import is_main_thread_waiting, may_wait_for_collective
from ....rank.user_code import is_cell, is_own, is_typed, script_name

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from types import FrameType

    from ....rank.process_group.group import Group
    from ...horovod.calls import HorovodCalls

DEEPEST = 30  # frames; beyond these only the cell's own are reported
MESSAGE_WAIT = "wait() of a send or recv"  # of an operation started before, e.g. by isend; Python has no frame of it
_COMMUNICATION = ("torch/distributed/distributed_c10d.py", "torch/distributed/rendezvous.py")
_main_thread = BlockedInC()  # between two requests of the client
_OF_HOROVOD = ("horovod/torch/mpi_ops.py", "horovod/torch/functions.py", "horovod/common/basics.py")


def where(
    group: Group | None, horovod: HorovodCalls, cell: dict[str, Any] | None, about: Collection[Sequence[Any]] = ()
) -> dict[str, Any]:
    """Return what the rank is doing.

    ``group`` is None on a rank without torch, ``cell`` while it is idle. ``about``: collectives that other ranks wait
    in, each by its group's name, its number and its backend; the reply has what this rank called there.
    """
    found: dict[str, Any] = {"cell": cell, "stack": [], "line": None, "call": None, "collective": None, "called": []}
    if group is not None and about:
        found["called"] = list(called(about, group.since_ns))
    if cell is None:
        return found
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
    frames = _from_cell(frame)
    if frames:
        own = frames[0].f_code.co_filename
        outer = [each for each in frames[:-DEEPEST] if each.f_code.co_filename == own][:DEEPEST]
        found["stack"] = [_describe(each) for each in (*outer, *frames[-DEEPEST:])]
        lines = [each.f_lineno for each in frames if each.f_code.co_filename == own and each.f_lineno and is_own(own)]
        found["line"] = lines[-1] if lines else None
        found["file"] = script_name()
    found["call"] = next(filter(None, map(communication, frames)), None)
    in_mpi = mpi_call(frame) if frames and found["call"] is None else None
    if in_mpi is not None:
        found["call"] = f"MPI {in_mpi.name}"
        found["mpi"] = in_mpi.kind
        # A loop comes to the same line again and again, with other values.
        found["values"] = hash(tuple(map(id, frame.f_locals.values()))) if frame is not None else 0
    if group is not None:
        waits = found["call"] is not None or may_wait_for_collective(frame)
        found["collective"] = horovod.waiting or (pending_collective() if waits else None) or _device_wait()
        if found["call"] is None and found["collective"] is None and is_main_thread_waiting():
            found["call"] = MESSAGE_WAIT
    return found


def _device_wait() -> dict[str, Any] | None:
    """Return the NCCL collective that the main thread waits for: it is pending, and the thread is blocked."""
    return pending_on_device(FLIGHT_RECORDER_LIMIT_SECONDS) if _main_thread.check() else None


def _from_cell(frame: FrameType | None) -> list[FrameType]:
    """Return the frames from the cell's outermost one on."""
    frames = list(outwards(frame))[::-1]
    begins = is_own if is_typed() or script_name() else is_cell
    return frames[next((at for at, each in enumerate(frames) if begins(each.f_code.co_filename)), len(frames)) :]


def _describe(frame: FrameType) -> tuple[str, int, str, str]:
    filename, line = frame.f_code.co_filename, frame.f_lineno or 0  # a frame that is just being entered has no line
    return filename, line, frame.f_code.co_name, linecache.getline(filename, line).strip()


def communication(frame: FrameType) -> str:
    """Return the name of a frame's function if ranks communicate in it, of torch or Horovod; else an empty string."""
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if name.startswith("_"):
        return ""
    if file.endswith(_COMMUNICATION):
        return name
    return f"hvd.{name}" if file.endswith(_OF_HOROVOD) else ""
