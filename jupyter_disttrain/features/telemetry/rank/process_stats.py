"""Read the metrics of one rank and of its node, in the nanny.

Covers: state, CPU and memory of the rank, its GPU, load and traffic of the node, one message of each a second; the
progress of the loop, sent with the output that shows it.
Does not cover: what the rank itself reports (``status_page``), histories (``features.telemetry.client``).

The nanny reads them in its own process, so they continue while the rank's code holds the GIL, and don't slow that code.
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

from ....protocol.environment import SAMPLE_SECONDS
from ....protocol.messages import LoopProgress, NodeVitals, RankVitals
from ....protocol.states import RankActivity
from ....protocol.time_limits import LOOP_SECONDS, VITALS_SILENT_SECONDS, WAITING_SECONDS
from ....rank.nanny.process_tree import descendants
from .gpu_stats import Gpu, open_gpu
from .status_page import NO_CELL, LoopStatus, RankStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from ....protocol.messages import Record
    from ....rank.nanny.ipc import NannyEnd

MOST_LOOPS_PER_SECOND = 100  # loop messages, of all ranks together
_INFINIBAND = Path("/sys/class/infiniband")
_COUNT_BYTES = 4  # bytes per count of InfiniBand's data counters


class Vitals:
    """Read the metrics on a separate thread, and publish them on the nanny's loop.

    A file system or a driver that hangs stops the metrics, and nothing else.

    Parameters
    ----------
    wake
        Wakes the loop, so that it calls :meth:`publish_due`.
    publish
        Publishes a record.
    """

    def __init__(self, pid: int, wire: NannyEnd, wake: Callable[[], None], publish: Callable[[Record], None]) -> None:
        self._process = psutil.Process(pid)
        self._wire = wire
        self._wake = wake
        self._publish = publish
        self._pause = float(os.environ.get(SAMPLE_SECONDS, "0"))
        self._cpu = 0.0
        self._status = RankStatus()
        self._loop = LoopStatus()
        self._published_loop = LoopStatus()
        self._loop_pause = LOOP_SECONDS
        self._next_loop: float | None = None  # when progress may be published next; None: not at all
        self.loop_due: float | None = None  # when to check the loop's progress again
        self._at = time.monotonic()
        self._ready: queue.SimpleQueue[Record] = queue.SimpleQueue()

    def begin(self, world_size: int, local_rank: int, device: str, uuid: str) -> None:
        """Start reading; the first rank of a node reads the node's metrics too."""
        if self._pause:
            self._loop_pause = max(LOOP_SECONDS, world_size / MOST_LOOPS_PER_SECOND)
            self._next_loop = 0.0
            threading.Thread(target=self._run, args=(local_rank, device, uuid), name="vitals", daemon=True).start()

    def publish_due(self) -> None:
        """Publish what has been read."""
        while not self._ready.empty():
            self._publish(self._ready.get())

    def publish_loop(self) -> None:
        """Publish the loop's progress, if it is new and the last message is long enough ago.

        Called after all output of the rank, and from time to time while a loop runs: not every redraw of a progress bar
        shows its position (``progress.SHOW_SECONDS``), and a loop may have no bar.
        """
        self.loop_due = None
        loop, published = self._wire.loop(), self._published_loop
        if loop is None or self._next_loop is None or loop.cell == NO_CELL or not (loop.total or published.total):
            return
        now = time.monotonic()
        if _place(loop) == _place(published):
            self.loop_due = now + self._loop_pause
            return
        if now < self._next_loop:
            self.loop_due = self._next_loop
            return
        self._published_loop = loop
        self._next_loop = self.loop_due = now + self._loop_pause
        self._publish(
            LoopProgress(
                cell=loop.cell,
                execution_count=loop.execution_count or None,
                done=loop.done,
                total=loop.total,
                left_s=_left(loop),
            )
        )

    def _run(self, local_rank: int, device: str, uuid: str) -> None:
        node = Node() if local_rank == 0 else None
        gpu = None
        try:
            gpu = open_gpu(device, self._process.pid, uuid)
        except Exception as error:  # noqa: BLE001  (NVML is third-party C code)
            sys.stderr.write(f"the usage of GPU {device} can't be read: {error}\n")
        failed = False
        while True:
            began = time.monotonic()
            try:
                self._ready.put(self._of_rank(began, gpu))
                if node is not None:
                    self._ready.put(node.read())
                self._wake()
            except psutil.NoSuchProcess:
                return  # the rank has exited, which is reported separately
            except Exception as error:  # noqa: BLE001  (system files, a driver: none of them may end a rank)
                if not failed:
                    sys.stderr.write(f"a measurement failed: {type(error).__name__}: {error}\n")
                failed = True
            time.sleep(max(0.0, began + self._pause - time.monotonic()))

    def _of_rank(self, now: float, gpu: Gpu | None) -> RankVitals:
        cpu = self._cpu_seconds()
        percent = max(0.0, 100 * (cpu - self._cpu) / max(now - self._at, 1e-3))
        self._cpu, self._at = cpu, now
        status = self._status = self._wire.status() or self._status  # None during a write
        silent_s = max(0.0, now - status.beat_s) if status.beat_s else 0.0
        memory_bytes, figures_of_gpu = self._memory(), None if gpu is None else gpu.read()
        # Read last: it must not be older than progress published meanwhile with a bar.
        loop = self._loop = self._wire.loop() or self._loop
        loop = loop if loop.cell == status.cell else LoopStatus()
        return RankVitals(
            time_s=time.time(),
            beat_s=status.beat_s,
            state=self._state(status, silent_s, now),
            silent_s=round(silent_s, 1) if silent_s > VITALS_SILENT_SECONDS else 0.0,
            cell=None if status.cell == NO_CELL else status.cell,
            execution_count=status.execution_count or None,
            line=status.line or None,
            call=status.call.decode(errors="replace"),
            waits_s=round(now - status.waits_since_s, 1) if status.waits_since_s else 0.0,
            steps=status.steps,
            samples=status.samples,
            checks=status.checks,
            waits=status.waits,
            seen=status.seen,
            data_wait_s=round(status.data_wait_s, 4),
            done=loop.done,
            total=loop.total,
            left_s=_left(loop),
            cpu_percent=round(percent, 1),
            memory_bytes=memory_bytes,
            gpu=figures_of_gpu,
        )

    def _state(self, status: RankStatus, silent_s: float, now: float) -> RankActivity:
        if self._process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return RankActivity.STOPPED
        if silent_s > VITALS_SILENT_SECONDS:
            return RankActivity.NOT_RESPONDING
        if status.cell == NO_CELL or not self._wire.uses() % 2:  # uses() changes without delay, the pulse does not
            return RankActivity.IDLE
        if status.waits_since_s and now - status.waits_since_s > WAITING_SECONDS:
            return RankActivity.IN_COLLECTIVE
        return RankActivity.RUNNING

    def _family(self) -> list[psutil.Process]:
        """Return the rank's process and its descendants, e.g. a DataLoader's workers."""
        family = [self._process]
        for pid in descendants(self._process.pid):
            try:
                family.append(psutil.Process(pid))
            except psutil.NoSuchProcess:
                continue  # it has exited meanwhile
        return family

    def _cpu_seconds(self) -> float:
        """Return the CPU seconds of the rank and of its children, those that have exited included."""
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
        """Return the resident bytes, counting memory shared with the rank's children once."""
        rank, *others = self._family()
        total = int(rank.memory_info().rss)
        for process in others:
            try:
                memory = process.memory_info()
            except psutil.NoSuchProcess:
                continue
            total += memory.rss - getattr(memory, "shared", 0)
        return total


def _place(loop: LoopStatus) -> tuple[int, int, int]:
    return loop.cell, loop.done, loop.total


def _left(loop: LoopStatus) -> float | None:
    return None if math.isnan(loop.left_s) else round(loop.left_s, 1)


class Node:
    """The metrics of this host, with rates since the last read."""

    def __init__(self) -> None:
        self._folder = os.getcwd()  # noqa: PTH109  (it may be removed later)
        self._at = time.monotonic()
        self._counts = _traffic()
        psutil.cpu_percent()  # the first call has nothing to compare with

    def read(self) -> NodeVitals:
        """Return the metrics."""
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
    """Return bytes since the host started, by the field of NodeVitals for their rate."""
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
        total += int(text) * _COUNT_BYTES if text.isdigit() else 0
    return total
