"""The faults of the campaign that strike any of its cells.

Covers: errors, interrupts and bursts of them, stopped and killed ranks, nannies and mpiexec, a full disk.
Does not cover: what a first use of something imports and compiles (``fault_firsts``), what is checked (``faults``).

Each runs the cell, breaks it, waits for the prompt, and returns when it broke, in seconds since the epoch.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

from jupyter_disttrain.errors import DisttrainError, GivenUpError, RankFailure

from .cells import CELLS, FLOOD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jupyter_disttrain import CellRun, Cluster
    from jupyter_disttrain.cluster.events import Event

GRACE_S = 1.0  # for ranks to end once another has failed; part of the time of those rounds
PATIENCE_S = 60.0  # for anything that is checked
PRESSES = (2, 5)  # of a burst, at least and at most
LONGEST_PAUSE_S = 0.8  # between two of them
DISK = "256k"  # the size of the disk for logs that becomes full


@dataclass
class Round:
    """What was done in one round, and what came of it."""

    fault: str
    cell: str
    usable_s: float | None = None  # from the fault until an all_reduce of all ranks was done
    named_s: float | None = None  # from the failure until it was reported
    prepare: str = ""  # the cell that was run before
    probe: str = ""  # what uses once more what was interrupted
    pids: dict[int, int] = field(default_factory=dict)  # of the ranks that had the marks
    restart: bool = False  # the ranks, after all is checked
    stack: ExitStack = field(default_factory=ExitStack)  # what to undo then
    shown: str = ""  # how the cell ended
    missed: bool = False  # the cell ended before anything struck it
    lost: str = ""  # why the session did not come back
    dropped: bool = False  # the next cell did not run on every rank
    forgot: int = 0  # survivors that did not have their variables
    gave_up: bool = False  # the prompt came back while ranks still ran
    damaged: str = ""  # what fails on ranks that seem whole
    named: bool = False  # whether something shown says so, and what to do

    @property
    def failed(self) -> bool:
        """Whether something happened that must not."""
        return bool(self.lost or self.dropped or self.forgot or (self.damaged and not self.named))


class EarlyFailureError(DisttrainError):
    """A cell failed before anything was done to it."""


class _Watcher:
    """A person who sees the first failure, and presses stop then where the others wait for nobody and would go on."""

    def __init__(self, code: str) -> None:
        self._presses = code == CELLS["python loop"]
        self.named_at = 0.0  # seconds since the epoch

    def on_events(self, events: Sequence[Event], run: CellRun) -> None:  # noqa: ARG002
        """Look for the first failure."""
        if run.failures and not self.named_at:
            self.named_at = time.time()
            if self._presses:
                _press()

    def on_end(self, run: CellRun) -> None:
        """Do nothing."""


def _expect_failure(cluster: Cluster, result: Round, code: str) -> float:
    """Run a cell that ends in a failure, and return when the first rank failed."""
    watcher = _Watcher(code)
    try:
        cluster.run(code, timeout_s=PATIENCE_S, listener=watcher)
    except RankFailure as error:
        struck_at = min(failure.time_s for failure in error.failures)
        result.named_s = watcher.named_at - struck_at
        result.shown = words(error)
        return struck_at
    raise AssertionError("a cell that never ends has ended")


def _break_itself(cluster: Cluster, result: Round, code: str, _victim: int, _delay_s: float) -> float:
    return _expect_failure(cluster, result, code)


def _meanwhile(delay_s: float, act: Callable[[], None]) -> tuple[threading.Thread, list[float]]:
    """Act after a while; returns the thread and the moments at which it acted."""
    moments: list[float] = []

    def work() -> None:
        time.sleep(delay_s)  # the random moment is what is tested
        moments.append(time.time())
        act()

    thread = threading.Thread(target=work)
    thread.start()
    return thread, moments


def _press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupted(
    cluster: Cluster, result: Round, code: str, delay_s: float, press: Callable[[], None], *, ends: bool = False
) -> float:
    """Run a cell that is interrupted after a while, and wait until its ranks have ended it, also without a prompt."""
    thread, moments = _meanwhile(delay_s, press)
    struck_at = time.time()
    try:
        cluster.run(code, timeout_s=PATIENCE_S)
    except (RankFailure, KeyboardInterrupt) as error:
        if not moments:
            raise EarlyFailureError(words(error)) from error
        struck_at = moments[-1]
        result.shown, result.gave_up = words(error), isinstance(error, GivenUpError)
    else:
        if not ends:
            raise AssertionError("a cell that never ends has ended")
        result.missed = True
    finally:
        _join(thread)
    deadline = time.monotonic() + PATIENCE_S
    while any(entry.state == "running" for entry in cluster.table) and time.monotonic() < deadline:
        time.sleep(0.05)
    return struck_at


def words(error: BaseException) -> str:
    """Return all that an error tells, its ranks' tracebacks too."""
    lines = error._render_traceback_() if isinstance(error, RankFailure) else [repr(error)]
    return "\n".join(lines)


def _join(thread: threading.Thread) -> None:
    """Wait for a thread whose last interrupt may come when there is nothing left to interrupt."""
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt:
            continue


def _interrupt(cluster: Cluster, result: Round, code: str, _victim: int, delay_s: float) -> float:
    return interrupted(cluster, result, code, delay_s, _press)


def _interrupt_twice(cluster: Cluster, result: Round, code: str, _victim: int, delay_s: float) -> float:
    def press() -> None:
        _press()
        time.sleep(delay_s / 20)
        if any(entry.state == "running" for entry in cluster.table):
            _press()

    return interrupted(cluster, result, code, delay_s, press)


def presses(seed: float) -> Callable[[Cluster], None]:
    """Return what presses stop some times at random, as long as ranks run."""
    choose = random.Random(seed)

    def press(cluster: Cluster) -> None:
        for _ in range(choose.randint(*PRESSES)):
            if any(entry.state == "running" for entry in cluster.table):
                _press()
            time.sleep(choose.uniform(0.0, LONGEST_PAUSE_S))

    return press


def _burst(cluster: Cluster, result: Round, code: str, _victim: int, delay_s: float) -> float:
    return interrupted(cluster, result, code, delay_s, lambda: presses(delay_s)(cluster))


def _hang(cluster: Cluster, result: Round, code: str, _victim: int, delay_s: float) -> float:
    """One rank never comes; the person waits for a while and presses stop."""
    return interrupted(cluster, result, code, delay_s + 0.5, _press)


def _stop_and_go(cluster: Cluster, result: Round, code: str, victim: int, delay_s: float) -> float:
    """One rank is stopped, the person presses stop, later the rank goes on."""
    pid = cluster.table[victim].info.pid

    def press() -> None:
        os.kill(pid, signal.SIGSTOP)
        _press()
        time.sleep(delay_s)
        os.kill(pid, signal.SIGCONT)

    return interrupted(cluster, result, code, delay_s, press) + delay_s


def _killed(cluster: Cluster, result: Round, code: str, processes: Sequence[psutil.Process], delay_s: float) -> float:
    def kill() -> None:
        for process in processes:
            process.kill()

    thread, moments = _meanwhile(delay_s, kill)
    watcher = _Watcher(code)
    try:
        cluster.run(code, timeout_s=PATIENCE_S, listener=watcher)
    except RankFailure as error:
        if not moments:
            raise EarlyFailureError(words(error)) from error
        result.named_s, result.shown = watcher.named_at - moments[0], words(error)
        return moments[0]
    finally:
        _join(thread)
    raise AssertionError("a cell that never ends has ended")


def _ranks(cluster: Cluster, victim: int, count: int) -> list[psutil.Process]:
    """Return the processes of some ranks, one or more from the victim on."""
    ranks = [(victim + number) % cluster.world_size for number in range(count)]
    return [psutil.Process(cluster.table[rank].info.pid) for rank in ranks]


def _nannies(cluster: Cluster, victim: int, count: int) -> list[psutil.Process]:
    parents = [process.parent() for process in _ranks(cluster, victim, count)]
    return [parent for parent in parents if parent is not None]


def _kill(cluster: Cluster, result: Round, code: str, victim: int, delay_s: float) -> float:
    return _killed(cluster, result, code, _ranks(cluster, victim, 1), delay_s)


def _kill_two(cluster: Cluster, result: Round, code: str, victim: int, delay_s: float) -> float:
    return _killed(cluster, result, code, _ranks(cluster, victim, 2), delay_s)


def _kill_nanny(cluster: Cluster, result: Round, code: str, victim: int, delay_s: float) -> float:
    return _killed(cluster, result, code, _nannies(cluster, victim, 1), delay_s)


def _kill_two_nannies(cluster: Cluster, result: Round, code: str, victim: int, delay_s: float) -> float:
    return _killed(cluster, result, code, _nannies(cluster, victim, 2), delay_s)


def _mpiexec() -> psutil.Process:
    """Return the process that has started the ranks."""
    names = ("mpiexec", "prterun", "prte")
    return next(each for each in psutil.Process().children(recursive=True) if each.name() in names)


def _stop_mpiexec(cluster: Cluster, result: Round, code: str, _victim: int, delay_s: float) -> float:
    """Stop mpiexec as a job control would, press stop, and have it go on later."""
    mpiexec = _mpiexec()

    def press() -> None:
        mpiexec.suspend()
        _press()
        time.sleep(delay_s)
        mpiexec.resume()

    return interrupted(cluster, result, code, delay_s, press) + delay_s


def _kill_mpiexec(cluster: Cluster, result: Round, code: str, _victim: int, delay_s: float) -> float:
    """Kill mpiexec, and press stop in what its ranks go on with."""
    mpiexec = _mpiexec()

    def press() -> None:
        mpiexec.kill()
        time.sleep(delay_s)
        if any(entry.state == "running" for entry in cluster.table):
            _press()

    result.restart = True  # without it no rank could be replaced with its MPI
    return interrupted(cluster, result, code, delay_s, press)


@contextmanager
def _small_disk() -> Iterator[str]:
    """Mount a disk that is full soon, for what ranks print."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder], check=True, capture_output=True)
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def why_no_disk() -> str:
    """Return why there can be no small disk; empty if there can be one."""
    try:
        with _small_disk():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no tmpfs can be mounted here ({getattr(error, 'stderr', b'').decode().strip() or error})"


def _full_disk(cluster: Cluster, result: Round, code: str, _victim: int, delay_s: float) -> float:
    """Have the ranks print more than the disk of their logs takes, then press stop in the cell."""
    folder = result.stack.enter_context(_small_disk())
    before = os.environ.get("JUPYTER_DATA_DIR")
    os.environ["JUPYTER_DATA_DIR"] = folder
    try:
        cluster.reset()
    finally:
        if before is None:
            del os.environ["JUPYTER_DATA_DIR"]
        else:
            os.environ["JUPYTER_DATA_DIR"] = before
    run = cluster.run(FLOOD, timeout_s=PATIENCE_S)
    if any(len(text) < 1_000_000 for text in run.stdout.values()):
        result.lost = "what the ranks printed was not all shown"
    cluster.run(result.prepare, timeout_s=PATIENCE_S)
    struck_at = interrupted(cluster, result, code, delay_s, _press)
    result.pids = {entry.info.rank: entry.info.pid for entry in cluster.table}
    result.restart = True
    return struck_at


FAULTS: dict[str, Callable[[Cluster, Round, str, int, float], float]] = {
    "interrupt": _interrupt,
    "interrupt twice": _interrupt_twice,
    "burst of interrupts": _burst,
    "kill": _kill,
    "kill two": _kill_two,
    "kill nanny": _kill_nanny,
    "kill two nannies": _kill_two_nannies,
    "raise": _break_itself,
    "sys.exit": _break_itself,
    "exit": _break_itself,
    "segfault": _break_itself,
    "hang": _hang,
    "stop and go": _stop_and_go,
    "stop mpiexec": _stop_mpiexec,
    "kill mpiexec": _kill_mpiexec,
    "full disk": _full_disk,
}


MPI_FAULTS = ("stop mpiexec", "kill mpiexec")  # of that launcher alone
