"""End processes that ranks left running when their nannies were killed with them.

Covers: recording which nanny is responsible for which rank's processes, ending the processes of killed nannies.
Does not cover: when a live nanny ends its rank's processes (``rank.nanny.nanny``).

A rank leads a session of processes (setsid). Its nanny holds a lock on an empty file that is named after the session,
in the cluster's folder on this host. A file without a lock holder belongs to a killed nanny. A process that starts
there or removes the folder ends what is left of that session: the kernel does not reuse its number while one of its
members runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from .process_table import WARM_PROCESS, runs, start_time
from .protocol.time_limits import RANK_SESSIONS_CHECK_SECONDS, RANK_SESSIONS_END_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

FOLDER = "sessions"  # below the cluster's folder on this host
# Processes of multiprocessing and joblib, and of torch, that remove shared memory.
CLEANERS = ("resource_tracker", "torch_shm_manager")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")  # containers may share the folder, but not the process IDs


class HeldSession:
    """A nanny's claim to its rank's processes; it ends with the nanny.

    ``local`` is the cluster's folder on this host, ``rank`` the process ID of the rank.
    """

    def __init__(self, local: Path, rank: int) -> None:
        self._path = local / FOLDER / f"{rank}-{start_time(rank)}-{_place()}"
        self._path.parent.mkdir(exist_ok=True)
        fresh = self._path.with_name(f"{self._path.name}.new")  # not under its name before it is locked
        self._lock = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fresh.rename(self._path)

    def release(self) -> None:
        """Release the claim: no process of the session is left."""
        self._path.unlink(missing_ok=True)
        os.close(self._lock)


def ranks_in(local: Path) -> set[int]:
    """Return the process IDs of the ranks whose sessions are in a cluster's folder on this host."""
    return {int(path.name.partition("-")[0]) for path in (local / FOLDER).glob(f"*-{_place()}")}


def end_abandoned(local: Path) -> None:
    """End what is left of the sessions in a cluster's folder whose nannies were killed.

    Sessions of another boot or process namespace can't be ended from here; they are left to a process that starts
    there.
    """
    for path in (local / FOLDER).glob(f"*-{_place()}"):
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # another process removes it; its nanny lives
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                number, started, _ = path.name.split("-", 2)
                end(partial(members, int(number), started))
                path.unlink(missing_ok=True)
            finally:
                os.close(lock)


def remove_unheld(local: Path, name: str) -> None:
    """Remove a cluster's folder on this host if no process holds a lock on its file of this name."""
    with contextlib.suppress(OSError):  # it is in use, was just removed, or there is no such file in it
        lock = os.open(local / name, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), (local / name).stat()):  # not removed and made again meanwhile
                end_abandoned(local)
                shutil.rmtree(local, ignore_errors=True)  # MPI's own processes may be removing their part of it
        finally:
            os.close(lock)


def end(find: Callable[[], Iterable[psutil.Process]]) -> None:
    """Kill the processes that ``find`` lists; those that remove the others' shared memory get the time to do so."""
    until = time.monotonic() + RANK_SESSIONS_END_SECONDS
    kill(find)
    while left := [each for each in find() if runs(each.pid)]:  # not zombies: another parent may never reap those
        if time.monotonic() > until:
            kill(find, but=())
            return
        psutil.wait_procs(left, RANK_SESSIONS_CHECK_SECONDS)  # this reaps our own children
        kill(find)


def kill(find: Callable[[], Iterable[psutil.Process]], but: tuple[str, ...] = CLEANERS) -> None:
    """Kill processes, except those that exit by themselves after removing the others' shared memory.

    ``find`` lists them. It is called again until it lists no others: those that it has not listed yet may fork.
    """
    until = time.monotonic() + RANK_SESSIONS_END_SECONDS
    seen: set[psutil.Process] = set()
    while (new := set(find()) - seen) and time.monotonic() < until:
        for process in new:
            try:
                if not any(name in argument for argument in process.cmdline() for name in but):
                    process.kill()
            except psutil.Error:
                continue  # it has just exited, or is another user's, e.g. run by sudo
        seen |= new


def members(leader: int, started: str) -> Iterator[psutil.Process]:
    """Yield the processes of a session; none if its number means another process by now."""
    if start_time(leader) not in (started, ""):
        return
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):  # it has just exited
            if os.getsid(pid) == leader:
                yield psutil.Process(pid)


def family(leader: int, started: str) -> list[psutil.Process]:
    """Return the processes of a session, and what they have started in sessions of its own."""
    found = {each.pid: each for each in members(leader, started)}
    for each in list(found.values()):
        found |= {child.pid: child for child in descendants(each.pid)}
    return list(found.values())


def descendants(pid: int) -> list[psutil.Process]:
    """Return what a process has started, without warm processes and their forks: others may depend on these."""
    found: list[psutil.Process] = []
    spared: set[int] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in psutil.Process(pid).children(recursive=True):  # parents come before their children
            with contextlib.suppress(psutil.Error):  # it has just exited, or is another user's
                if each.ppid() in spared or WARM_PROCESS in each.cmdline():
                    spared.add(each.pid)
                    continue
            found.append(each)
    return found


def _place() -> str:
    """Identify where process IDs mean the same processes: this boot of this machine, in this namespace."""
    return f"{PID_NAMESPACE.stat().st_ino}-{boot_id()}"


def boot_id() -> str:
    """Return what distinguishes this boot of this machine from all others; empty where Linux has no ID."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
