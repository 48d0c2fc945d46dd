"""Cause the faults that can occur in any cell.

Covers: errors, interrupts and bursts of them, stopped and killed ranks, nannies and mpiexec, a full disk.
Does not cover: interrupts of a first use (first_use), checking the session afterwards (campaign).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil

from benchmarks.lib.listener import CellListener
from jupyter_disttrain.errors import GivenUpError, RankFailure

from .cells import CELLS, FLOOD
from .round import CHECK_TIMEOUT_S, EarlyFailureError, Fault, Round, error_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jupyter_disttrain import CellRun, Cluster
    from jupyter_disttrain.client.cells.events import Event

BURST = (2, 5)  # fewest and most interrupts of a burst
MAX_PAUSE_S = 0.8  # between two interrupts of a burst
DISK_SIZE = "256k"  # of the disk for logs that becomes full
MPIEXEC_NAMES = ("mpiexec", "prterun", "prte")


class _FailureListener(CellListener):
    """Records when the first failure is reported, and then interrupts a cell whose other ranks would run on."""

    def __init__(self, code: str) -> None:
        self._interrupts = code == CELLS["python loop"]
        self.reported_at = 0.0  # seconds since the epoch

    def on_events(self, events: Sequence[Event], run: CellRun) -> None:  # noqa: ARG002
        """Look for the first failure."""
        if run.failures and not self.reported_at:
            self.reported_at = time.time()
            if self._interrupts:
                _send_interrupt()


def _cell_causes_fault(cluster: Cluster, result: Round, code: str, _victim: int, _delay_s: float) -> float:
    """Run a cell that causes its own fault; returns when the first rank failed."""
    listener = _FailureListener(code)
    try:
        cluster.run(code, timeout_s=CHECK_TIMEOUT_S, listener=listener)
    except RankFailure as error:
        failed_at = min(failure.time_s for failure in error.failures)
        result.reported_s = listener.reported_at - failed_at
        result.message = error_text(error)
        return failed_at
    raise AssertionError("a cell with an endless loop has ended")


def _after_delay(delay_s: float, action: Callable[[], None]) -> tuple[threading.Thread, list[float]]:
    """Run an action on a thread after a delay; returns the thread and a list that gets the time of the action."""
    times: list[float] = []

    def work() -> None:
        time.sleep(delay_s)  # faults at random times are what is tested
        times.append(time.time())
        action()

    thread = threading.Thread(target=work)
    thread.start()
    return thread, times


def _send_interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _any_rank_runs(cluster: Cluster) -> bool:
    return any(entry.state == "running" for entry in cluster.table)


def run_interrupted(
    cluster: Cluster, result: Round, code: str, delay_s: float, interrupt: Callable[[], None], *, ends: bool = False
) -> float:
    """Run a cell and call ``interrupt`` after a delay; wait until no rank runs, also if the call returned before.

    ``ends`` permits the cell to end before the interrupt.
    """
    thread, times = _after_delay(delay_s, interrupt)
    fault_at = time.time()
    try:
        cluster.run(code, timeout_s=CHECK_TIMEOUT_S)
    except (RankFailure, KeyboardInterrupt) as error:
        if not times:
            raise EarlyFailureError(error_text(error)) from error
        fault_at = times[-1]
        result.message, result.returned_early = error_text(error), isinstance(error, GivenUpError)
    else:
        if not ends:
            raise AssertionError("a cell with an endless loop has ended")
        result.missed = True
    finally:
        _join(thread)
    deadline = time.monotonic() + CHECK_TIMEOUT_S
    while _any_rank_runs(cluster) and time.monotonic() < deadline:
        time.sleep(0.05)
    return fault_at


def _join(thread: threading.Thread) -> None:
    """Wait for a thread whose last interrupt may arrive after the cell has ended."""
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt:
            continue


def _interrupt(cluster: Cluster, result: Round, code: str, _victim: int, delay_s: float) -> float:
    return run_interrupted(cluster, result, code, delay_s, _send_interrupt)


def _interrupt_twice(cluster: Cluster, result: Round, code: str, _victim: int, delay_s: float) -> float:
    def interrupt() -> None:
        _send_interrupt()
        time.sleep(delay_s / 20)
        if _any_rank_runs(cluster):
            _send_interrupt()

    return run_interrupted(cluster, result, code, delay_s, interrupt)


def burst_of_interrupts(cluster: Cluster, seed: float) -> Callable[[], None]:
    """Return a function that sends several interrupts with random pauses, as long as ranks run."""
    choose = random.Random(seed)

    def interrupt() -> None:
        for _ in range(choose.randint(*BURST)):
            if _any_rank_runs(cluster):
                _send_interrupt()
            time.sleep(choose.uniform(0.0, MAX_PAUSE_S))

    return interrupt


def _burst(cluster: Cluster, result: Round, code: str, _victim: int, delay_s: float) -> float:
    return run_interrupted(cluster, result, code, delay_s, burst_of_interrupts(cluster, delay_s))


def _hang(cluster: Cluster, result: Round, code: str, _victim: int, delay_s: float) -> float:
    """Interrupt a cell in which one rank sleeps and the others wait for it."""
    return run_interrupted(cluster, result, code, delay_s + 0.5, _send_interrupt)


def _run_suspended(cluster: Cluster, result: Round, code: str, process: psutil.Process, delay_s: float) -> float:
    """Suspend a process, interrupt the cell, and resume the process later; returns the time of the resumption."""

    def interrupt() -> None:
        process.suspend()
        _send_interrupt()
        time.sleep(delay_s)
        process.resume()

    return run_interrupted(cluster, result, code, delay_s, interrupt) + delay_s


def _stop_and_go(cluster: Cluster, result: Round, code: str, victim: int, delay_s: float) -> float:
    (rank,) = _ranks(cluster, victim, 1)
    return _run_suspended(cluster, result, code, rank, delay_s)


def _stop_mpiexec(cluster: Cluster, result: Round, code: str, _victim: int, delay_s: float) -> float:
    return _run_suspended(cluster, result, code, _mpiexec(), delay_s)


def _run_killed(
    cluster: Cluster, result: Round, code: str, processes: Sequence[psutil.Process], delay_s: float
) -> float:
    """Run a cell and kill processes after a delay."""

    def kill() -> None:
        for process in processes:
            process.kill()

    thread, times = _after_delay(delay_s, kill)
    listener = _FailureListener(code)
    try:
        cluster.run(code, timeout_s=CHECK_TIMEOUT_S, listener=listener)
    except RankFailure as error:
        if not times:
            raise EarlyFailureError(error_text(error)) from error
        result.reported_s, result.message = listener.reported_at - times[0], error_text(error)
        return times[0]
    finally:
        _join(thread)
    raise AssertionError("a cell with an endless loop has ended")


def _ranks(cluster: Cluster, victim: int, count: int) -> list[psutil.Process]:
    """Return the processes of ``count`` ranks, from the victim on."""
    ranks = [(victim + number) % cluster.world_size for number in range(count)]
    return [psutil.Process(cluster.table[rank].info.pid) for rank in ranks]


def _nannies(cluster: Cluster, victim: int, count: int) -> list[psutil.Process]:
    parents = [process.parent() for process in _ranks(cluster, victim, count)]
    return [parent for parent in parents if parent is not None]


def _kill(processes_of: Callable[[Cluster, int, int], list[psutil.Process]], count: int) -> Fault:
    """Return the fault that kills the processes of ``count`` ranks."""

    def kill(cluster: Cluster, result: Round, code: str, victim: int, delay_s: float) -> float:
        return _run_killed(cluster, result, code, processes_of(cluster, victim, count), delay_s)

    return kill


def _mpiexec() -> psutil.Process:
    """Return the process that has started the ranks."""
    children = psutil.Process().children(recursive=True)
    return next(each for each in children if each.name() in MPIEXEC_NAMES)


def _kill_mpiexec(cluster: Cluster, result: Round, code: str, _victim: int, delay_s: float) -> float:
    """Kill mpiexec, then interrupt the cell, which continues on the ranks."""
    mpiexec = _mpiexec()

    def interrupt() -> None:
        mpiexec.kill()
        time.sleep(delay_s)
        if _any_rank_runs(cluster):
            _send_interrupt()

    result.restart = True  # without mpiexec no replacement of a rank could join MPI
    return run_interrupted(cluster, result, code, delay_s, interrupt)


@contextmanager
def _small_disk() -> Iterator[str]:
    """Mount a disk of ``DISK_SIZE``; yields its folder."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["-t", "tmpfs", "-o", f"size={DISK_SIZE}"]
        subprocess.run(["mount", *options, "tmpfs", folder], check=True, capture_output=True)
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def small_disk_problem() -> str:
    """Return why no small disk can be mounted; empty if it can."""
    try:
        with _small_disk():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"cannot mount a tmpfs ({getattr(error, 'stderr', b'').decode().strip() or error})"


def _full_disk(cluster: Cluster, result: Round, code: str, _victim: int, delay_s: float) -> float:
    """Print more on the ranks than fits on the disk of their logs, then interrupt the cell."""
    folder = result.cleanup.enter_context(_small_disk())
    before = os.environ.get("JUPYTER_DATA_DIR")
    os.environ["JUPYTER_DATA_DIR"] = folder
    try:
        cluster.reset()
    finally:
        if before is None:
            del os.environ["JUPYTER_DATA_DIR"]
        else:
            os.environ["JUPYTER_DATA_DIR"] = before
    run = cluster.run(FLOOD, timeout_s=CHECK_TIMEOUT_S)
    if any(len(text) < 1_000_000 for text in run.stdout.values()):
        result.lost = "the output of the ranks is incomplete"
    cluster.run(result.prepare, timeout_s=CHECK_TIMEOUT_S)
    fault_at = run_interrupted(cluster, result, code, delay_s, _send_interrupt)
    result.pids = {entry.info.rank: entry.info.pid for entry in cluster.table}
    result.restart = True
    return fault_at


FAULTS: dict[str, Fault] = {
    "interrupt": _interrupt,
    "interrupt twice": _interrupt_twice,
    "burst of interrupts": _burst,
    "kill": _kill(_ranks, 1),
    "kill two": _kill(_ranks, 2),
    "kill nanny": _kill(_nannies, 1),
    "kill two nannies": _kill(_nannies, 2),
    "raise": _cell_causes_fault,
    "sys.exit": _cell_causes_fault,
    "exit": _cell_causes_fault,
    "segfault": _cell_causes_fault,
    "hang": _hang,
    "stop and go": _stop_and_go,
    "stop mpiexec": _stop_mpiexec,
    "kill mpiexec": _kill_mpiexec,
    "full disk": _full_disk,
}
MPI_FAULTS = ("stop mpiexec", "kill mpiexec")  # only with the launcher mpi
