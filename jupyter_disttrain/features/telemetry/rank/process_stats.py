"""Read the metrics of one rank and of its node, in the nanny.

Covers: state, CPU and memory of the rank, its GPU, load and traffic of the node, one message of each a second, and one
of the rank when its loop has advanced.
Does not cover: what the rank itself reports (``status_page``), histories (``features.telemetry.client``).

The nanny reads them in its own process, so they continue while the rank's code holds the GIL, and don't slow that code.
"""

from __future__ import annotations

import os
import queue
import shutil
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ....protocol.environment import SAMPLE_SECONDS
from ....protocol.messages import NodeVitals, RankVitals
from ....protocol.states import RankActivity
from ....protocol.time_limits import LOOP_SECONDS, NO_LOOP_SECONDS, VITALS_SILENT_SECONDS
from ....rank.nanny.process_tree import descendants
from .gpu_stats import Gpu, open_gpu

if TYPE_CHECKING:
    from collections.abc import Callable

    from ....protocol.messages import Record
    from ....rank.nanny.ipc import NannyEnd

MOST_LOOPS_PER_SECOND = 100  # loop messages, of all ranks together
_INFINIBAND = Path("/sys/class/infiniband")
_COUNT_BYTES = 4  # bytes per count of InfiniBand's data counters


class Vitals:
    """Read the metrics on a separate thread, and publish them on the nanny's loop, which ``wake`` wakes.

    A file system or a driver that hangs stops the metrics, and nothing else.
    """

    def __init__(self, pid: int, wire: NannyEnd, wake: Callable[[], None], publish: Callable[[Record], None]) -> None:
        self._process = psutil.Process(pid)
        self._wire = wire
        self._wake = wake
        self._publish = publish
        self._pause = float(os.environ.get(SAMPLE_SECONDS, "0"))
        self._cpu_s = 0.0
        self._at = time.monotonic()
        self._status = RankVitals(time_s=0.0, beat_s=0.0, state=RankActivity.IDLE)  # the rank's last
        self._usage: dict[str, Any] = {"time_s": 0.0}
        self._ready: queue.SimpleQueue[Record] = queue.SimpleQueue()

    def begin(self, world_size: int, local_rank: int, device: str, uuid: str) -> None:
        """Start reading; the first rank of a node reads the node's metrics too."""
        if self._pause:
            loop_pause = max(LOOP_SECONDS, world_size / MOST_LOOPS_PER_SECOND)
            arguments = (local_rank, device, uuid, loop_pause)
            threading.Thread(target=self._run, args=arguments, name="vitals", daemon=True).start()

    def publish_due(self) -> None:
        """Publish what has been read."""
        while not self._ready.empty():
            self._publish(self._ready.get())

    def now(self) -> RankVitals:
        """Return the rank's present activity, and its use of resources as measured last."""
        return self._vitals(time.monotonic(), self._wire.status() or self._status)  # None during a write

    def _run(self, local_rank: int, device: str, uuid: str, loop_pause: float) -> None:
        node = Node() if local_rank == 0 else None
        gpu = None
        try:
            gpu = open_gpu(device, uuid)
        except Exception as error:  # noqa: BLE001  (NVML is third-party C code)
            sys.stderr.write(f"the usage of GPU {device} can't be read: {error}\n")
        failed = False
        due = 0.0
        while True:
            now = time.monotonic()
            before = self._status
            try:
                self._status = self._wire.status() or before  # None during a write
                is_due = now >= due
                if is_due:
                    due = now + self._pause
                    self._usage = self._measure(now, gpu)
                if is_due or _loop(before) != _loop(self._status):
                    self._ready.put(self._vitals(now, self._status))
                    self._wake()
                if is_due and node is not None:
                    self._ready.put(node.read())
                    self._wake()
            except psutil.NoSuchProcess:
                return  # the rank has exited, which is reported separately
            except Exception as error:  # noqa: BLE001  (system files, a driver: none of them may end a rank)
                if not failed:
                    sys.stderr.write(f"a measurement failed: {type(error).__name__}: {error}\n")
                failed = True
            next_look = now + (NO_LOOP_SECONDS if self._status.cell is None else loop_pause)
            time.sleep(max(0.0, min(due, next_look) - time.monotonic()))

    def _measure(self, now: float, gpu: Gpu | None) -> dict[str, Any]:
        """Return the rank's use of resources, child processes such as a DataLoader's workers included."""
        times = self._process.cpu_times()
        cpu_s = sum(times[:4])  # of the process, and of its children that have exited
        memory_bytes = self._process.memory_info().rss
        program = self._status.program
        others = {*descendants(self._process.pid), *([program, *descendants(program)] if program else [])}
        for pid in others:
            try:
                child = psutil.Process(pid)
                cpu_s += sum(child.cpu_times()[:2])
                memory = child.memory_info()
            except psutil.NoSuchProcess:
                continue  # it has exited meanwhile
            memory_bytes += memory.rss - memory.shared  # what it shares with the rank counts once
        percent = max(0.0, 100 * (cpu_s - self._cpu_s) / max(now - self._at, 1e-3))
        self._cpu_s, self._at = cpu_s, now
        figures = None if gpu is None else gpu.read({self._process.pid, *others})
        return {"time_s": time.time(), "cpu_percent": round(percent, 1), "memory_bytes": memory_bytes, "gpu": figures}

    def _vitals(self, now: float, status: RankVitals) -> RankVitals:
        """Return the rank's activity, and its use of resources as measured last."""
        silent_s = max(0.0, now - status.beat_s) if status.beat_s else 0.0
        silent_s = round(silent_s, 1) if silent_s > VITALS_SILENT_SECONDS else 0.0
        state: str = status.state
        uses = self._wire.uses()
        if self._process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            state = RankActivity.STOPPED
        elif silent_s:
            state = RankActivity.NOT_RESPONDING
        elif not uses % 2:  # changes without delay, the rank's page does not
            state = RankActivity.IDLE
        return replace(status, state=state, silent_s=silent_s, uses=uses, **self._usage)


def _loop(vitals: RankVitals) -> tuple[int | None, int, int] | None:
    """Return what changes as a loop advances; None without a loop."""
    return (vitals.cell, vitals.done, vitals.total) if vitals.total else None


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
        return NodeVitals(
            time_s=time.time(),
            host=socket.gethostname(),
            cores=psutil.cpu_count() or 1,
            cpu_percent=psutil.cpu_percent(),
            load=os.getloadavg()[0],
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            disk_free_bytes=shutil.disk_usage(self._folder).free,
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
    texts = [path.read_text().strip() for path in _INFINIBAND.glob(f"*/ports/*/counters/{counter}")]
    return sum(int(text) * _COUNT_BYTES for text in texts if text.isdigit())
