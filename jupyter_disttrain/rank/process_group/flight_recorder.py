"""Read torch's record of the collectives that this rank has called.

Covers: the separate records of Gloo and NCCL; the oldest pending collective; collectives by their number.
Does not cover: whether the main thread waits for a collective of NCCL (``rank.interrupts.standstill``), comparing ranks
(``client.recovery.hang_detection``).

Reading NCCL's record queries CUDA events. That may wait as long as the driver does, and it fails in a process that has
lost its CUDA context.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

from ...protocol.time_limits import FLIGHT_RECORDER_LIMIT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence


_reading = threading.Lock()  # held while NCCL's record is read


def pending_collective() -> dict[str, Any] | None:
    """Return the oldest unfinished collective of Gloo; its caller need not wait for it, as with ``async_op=True``."""
    return _oldest(_of_gloo(only_active=True))


def pending_on_device(limit_s: float = 0.0) -> dict[str, Any] | None:
    """Return the oldest unfinished collective of NCCL; its caller need not wait for it.

    Parameters
    ----------
    limit_s
        Return None after this many seconds; 0 waits for the driver without limit.
    """
    return _oldest(_of_nccl(only_active=True, limit_s=limit_s))


def called(about: Collection[Sequence[Any]], since_ns: int) -> Iterator[dict[str, Any]]:
    """Yield the collectives with a group, number and backend in ``about`` that were called at ``since_ns`` or later.

    Numbers start again with each process group, so ``since_ns`` is the time at which the current one was made.
    """
    asked = {tuple(each) for each in about}
    for entry in (*_of_gloo(only_active=False), *_of_nccl(only_active=False, limit_s=FLIGHT_RECORDER_LIMIT_SECONDS)):
        if int(entry["time_created_ns"]) >= since_ns:
            summary = _summary(entry)
            if (summary["group"], summary["number"], summary["backend"]) in asked and not summary["is_p2p"]:
                yield summary


def _oldest(entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    pending = [entry for entry in entries if entry["state"] != "completed" and not entry.get("retired")]
    return _summary(min(pending, key=lambda each: int(each["time_created_ns"]))) if pending else None


def _of_gloo(*, only_active: bool) -> list[dict[str, Any]]:
    return _read(_dump_of("_dump_fr_trace_json"), only_active=only_active)


def _of_nccl(*, only_active: bool, limit_s: float) -> list[dict[str, Any]]:
    """Return NCCL's entries; an empty list also if the device does not respond or its context is lost."""
    dump = _dump_of("_dump_nccl_trace_json")
    if dump is None or not _reading.acquire(timeout=limit_s or -1):
        return []  # an earlier read still waits for the driver
    found: list[list[dict[str, Any]]] = []

    def read() -> None:
        try:
            found.append(_read(dump, only_active=only_active))
        except RuntimeError:
            found.append([])  # the CUDA context is lost, which the cell's own error reports
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
    return found[0] if found else []


def _dump_of(name: str) -> Callable[..., str | bytes] | None:
    """Return torch's function that dumps a record; None if this torch has none."""
    from torch._C import _distributed_c10d  # noqa: PLC0415

    return getattr(_distributed_c10d, name, None)


def _read(dump: Callable[..., str | bytes] | None, *, only_active: bool) -> list[dict[str, Any]]:
    if dump is None:
        return []
    entries: list[dict[str, Any]] = json.loads(dump(includeCollectives=True, onlyActive=only_active)).get("entries", [])
    return entries


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
