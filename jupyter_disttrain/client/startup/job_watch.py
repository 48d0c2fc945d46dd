"""Watch the Slurm job in which a cluster's ranks run.

Covers: a thread that polls Slurm and reports notices; whether a rank died because its job ended.
Does not cover: the notices and their times (``launchers.slurm.monitor``), what follows from the end of the job
(``client.lifecycle``).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from ...launchers.slurm.monitor import JobMonitor
from ...launchers.slurm.user_messages import running_text
from ...protocol.time_limits import ENDING_SECONDS, HURRIED_POLL_SECONDS, JOB_WATCH_LATE_SECONDS, JOB_WATCH_TURN_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...launchers.slurm.allocated_nodes import AllocatedNodes


log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class JobWatch:
    """Watches the job in which the ranks run until it is closed, on a thread of its own.

    On that thread ``on_notice`` is called with messages for the user, and ``on_over`` once, with the reason why the job
    is over.
    """

    def __init__(
        self, allocated: AllocatedNodes, on_notice: Callable[[str], None], on_over: Callable[[str], None]
    ) -> None:
        self._monitor = JobMonitor(allocated)
        self._on_notice, self._on_over = on_notice, on_over
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None ends the thread
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disttrain job", daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        """Where the job runs and until when, from Slurm's latest reply."""
        state = self._monitor.state or self._monitor.job.state()
        return running_text(state) if state.runs else self._monitor.over or f"job {state.job_id}: {state.state.lower()}"

    @property
    def standing(self) -> list[str]:
        """The notices on the job that hold now."""
        return self._monitor.standing

    def if_it_runs(self, then: Callable[[], None]) -> None:
        """Call ``then`` on the watch's thread, unless the job is ending, which explains the event that it handles."""
        self._asked.put(then)

    def close(self) -> None:
        """Stop watching and end the thread."""
        self._is_closed.set()
        self._asked.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        self._guard(lambda: self._ask(now=True))  # its nodes and limit, which Slurm may have forgotten when it is over
        while not self._is_closed.is_set():
            try:
                asked = [self._asked.get(timeout=JOB_WATCH_TURN_SECONDS)]
            except queue.Empty:
                self._guard(lambda: self._ask(now=False))
                continue
            is_ending = self._guard(self._is_ending)
            while not self._asked.empty():  # the reply holds for these too, and Slurm may take long for another one
                asked.append(self._asked.get())
            for then in asked:
                if then is not None and not is_ending:
                    self._guard(then)

    @staticmethod
    def _guard(call: Callable[[], _Result]) -> _Result | None:
        """Call a function; return None if it fails: without this thread no death would be reported any more."""
        try:
            return call()
        except Exception:
            # Any error: this thread must continue to watch the job.
            log.exception("the state of the job could not be read or reported")
            return None

    def _ask(self, *, now: bool) -> None:
        was_over = self._monitor.over
        notices = self._monitor.tick(0.0) if now else self._monitor.tick()
        if self._is_closed.is_set():
            return
        for notice in notices:
            self._on_notice(notice)
        if self._monitor.over and not was_over:
            self._on_over(self._monitor.over)

    def _is_ending(self) -> bool:
        """Whether the job is over, or about to be."""
        started = time.monotonic()
        while not self._is_closed.is_set():
            self._ask(now=True)
            if self._monitor.over:
                return True
            waited_s = time.monotonic() - started
            ends = self._monitor.state is not None and self._monitor.state.state == "COMPLETING"
            if waited_s > (ENDING_SECONDS if ends else JOB_WATCH_LATE_SECONDS):
                return ends
            self._is_closed.wait(HURRIED_POLL_SECONDS)
        return True
