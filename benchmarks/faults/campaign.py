"""``python -m benchmarks.faults``: break sessions at random, and see whether they come back.

Covers: rounds of faults at random moments of random cells; what has to be so after each; how long it took.
Does not cover: the faults (``fault_kinds``, ``fault_firsts``), the texts that a user sees (the tests do).

A session is a cluster that lives through many rounds. Every round leaves marks on the ranks, runs a cell that would
never end, breaks something in it, and then checks that the very next cell runs on every rank, that survivors have their
marks, that all ranks can all_reduce, that what was interrupted can be used again, and that nothing has grown.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shlex
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.lib.processes import TOKEN_VARIABLE, new_token, with_token
from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import DisttrainError

from .cells import CELLS, CHECK, COUNT, IMPORTS, MARKS, MPI_CELL, PREPARE, PROBES
from .first_use import FIRST_FAULTS, why_no_transformers
from .kinds import FAULTS as ANYWHERE
from .kinds import GRACE_S, MPI_FAULTS, PATIENCE_S, Round, why_no_disk, words

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULTS = Path(__file__).parents[1] / "results" / "faults.md"
PROBE_S = 180.0  # for a whole first use of what was interrupted, on few cores
LONGEST_DELAY_S = 0.6
FAULTS = ANYWHERE | FIRST_FAULTS
REQUIREMENTS = {"full disk": why_no_disk, "first import of transformers": why_no_transformers}
STRAY_S = 10.0  # for what a fault has left to end
ALLOWED_GROWTH = 6  # descriptors or threads of one process over a campaign


@dataclass
class Campaign:
    """Rounds of several sessions."""

    random: random.Random
    faults: Sequence[str]  # to choose from
    rounds: list[Round] = field(default_factory=list)
    grown: list[str] = field(default_factory=list)

    def session(self, n: int, launcher: str, rounds: int) -> None:
        """Break one session ``rounds`` times; a lost one is replaced, and counted."""
        before = _own_counts()
        os.environ[TOKEN_VARIABLE] = new_token()
        while rounds > 0:
            with Cluster(n=n, launcher=launcher, grace_s=GRACE_S, hang_after_s=5.0) as cluster:
                rounds -= self._break_session(cluster, launcher, rounds)
            self._count_strays(cluster, "the session's end")
        left = {name: count - before[name] for name, count in _own_counts().items() if count > before[name]}
        self.grown += [f"the notebook's process kept {count} {name} of a session" for name, count in left.items()]

    def _break_session(self, cluster: Cluster, launcher: str, rounds: int) -> int:
        """Run rounds until one is lost; returns how many were run."""
        first: dict[int, tuple[Counter[str], int, int]] = {}
        for number in range(rounds):
            result = self._round(cluster)
            self._count_strays(cluster, f"{result.fault} in {result.cell}")
            self.rounds.append(result)
            usable = "ended before" if result.missed else "-" if result.usable_s is None else f"{result.usable_s:.2f} s"
            usable += ", prompt back before the ranks" * result.gave_up
            where = f"{cluster.world_size} ranks, {launcher}"
            print(f"{len(self.rounds):4} {where}: {result.fault} in {result.cell}: {usable} {result.lost}", flush=True)
            if result.damaged:
                print(f"     damaged{' (named)' * result.named}: {result.damaged}", flush=True)
            if result.lost:
                return number + 1
            if number + 1 in (rounds // 2, rounds):  # by half time each cell has made what it makes only once
                self._compare(cluster, first)
        return rounds

    def _count_strays(self, cluster: Cluster, after: str) -> None:
        """Count the processes that were started for a session, and belong neither to it nor to a rank's nanny."""
        deadline = time.monotonic() + STRAY_S
        while (strays := _strays(cluster)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for stray in strays:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.grown.append(f"process {stray.pid} was left over after {after}: {shlex.join(stray.cmdline())}")
                stray.kill()

    def _compare(self, cluster: Cluster, first: dict[int, tuple[Counter[str], int, int]]) -> None:
        """Compare what each process of a rank holds with what it held when it was seen first."""
        counts = cluster.run(COUNT, timeout_s=PATIENCE_S).results
        for rank, (pid, descriptors, threads, children) in counts.items():
            before, *then = first.setdefault(pid, (descriptors, threads, children))
            added = "".join(f" +{count} {kind}" for kind, count in (descriptors - before).items())
            for what, a, b, allowed in (
                ("descriptors", before.total(), descriptors.total(), ALLOWED_GROWTH),
                ("threads", then[0], threads, ALLOWED_GROWTH),
                ("child processes", then[1], children, 0),
            ):
                if b > a + allowed:
                    self.grown.append(f"rank {rank}: {a} {what} at first, {b} at last{added}")

    def _round(self, cluster: Cluster) -> Round:
        choose = self.random
        is_mpi = cluster.config.launcher == "mpi" and not cluster.mpi_lost  # without its world there is no mpiexec
        cells = CELLS | ({"MPI allreduce": MPI_CELL} if is_mpi else {})
        faults = [fault for fault in self.faults if is_mpi or fault not in MPI_FAULTS]
        fault, cell = choose.choice(faults), choose.choice(list(cells))
        result = Round(fault=fault, cell=cell)
        victim = choose.randrange(cluster.world_size)
        mark = choose.randrange(1000) * 100
        prepare = MARKS if fault in FIRST_FAULTS else MARKS + PREPARE
        result.prepare = prepare.format(mark=mark, victim=victim, at=choose.randrange(1, 12), fault=fault)
        if cell in PROBES:
            result.probe = IMPORTS + PROBES[cell]
        with result.stack:
            try:
                cluster.run(result.prepare, timeout_s=PATIENCE_S)
                result.pids = {entry.info.rank: entry.info.pid for entry in cluster.table}
                struck_at = FAULTS[fault](cluster, result, cells[cell], victim, choose.uniform(0.0, LONGEST_DELAY_S))
            except (DisttrainError, TimeoutError, KeyboardInterrupt) as error:
                doing = " | ".join(cluster.where())
                result.lost = f"the round itself failed: {type(error).__name__}: {error} ({doing})"
                return result
            self._check(cluster, result, mark)
            result.usable_s = None if result.lost or result.missed else time.time() - struck_at
            if result.probe and not result.lost:
                _use_again(cluster, result)
            if result.restart and not result.lost:
                cluster.reset()
        return result

    @staticmethod
    def _check(cluster: Cluster, result: Round, mark: int) -> None:
        ranks = range(cluster.world_size)
        try:
            has_world = cluster.config.launcher == "mpi" and not cluster.mpi_lost
            found = cluster.run(CHECK.format(has_world=has_world), timeout_s=PATIENCE_S).results
        except (DisttrainError, KeyboardInterrupt) as error:
            doing = " | ".join(cluster.where())
            result.lost, result.dropped = f"the next cell failed: {type(error).__name__}: {error} ({doing})", True
            return
        if set(found) != set(ranks):
            result.lost, result.dropped = f"the next cell ran on {sorted(found)} alone", True
            return
        total = float(sum(rank + 1 for rank in ranks))
        for rank, (pid, reduced, in_mpi, kept, tensor) in found.items():
            if reduced != [total] or in_mpi != cluster.world_size:
                result.lost = f"all_reduce gave {reduced} on rank {rank}, not {total}; MPI's {in_mpi}"
            survived = pid == result.pids[rank]
            expected = (mark + rank, [float(mark + rank)]) if survived else (None, [0.0])
            if (kept, tensor) != expected:
                result.forgot += survived
                result.lost = f"rank {rank} has {kept, tensor} in place of {expected}"


def _use_again(cluster: Cluster, result: Round) -> None:
    """Use what was interrupted once more; see whether ranks are damaged, and whether anything shown says so."""
    try:
        cluster.run(result.probe, timeout_s=PROBE_S)
    except (DisttrainError, KeyboardInterrupt) as error:
        result.damaged = words(error)
        result.named = "%dist_reset -r" in result.damaged + result.shown
        cluster.reset()


def _own_counts() -> Counter[str]:
    me = psutil.Process()
    return Counter(
        descriptors=me.num_fds(),
        processes=len(me.children(recursive=True)),
        threads=sum("disttrain" in thread.name for thread in threading.enumerate()),
    )


def summary(campaign: Campaign, seed: int) -> list[str]:
    """Return the figures as lines of Markdown."""
    rounds = campaign.rounds
    lost = [each for each in rounds if each.lost]
    times = sorted(each.usable_s for each in rounds if each.usable_s is not None)
    dropped, forgot = sum(each.dropped for each in rounds), sum(each.forgot for each in rounds)
    damaged = [each for each in rounds if each.damaged]
    silent = sum(not each.named for each in damaged)
    missed, given_up = sum(each.missed for each in rounds), sum(each.gave_up for each in rounds)
    took = f"{statistics.median(times):.2f} s (median), {_p95(times):.2f} s (p95)" if times else "-"
    head = f"seed {seed}: {len(rounds)} rounds, {len(lost)} sessions lost, {dropped} cells dropped, usable again after "
    counts = f"Variables of {forgot} surviving ranks were lost; ranks were damaged {silent} times without a word, "
    counts += f"{len(damaged) - silent} times with one. The prompt came back before the ranks {given_up} times; "
    lines = [
        head + took,
        "",
        counts + f"{missed} cells had ended before anything struck them.",
        "",
        "| fault | rounds | median | p95 | longest | reported after (median) |",
        "|---|---|---|---|---|---|",
    ]
    for fault in FAULTS:
        found = sorted(each.usable_s for each in rounds if each.fault == fault and each.usable_s is not None)
        if found:
            median = statistics.median(found)
            named = [each.named_s for each in rounds if each.fault == fault and each.named_s is not None]
            reported = f"{statistics.median(named) * 1000:.0f} ms" if named else "-"
            figures = f"{median:.2f} s | {_p95(found):.2f} s | {found[-1]:.2f} s | {reported}"
            lines.append(f"| {fault} | {len(found)} | {figures} |")
    lines += ["", *(f"- lost: {each.fault} in {each.cell}: {each.lost}" for each in lost)]
    lines += [f"- damaged{' (named)' * each.named}: {each.fault} in {each.cell}: {each.damaged}" for each in damaged]
    lines += [f"- grown: {words}" for words in campaign.grown] or ["No process, thread or descriptor was left over."]
    return lines


def _strays(cluster: Cluster) -> list[psutil.Process]:
    roots = [os.getpid(), *(entry.nanny_pid for entry in cluster.table)]  # which lose their parent with mpiexec
    known: set[int] = set()
    for pid in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            known |= {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    found = {each.pid: each for each in with_token(os.environ[TOKEN_VARIABLE])}
    return [each for pid, each in found.items() if pid not in known]


def _p95(ordered: list[float]) -> float:
    return ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]


def main() -> int:
    """Run the campaign; the exit status is 1 if something was lost, dropped, damaged without a word, or grew."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--launcher", nargs="+", default=["mpi", "local"])
    parser.add_argument("--fault", nargs="+", default=list(FAULTS), choices=list(FAULTS), help="those alone")
    parser.add_argument("--write", action="store_true", help=f"write the figures to {RESULTS.name}")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without it
    left_out = {name: reason for name, why in REQUIREMENTS.items() if name in arguments.fault and (reason := why())}
    notes = [f"{name} is left out: {reason}" for name, reason in left_out.items()]
    print("\n".join(notes), flush=True)
    texts, failed = notes, False
    for seed in arguments.seed:
        faults = [fault for fault in arguments.fault if fault not in left_out]
        campaign = Campaign(random=random.Random(seed), faults=faults)
        kinds = [(n, launcher) for n in arguments.ranks for launcher in arguments.launcher]
        for at, (n, launcher) in enumerate(kinds):
            campaign.session(n, launcher, len(range(at, arguments.rounds, len(kinds))))
        text = summary(campaign, seed)
        print("\n".join(["", *text, ""]), flush=True)
        texts.append("\n".join(text))
        failed |= bool(campaign.grown) or any(each.failed for each in campaign.rounds)
    if arguments.write:
        heading = f"# Fault campaign\n\nIn all times of raise and sys.exit stand {GRACE_S:g} s of grace.\n\n"
        RESULTS.write_text(heading + "\n\n".join(texts) + "\n")
    return int(failed)
