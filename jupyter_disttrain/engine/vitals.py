"""The figures of one rank and of its node, read by the nanny.

Covers: state, CPU and memory of the rank, its GPU, load and traffic of the node; one message of each a second.
Does not cover: what the rank shows of itself (``pulse``), histories (``cluster.telemetry``).

The nanny reads them in its own process, so they go on while the rank's code holds Python's lock, and cost it nothing.
"""

from __future__ import annotations

import math
import os
import queue
import shutil
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ..messages import NodeVitals, RankVitals
from .connection import SAMPLE
from .devices import Gpu, open_gpu
from .family import descendants
from .pulse import NO_CELL, Pulse

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..messages import Record
    from .wire import NannyEnd

SILENT_SECONDS = 3.0  # since the last beat, before a rank counts as not responding
WAITING_SECONDS = 0.3  # in one collective, before the rank's state says so: a training loop is in one much of the time
_INFINIBAND = Path("/sys/class/infiniband")
_WORD_BYTES = 4  # what InfiniBand's counters of data count


class Vitals:
    """Read the figures on a thread of their own, and tell them on the nanny's loop.

    A file system or a driver that hangs takes the figures away, and nothing else.

    Parameters
    ----------
    wake
        Wakes the loop, so that it calls :meth:`tell_due`.
    publish
        Sends a record to whoever listens.
    """

    def __init__(self, pid: int, wire: NannyEnd, wake: Callable[[], None], publish: Callable[[Record], None]) -> None:
        self._process = psutil.Process(pid)
        self._wire = wire
        self._wake = wake
        self._publish = publish
        self._pause = float(os.environ.get(SAMPLE, "0"))
        self._cpu = 0.0
        self._pulse = Pulse()
        self._at = time.monotonic()
        self._ready: queue.SimpleQueue[Record] = queue.SimpleQueue()

    def begin(self, local_rank: int, device: str, uuid: str) -> None:
        """Begin to read; the first rank of a node tells of the node."""
        if self._pause:
            threading.Thread(target=self._run, args=(local_rank, device, uuid), name="vitals", daemon=True).start()

    def tell_due(self) -> None:
        """Tell what has been read."""
        while not self._ready.empty():
            self._publish(self._ready.get())

    def _run(self, local_rank: int, device: str, uuid: str) -> None:
        node = Node() if local_rank == 0 else None
        gpu = None
        try:
            gpu = open_gpu(device, self._process.pid, uuid)
        except Exception as error:  # noqa: BLE001  (NVML is others' C code)
            sys.stderr.write(f"the GPU {device} tells no figures: {error}\n")
        failed = False
        while True:
            began = time.monotonic()
            try:
                self._ready.put(self._of_rank(began, gpu))
                if node is not None:
                    self._ready.put(node.read())
                self._wake()
            except psutil.NoSuchProcess:
                return  # the rank has ended, which is told apart
            except Exception as error:  # noqa: BLE001  (files of the system, a driver: none of them is worth a rank)
                if not failed:
                    sys.stderr.write(f"a figure could not be read: {type(error).__name__}: {error}\n")
                failed = True
            time.sleep(max(0.0, began + self._pause - time.monotonic()))

    def _of_rank(self, now: float, gpu: Gpu | None) -> RankVitals:
        cpu = self._cpu_seconds()
        percent = max(0.0, 100 * (cpu - self._cpu) / max(now - self._at, 1e-3))
        self._cpu, self._at = cpu, now
        pulse = self._pulse = self._wire.pulse() or self._pulse  # None in the midst of writing
        silent_s = max(0.0, now - pulse.beat_s) if pulse.beat_s else 0.0
        return RankVitals(
            time_s=time.time(),
            beat_s=pulse.beat_s,
            state=self._state(pulse, silent_s, now),
            silent_s=round(silent_s, 1) if silent_s > SILENT_SECONDS else 0.0,
            cell=None if pulse.cell == NO_CELL else pulse.cell,
            execution_count=pulse.execution_count or None,
            line=pulse.line or None,
            call=pulse.call.decode(errors="replace"),
            waits_s=round(now - pulse.waits_since_s, 1) if pulse.waits_since_s else 0.0,
            steps=pulse.steps,
            samples=pulse.samples,
            looks=pulse.looks,
            waits=pulse.waits,
            seen=pulse.seen,
            data_wait_s=round(pulse.data_wait_s, 4),
            done=pulse.done,
            total=pulse.total,
            left_s=None if math.isnan(pulse.left_s) else round(pulse.left_s, 1),
            cpu_percent=round(percent, 1),
            memory_bytes=self._memory(),
            gpu=None if gpu is None else gpu.read(),
        )

    def _state(self, pulse: Pulse, silent_s: float, now: float) -> str:
        if self._process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return "stopped"
        if silent_s > SILENT_SECONDS:
            return "not responding"
        if pulse.cell == NO_CELL or not self._wire.uses()[0]:  # the second is known at once
            return "idle"
        if pulse.waits_since_s and now - pulse.waits_since_s > WAITING_SECONDS:
            return "in collective"
        return "running"

    def _family(self) -> list[psutil.Process]:
        """Return the rank's process and those that it started, e.g. for a DataLoader."""
        family = [self._process]
        for pid in descendants(self._process.pid):
            try:
                family.append(psutil.Process(pid))
            except psutil.NoSuchProcess:
                continue  # it has ended meanwhile
        return family

    def _cpu_seconds(self) -> float:
        """Return the processor time of the rank, of the children that it has and of those that it had."""
        rank, *others = self._family()
        times = rank.cpu_times()
        total = times.user + times.system + times.children_user + times.children_system
        for process in others:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return float(total)

    def _memory(self) -> int:
        """Return the bytes in memory, those that are shared with the rank's children once."""
        rank, *others = self._family()
        total = int(rank.memory_info().rss)
        for process in others:
            try:
                memory = process.memory_info()
            except psutil.NoSuchProcess:
                continue
            total += memory.rss - getattr(memory, "shared", 0)
        return total


class Node:
    """The figures of this host, with rates since the last look."""

    def __init__(self) -> None:
        self._folder = os.getcwd()  # noqa: PTH109  (it may be removed later)
        self._at = time.monotonic()
        self._counts = _traffic()
        psutil.cpu_percent()  # the first call has nothing to compare with

    def read(self) -> NodeVitals:
        """Return the figures."""
        now, counts = time.monotonic(), _traffic()
        seconds = max(now - self._at, 1e-3)
        rates = {name: max(0, round((counts[name] - self._counts[name]) / seconds)) for name in counts}
        self._at, self._counts = now, counts
        memory = psutil.virtual_memory()
        disk = shutil.disk_usage(self._folder)
        return NodeVitals(
            time_s=time.time(),
            host=socket.gethostname(),
            cores=psutil.cpu_count() or 1,
            cpu_percent=psutil.cpu_percent(),
            load=os.getloadavg()[0],
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            disk_free_bytes=disk.free,
            disk_total_bytes=disk.total,
            **rates,
        )


def _traffic() -> dict[str, int]:
    """Return bytes since the host started, by the name of the field of NodeVitals that their rate goes into."""
    interfaces = psutil.net_io_counters(pernic=True)
    outside = [counts for name, counts in interfaces.items() if name != "lo"]
    return {
        "received_bytes_per_s": sum(counts.bytes_recv for counts in outside),
        "sent_bytes_per_s": sum(counts.bytes_sent for counts in outside),
        "infiniband_received_bytes_per_s": _infiniband("port_rcv_data"),
        "infiniband_sent_bytes_per_s": _infiniband("port_xmit_data"),
    }


def _infiniband(counter: str) -> int:
    total = 0
    for path in _INFINIBAND.glob(f"*/ports/*/counters/{counter}"):
        text = path.read_text().strip()
        total += int(text) * _WORD_BYTES if text.isdigit() else 0
    return total
