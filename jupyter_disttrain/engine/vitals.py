"""The figures of one rank and of its node, read by the nanny.

Covers: state, CPU and memory of the rank, its GPU, load and traffic of the node; one message of each a second.
Does not cover: what the rank shows of itself (``pulse``), histories (``cluster.telemetry``).

The nanny reads them in its own process, so they go on while the rank's code holds Python's lock, and cost it nothing.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ..messages import NodeVitals, RankVitals
from .connection import SAMPLE
from .devices import Gpu, open_gpu
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
    """Read and tell the figures, when it is time.

    Parameters
    ----------
    publish
        Sends a record to whoever listens.
    """

    def __init__(self, pid: int, wire: NannyEnd, publish: Callable[[Record], None]) -> None:
        self._process = psutil.Process(pid)
        self._wire = wire
        self._publish = publish
        self._pause = float(os.environ.get(SAMPLE, "0"))
        self._node: Node | None = None
        self._gpu: Gpu | None = None
        self._cpu = self._cpu_seconds()
        self._at = time.monotonic()
        self.due: float | None = None

    def begin(self, local_rank: int, device: str) -> None:
        """Begin to tell; the first rank of a node tells of the node."""
        if not self._pause:
            return
        self._gpu = open_gpu(device, self._process.pid)
        self._node = Node() if local_rank == 0 else None
        self.due = time.monotonic()

    def tell_due(self) -> None:
        """Tell, if it is time."""
        now = time.monotonic()
        if self.due is None or now < self.due:
            return
        self.due = now + self._pause
        try:
            self._publish(self._of_rank(now))
        except psutil.Error:
            return  # it has just ended, which is told apart
        if self._node is not None:
            self._publish(self._node.read())

    def _of_rank(self, now: float) -> RankVitals:
        cpu = self._cpu_seconds()
        percent = 100 * (cpu - self._cpu) / max(now - self._at, 1e-3)
        self._cpu, self._at = cpu, now
        pulse = self._wire.pulse() or Pulse()
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
            data_wait_s=round(pulse.data_wait_s, 4),
            cpu_percent=round(percent, 1),
            memory_bytes=self._memory(),
            gpu=None if self._gpu is None else self._gpu.read(),
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
        found, family = [self._process], []
        while found:
            process = found.pop()
            family.append(process)
            try:
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                found += [psutil.Process(int(pid)) for pid in children]
            except (OSError, psutil.NoSuchProcess):
                continue  # it has ended meanwhile, or this is no Linux
        return family

    def _cpu_seconds(self) -> float:
        total = 0.0
        for process in self._family():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

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
        disk = shutil.disk_usage(Path.cwd())
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
