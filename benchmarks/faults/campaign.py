"""Run rounds of faults in sessions and check each session after every round.

Covers: choosing a fault and a cell, the checks after a round, growth of processes over a session.
Does not cover: causing the faults (kinds, first_use), the summary (report), messages to the user (the tests).

A session is one cluster that is used for many rounds. Every round sets variables on the ranks, runs a cell with an
endless loop and causes a fault in it. Then it checks that the next cell runs on every rank, that surviving ranks have
their variables, that all ranks can all_reduce, that what was interrupted can be used again, and that no process keeps
more threads, descriptors or children.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

from benchmarks.lib.processes import TOKEN_VARIABLE, WARM_PROCESS, name_of, new_token, with_token
from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import DisttrainError

from .cells import CELLS, CHECK, COUNT, IMPORTS, MPI_CELL, PREPARE, PROBES, SET_VARIABLES
from .first_use import FIRST_FAULTS, transformers_problem
from .kinds import FAULTS as FAULTS_IN_ANY_CELL
from .kinds import MPI_FAULTS, small_disk_problem
from .round import CHECK_TIMEOUT_S, GRACE_S, PROBE_TIMEOUT_S, Round, error_text

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

MAX_DELAY_S = 0.6
FAULTS = FAULTS_IN_ANY_CELL | FIRST_FAULTS
REQUIREMENTS = {"full disk": small_disk_problem, "first import of transformers": transformers_problem}
EXIT_TIMEOUT_S = 10.0  # for processes that a fault has left without a parent
ALLOWED_GROWTH = 6  # descriptors or threads of one process over a session
Counts = tuple[Counter[str], int, int]  # descriptors by kind, threads, child processes


@dataclass
class Campaign:
    """Rounds of several sessions."""

    random: random.Random
    faults: Sequence[str]  # to choose from
    rounds: list[Round] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)

    def run_session(self, n: int, launcher: str, rounds: int) -> None:
        """Run ``rounds`` rounds with ``n`` ranks; a session that is lost is replaced by a new one."""
        before = _notebook_counts()
        os.environ[TOKEN_VARIABLE] = new_token()
        while rounds > 0:
            with Cluster(n=n, launcher=launcher, grace_s=GRACE_S, hang_after_s=5.0) as cluster:
                rounds -= self._run_rounds(cluster, launcher, rounds)
            self._find_orphans(cluster, "the end of the session")
        for name, count in _notebook_counts().items():
            if count > before[name]:
                self.leaks.append(f"the notebook's process kept {count - before[name]} {name} of a session")

    def _run_rounds(self, cluster: Cluster, launcher: str, rounds: int) -> int:
        """Run rounds until the session is lost; returns how many were run."""
        first: dict[int, Counts] = {}
        for number in range(rounds):
            result = self._run_round(cluster)
            self._find_orphans(cluster, f"{result.fault} in {result.cell}")
            self.rounds.append(result)
            self._print(cluster, launcher, result)
            if result.lost:
                return number + 1
            if number + 1 in (rounds // 2, rounds):  # in the first half, every cell has initialized its libraries
                self._compare_counts(cluster, first)
        return rounds

    def _print(self, cluster: Cluster, launcher: str, result: Round) -> None:
        if result.missed:
            outcome = "the cell ended before the fault"
        else:
            outcome = "not recovered" if result.recovery_s is None else f"recovered after {result.recovery_s:.2f} s"
        outcome += ", returned before the ranks ended" * result.returned_early
        outcome += f": {result.lost}" if result.lost else ""
        where = f"{cluster.world_size} ranks, {launcher}"
        print(f"{len(self.rounds):4} {where}: {result.fault} in {result.cell}: {outcome}", flush=True)
        if result.damaged:
            print(f"     damaged{' (reported)' * result.damage_reported}: {result.damaged}", flush=True)

    def _find_orphans(self, cluster: Cluster, after: str) -> None:
        """Record and kill processes of the session that are no descendants of the notebook or of a nanny."""
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while (orphans := _orphans(cluster)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for orphan in orphans:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.leaks.append(f"process {orphan.pid} still ran after {after}: {shlex.join(orphan.cmdline())}")
                orphan.kill()

    def _compare_counts(self, cluster: Cluster, first: dict[int, Counts]) -> None:
        """Compare the counts of each rank's process with the first ones of the same process."""
        counts = cluster.run(COUNT, timeout_s=CHECK_TIMEOUT_S).results
        for rank, (pid, descriptors, threads, children) in counts.items():
            first_descriptors, first_threads, first_children = first.setdefault(pid, (descriptors, threads, children))
            added = "".join(f" +{count} {kind}" for kind, count in (descriptors - first_descriptors).items())
            for name, before, now, allowed in (
                ("descriptors", first_descriptors.total(), descriptors.total(), ALLOWED_GROWTH),
                ("threads", first_threads, threads, ALLOWED_GROWTH),
                ("child processes", first_children, children, 0),
            ):
                if now > before + allowed:
                    self.leaks.append(f"rank {rank}: {name} grew from {before} to {now}{added}")

    def _run_round(self, cluster: Cluster) -> Round:
        choose = self.random
        is_mpi = has_mpi_world(cluster)  # otherwise there is no mpiexec
        cells = CELLS | ({"MPI allreduce": MPI_CELL} if is_mpi else {})
        faults = [fault for fault in self.faults if is_mpi or fault not in MPI_FAULTS]
        fault, cell = choose.choice(faults), choose.choice(list(cells))
        result = Round(fault=fault, cell=cell)
        victim = choose.randrange(cluster.world_size)
        value = choose.randrange(1000) * 100
        prepare = SET_VARIABLES if fault in FIRST_FAULTS else SET_VARIABLES + PREPARE
        result.prepare = prepare.format(value=value, victim=victim, step=choose.randrange(1, 12), fault=fault)
        if cell in PROBES:
            result.probe = IMPORTS + PROBES[cell]
        with result.cleanup:
            try:
                cluster.run(result.prepare, timeout_s=CHECK_TIMEOUT_S)
                result.pids = {entry.info.rank: entry.info.pid for entry in cluster.table}
                fault_at = FAULTS[fault](cluster, result, cells[cell], victim, choose.uniform(0.0, MAX_DELAY_S))
            except (DisttrainError, TimeoutError, KeyboardInterrupt) as error:
                result.lost = f"the round failed: {_describe(error, cluster)}"
                return result
            _check(cluster, result, value)
            result.recovery_s = None if result.lost or result.missed else time.time() - fault_at
            if result.probe and not result.lost:
                _run_probe(cluster, result)
            if result.restart and not result.lost:
                cluster.reset()
        return result


def _describe(error: BaseException, cluster: Cluster) -> str:
    return f"{type(error).__name__}: {error} ({' | '.join(cluster.where())})"


def has_mpi_world(cluster: Cluster) -> bool:
    """Return whether MPI's world holds all ranks."""
    return cluster.config.launcher == "mpi" and not cluster._session.launch.state.mpi_lost  # noqa: SLF001


def _check(cluster: Cluster, result: Round, value: int) -> None:
    """Check that the next cell runs on every rank, all_reduce works and surviving ranks have their variables."""
    ranks = range(cluster.world_size)
    try:
        found = cluster.run(CHECK.format(has_world=has_mpi_world(cluster)), timeout_s=CHECK_TIMEOUT_S).results
    except (DisttrainError, KeyboardInterrupt) as error:
        result.lost, result.dropped = f"the next cell failed: {_describe(error, cluster)}", True
        return
    if set(found) != set(ranks):
        result.lost, result.dropped = f"the next cell ran only on ranks {sorted(found)}", True
        return
    total = float(sum(rank + 1 for rank in ranks))
    for rank, (pid, reduced, mpi_size, number, tensor) in found.items():
        if reduced != [total] or mpi_size != cluster.world_size:
            result.lost = f"all_reduce gave {reduced} on rank {rank}, not {total}; MPI counted {mpi_size} ranks"
        survived = pid == result.pids[rank]
        expected = (value + rank, [float(value + rank)]) if survived else (None, [0.0])
        if (number, tensor) != expected:
            result.forgotten += survived
            result.lost = f"rank {rank} has the variables {number, tensor}, expected {expected}"


def _run_probe(cluster: Cluster, result: Round) -> None:
    """Use what was interrupted; if that fails, look for a message that names the damage."""
    try:
        cluster.run(result.probe, timeout_s=PROBE_TIMEOUT_S)
    except (DisttrainError, KeyboardInterrupt) as error:
        result.damaged = error_text(error)
        result.damage_reported = "%dist_reset -r" in result.damaged + result.message
        cluster.reset()


def _notebook_counts() -> Counter[str]:
    this_process = psutil.Process()
    return Counter(
        descriptors=this_process.num_fds(),
        processes=len(this_process.children(recursive=True)),
        threads=sum("disttrain" in thread.name for thread in threading.enumerate()),
    )


def _orphans(cluster: Cluster) -> list[psutil.Process]:
    roots = [os.getpid(), *(entry.nanny_pid for entry in cluster.table)]  # nannies lose their parent with mpiexec
    known: set[int] = set()
    for pid in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            known |= {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    found = {process.pid: process for process in with_token(os.environ[TOKEN_VARIABLE])}
    return [process for pid, process in found.items() if pid not in known and name_of(process) != WARM_PROCESS]
