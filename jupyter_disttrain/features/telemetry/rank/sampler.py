"""Sample a rank's activity from a separate thread.

Covers: the current line, waits for other ranks, passing the heartbeat to the nanny; sending metrics on time.
Does not cover: CPU, memory and devices, which the nanny reads (``process_stats``); the whole stack (``stacks``).

A sample costs some 200 us, four times a second while a cell runs. The main thread waits if it is in a function in which
ranks wait, or if the system reports that it sleeps in a condition variable and a collective is unfinished. Collectives
are in torch's record, and reading that takes milliseconds, in which no collective can start: so it is read when the
main thread has not moved since the last sample, and else as often as ``READING_SHARE`` allows. A sample between two
readings counts as the next reading finds the thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from ....protocol.messages import RankVitals
from ....protocol.states import RankActivity
from ....protocol.time_limits import IDLE_SECONDS, SAMPLER_POLL_SECONDS, WAITING_SECONDS
from ....rank.interrupts.blocked_in_c import BlockedInC
from ....rank.interrupts.deferral import outwards
from ....rank.mpi.current_call import mpi_call
from ....rank.proc_self import read_proc_self
from ....rank.process_group.flight_recorder import pending_collective, pending_on_device
from ....rank.process_group.gloo_abort import is_main_thread_waiting, may_wait_for_collective
from ....rank.user_code import is_own
from .progress import NOWHERE
from .stacks import MESSAGE_WAIT, communication

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from ....rank.process_group.group import Group
    from .log_metrics import MetricsLog
    from .progress import Progress

STANDS_NS = 200_000  # running time between two samples: a wait may have to start again every now and then
CALL_CHARACTERS = 64
READING_SHARE = 0.008  # share of the time for reading torch's record of collectives while training continues


class Sampler:
    """Sample the main thread until the process ends.

    ``cell`` returns the kernel's record of the current cell, ``group`` the process group, each None if there is none.
    ``program`` is the process ID of a program that does the rank's work; 0 in the rank itself.
    """

    def __init__(
        self,
        cell: Callable[[], dict[str, Any] | None],
        group: Callable[[], Group | None],
        progress: Progress,
        metrics: MetricsLog,
        show: Callable[[RankVitals], None],
        program: int = 0,
    ) -> None:
        self._cell, self._group, self._show = cell, group, show
        self._progress, self._metrics, self._program = progress, metrics, program
        self._checks = self._waits = self._seen = self._uncounted = 0
        self._waits_since = 0.0
        self._ran_ns = 0  # processor time of the main thread at the last sample
        self._wait: tuple[object, ...] | None = None  # where it was at the last sample, if it waited by spinning
        self._next_reading = 0.0
        self._place: tuple[int, int] | None = None  # where the main thread was at the last sample
        self._in_mpi = ""
        self._blocked = BlockedInC()
        self._has_failed = False
        self._main = threading.main_thread().ident or 0
        self._clock = time.pthread_getcpuclockid(self._main)
        self._stat = f"task/{os.getpid()}/stat"  # Python's thread number is from before the fork
        threading.Thread(target=self._run, name="disttrain sampler", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()  # never set
        next_send = 0.0
        while True:
            cell = self._cell()
            try:
                self._show(self._sample(cell))
                if time.monotonic() >= next_send:
                    next_send = time.monotonic() + self._metrics.pause_s
                    self._metrics.send()
            except Exception as error:  # noqa: BLE001  (it reads the frames of running code, and must outlive that)
                if not self._has_failed:
                    sys.stderr.write(f"the rank's activity could not be sampled: {type(error).__name__}: {error}\n")
                self._has_failed = True
            pause.wait(IDLE_SECONDS if cell is None else SAMPLER_POLL_SECONDS)

    def _sample(self, cell: dict[str, Any] | None) -> RankVitals:
        now = time.monotonic()
        found: dict[str, Any] = {"state": RankActivity.IDLE}
        if cell is None:
            self._waits_since = 0.0
        else:
            frame = sys._current_frames()[self._main]  # noqa: SLF001
            own = (each.f_lineno for each in outwards(frame) if is_own(each.f_code.co_filename) and each.f_lineno)
            line, call = next(own, None), self._call(frame, now)
            waits_s = now - self._waits_since if self._waits_since else 0.0
            loop = self._progress.loop
            if not loop.is_long:
                loop = NOWHERE
            found = {
                "state": RankActivity.IN_COLLECTIVE if waits_s > WAITING_SECONDS else RankActivity.RUNNING,
                "cell": cell["number"],
                "execution_count": cell["execution_count"],
                "line": line,
                "call": call[:CALL_CHARACTERS],
                "waits_s": round(waits_s, 1),
                "done": min(loop.done, loop.total),
                "total": loop.total,
                "left_s": None if loop.left_s is None else round(loop.left_s, 1),
            }
        return RankVitals(
            time_s=time.time(),
            beat_s=now,
            steps=self._progress.steps,
            samples=self._progress.samples,
            data_wait_s=round(self._progress.data_wait_s, 4),
            checks=self._checks,
            waits=self._waits,
            seen=self._seen,
            program=self._program,
            **found,
        )

    def _call(self, frame: FrameType, now: float) -> str:
        """Return the call in which the main thread waits for other ranks, if known; empty if it is in none."""
        call = next(filter(None, map(communication, outwards(frame))), "")
        stands, is_due = self._stands(), now >= self._next_reading
        if not call and (stands or is_due):
            call = self._hidden_call(frame, now)
        if not stands:
            self._uncounted += 1
        if stands or is_due:
            checks = 1 if stands else self._uncounted
            self._seen += 1
            self._checks += checks
            self._waits += checks * bool(call)
            self._uncounted -= 0 if stands else checks
        self._waits_since = self._since(frame, now, stands=stands) if call else 0.0
        return call

    def _since(self, frame: FrameType, now: float, *, stands: bool) -> float:
        """Return the start of the current wait, which is reset if the thread ran, unless it waits by spinning."""
        place = None
        if not self._is_asleep():  # as in MPI and CUDA
            values = hash(tuple(map(id, frame.f_locals.values())))
            place = (id(frame.f_code), frame.f_lasti, values, self._progress.steps)
        goes_on = stands or (place is not None and place == self._wait)
        self._wait = place
        return self._waits_since if goes_on and self._waits_since else now

    def _hidden_call(self, frame: FrameType, now: float) -> str:
        """Return the call in which the main thread waits where no Python function shows it."""
        is_asleep, is_blocked = self._is_asleep(), self._blocked.check()
        if (is_asleep or is_blocked) and self._group() is not None:
            began = time.thread_time()
            pending = pending_collective() if is_asleep and may_wait_for_collective(frame) else None
            if pending is None and is_blocked:  # on a GPU, for which it may wait by spinning
                pending = pending_on_device()
            self._next_reading = now + (time.thread_time() - began) / READING_SHARE
            if pending is not None:
                return str(pending["name"])
            if is_asleep and is_main_thread_waiting():
                return MESSAGE_WAIT
        return self._mpi_call(frame)

    def _stands(self) -> bool:
        """Whether the main thread has not run since the last sample, except to check what it waits for."""
        before, self._ran_ns = self._ran_ns, time.clock_gettime_ns(self._clock)
        return self._ran_ns < before + STANDS_NS

    def _mpi_call(self, frame: FrameType) -> str:
        """Return the MPI call that the main thread was in already at the last sample: parsing is slow."""
        place = (id(frame.f_code), frame.f_lasti)
        if place != self._place:
            self._place, self._in_mpi = place, "?"
            return ""
        if self._in_mpi == "?":
            found = mpi_call(frame)
            self._in_mpi = "" if found is None else f"MPI {found.name}"
        return self._in_mpi

    def _is_asleep(self) -> bool:
        return read_proc_self(self._stat).rpartition(b")")[2].split()[0] != b"R"
