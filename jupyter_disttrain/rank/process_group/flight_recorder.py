"""Read torch's record of the collectives that this rank has called.

Covers: the separate records of Gloo and NCCL; the oldest pending collective; collectives by their number.
Does not cover: whether the main thread waits for a collective of NCCL (``rank.interrupts.blocked_in_c``), comparing
ranks (``client.recovery.hang_explanation``).

Reading NCCL's record queries CUDA events. That may wait as long as the driver does, and it fails in a process that has
lost its CUDA context.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from ...protocol.time_limits import FLIGHT_RECORDER_LIMIT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

_C10D = "torch._C._distributed_c10d"
_OF_GLOO, _OF_NCCL = "_dump_fr_trace_json", "_dump_nccl_trace_json"  # its functions that dump the two records
_reading = threading.Lock()  # held while NCCL's record is read


def pending_collective() -> dict[str, Any] | None:
    """Return the oldest unfinished collective of Gloo; its caller need not wait for it, as with ``async_op=True``."""
    return _oldest(_read(_OF_GLOO, only_active=True))


def pending_on_device(limit_s: float = 0.0) -> dict[str, Any] | None:
    """Return the oldest unfinished collective of NCCL; its caller need not wait for it.

    Returns None after ``limit_s`` seconds; 0 waits for the driver without limit.
    """
    return _oldest(_of_nccl(only_active=True, limit_s=limit_s))


def called(about: Collection[Sequence[Any]], since_ns: int) -> Iterator[dict[str, Any]]:
    """Yield the collectives with a group, number and backend in ``about`` that were called at ``since_ns`` or later.

    Numbers start again with each process group, so ``since_ns`` is the time at which the current one was made.
    """
    asked = {tuple(each) for each in about}
    of_nccl = _of_nccl(only_active=False, limit_s=FLIGHT_RECORDER_LIMIT_SECONDS)
    for entry in (*_read(_OF_GLOO, only_active=False), *of_nccl):
        if int(entry["time_created_ns"]) >= since_ns:
            summary = _summary(entry)
            if (summary["group"], summary["number"], summary["backend"]) in asked and not summary["is_p2p"]:
                yield summary


def _oldest(entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    pending = [entry for entry in entries if entry["state"] != "completed" and not entry.get("retired")]
    return _summary(min(pending, key=lambda each: int(each["time_created_ns"]))) if pending else None


def _of_nccl(*, only_active: bool, limit_s: float) -> list[dict[str, Any]]:
    """Return NCCL's entries; an empty list also if the device does not respond or its context is lost."""
    if not hasattr(sys.modules.get(_C10D), _OF_NCCL) or not _reading.acquire(timeout=limit_s or -1):
        return []  # this torch has none, or an earlier read still waits for the driver
    found: list[dict[str, Any]] = []

    def read() -> None:
        try:
            found.extend(_read(_OF_NCCL, only_active=only_active))
        except RuntimeError:
            pass  # the CUDA context is lost, which the cell's own error reports
        finally:
            _reading.release()

    if limit_s:
        reader = threading.Thread(target=read, name="disttrain flight recorder", daemon=True)
        try:
            reader.start()
        except RuntimeError:  # can't start a thread now
            _reading.release()
            return []
        reader.join(limit_s)
    else:
        read()
    return found.copy()  # a late reader must not change it


def _read(dump: str, *, only_active: bool) -> list[dict[str, Any]]:
    """Return the entries that a function of torch dumps; none if this torch lacks it."""
    call: Any = getattr(sys.modules.get(_C10D), dump, None)
    text = "{}" if call is None else call(includeCollectives=True, onlyActive=only_active)
    return list(json.loads(text).get("entries", []))


def _summary(entry: dict[str, Any]) -> dict[str, Any]:
    group = entry.get("process_group", ["", ""])
    backend, _, name = str(entry["profiling_name"]).rpartition(":")
    return {
        "name": name,
        "backend": backend,
        "number": entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"],
        "is_p2p": bool(entry.get("is_p2p")),
        "sizes": entry.get("input_sizes", []),
        "dtypes": entry.get("input_dtypes", []),
        "group": group[0],
        "description": group[1] if len(group) > 1 else "",
        "waits_s": max(0.0, time.time() - int(entry["time_created_ns"]) / 1e9),
    }
