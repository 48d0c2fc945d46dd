"""A Slurm job beside the cluster whose ranks run in it.

Covers: a thread that asks Slurm now and then and tells what it says; whether a rank died of the end of its job.
Does not cover: what is said and when (``slurm.watch``), what follows from the end of the job (``hearing``).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from .slurm.watch import HURRIED_POLL_SECONDS, Poller
from .slurm.words import running_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from .slurm.job import SlurmJob

TURN_SECONDS = 1.0  # between two looks whether it is time to ask Slurm
LATE_SECONDS = 0.3  # by which Slurm may hear of the end of a job later than we of that of its ranks
ENDING_SECONDS = 60.0  # for a job to be over that is ending

log = logging.getLogger(__name__)
_Said = TypeVar("_Said")


class JobWatch:
    """Watch one job until it is closed.

    Parameters
    ----------
    job
        In which the ranks run.
    on_notice
        Called on the watch's thread with what a person should know.
    on_over
        Called on it once, with why the job is over.
    """

    def __init__(self, job: SlurmJob, on_notice: Callable[[str], None], on_over: Callable[[str], None]) -> None:
        self._poller = Poller(job)
        self._on_notice, self._on_over = on_notice, on_over
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: the end
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disttrain job", daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        """Where the job runs and until when, as Slurm has said last."""
        state = self._poller.state or self._poller.job.state()
        return running_text(state) if state.runs else self._poller.over or f"job {state.job_id}: {state.state.lower()}"

    def if_it_runs(self, then: Callable[[], None]) -> None:
        """Call ``then``, on the watch's thread, unless the job is ending: that explains what has just been seen."""
        self._asked.put(then)

    def close(self) -> None:
        """Watch no longer."""
        self._is_closed.set()
        self._asked.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            try:
                asked = [self._asked.get(timeout=TURN_SECONDS)]
            except queue.Empty:
                self._guard(lambda: self._ask(now=False))
                continue
            is_ending = self._guard(self._is_ending)
            while not self._asked.empty():  # the answer holds for these too, and Slurm may be slow to give one
                asked.append(self._asked.get())
            for then in asked:
                if then is not None and not is_ending:
                    self._guard(then)

    @staticmethod
    def _guard(call: Callable[[], _Said]) -> _Said | None:
        """Call, and return None if that failed: without this thread nobody would hear of a death any more."""
        try:
            return call()
        except Exception:
            log.exception("what is watched of the job could not be looked at or told")
            return None

    def _ask(self, *, now: bool) -> None:
        was_over = self._poller.over
        for notice in self._poller.tick(now=now):
            if not notice.is_over and not self._is_closed.is_set():
                self._on_notice(notice.text)
        if self._poller.over and not was_over and not self._is_closed.is_set():
            self._on_over(self._poller.over)

    def _is_ending(self) -> bool:
        """Whether the job is over, or about to be."""
        started = time.monotonic()
        while not self._is_closed.is_set():
            self._ask(now=True)
            if self._poller.over:
                return True
            waited_s = time.monotonic() - started
            ends = self._poller.state is not None and self._poller.state.state == "COMPLETING"
            if waited_s > (ENDING_SECONDS if ends else LATE_SECONDS):
                return ends
            self._is_closed.wait(HURRIED_POLL_SECONDS)
        return True
